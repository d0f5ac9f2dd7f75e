// The first part of find_or_insert on the GPU.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "hash_table/table_view.h"

namespace torchrec_hkv::hash_table::cuda {

// As find, and touches what it finds.
void find_and_touch(const TableView* tables, const TableView* only, const Batch& batch,
                    const Visit& visit, int64_t* slots, bool* found, cudaStream_t stream);

}  // namespace torchrec_hkv::hash_table::cuda
