// Miniatures on the GPU.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "hash_table/clock.h"
#include "hash_table/table_view.h"

namespace torchrec_hkv::hash_table::cuda {

// Bytes of scratch that simulate needs for a batch.
size_t miniature_scratch(int64_t num_ids);

// Has the miniatures of the tables see a call's ids.
void simulate(const TableView* tables, int32_t num_tables, const Batch& batch, const Visit& visit,
              void* scratch, cudaStream_t stream);

}  // namespace torchrec_hkv::hash_table::cuda
