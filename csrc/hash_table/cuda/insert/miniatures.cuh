// Miniatures on the GPU.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "hash_table/clock.h"
#include "hash_table/table_view.h"

namespace torchrec_hkv::hash_table::cuda {

// Bytes of scratch that simulate needs for a batch, and of `numbers`.
size_t miniature_scratch(int64_t num_ids);
size_t miniature_number_bytes(int32_t num_tables);

// Passes the ids of a call to the miniatures of the tables. numbers: zeros before; not a part of
// scratch.
void simulate(const TableView* tables, int32_t num_tables, const Batch& batch, const Visit& visit,
              void* scratch, uint32_t* numbers, cudaStream_t stream);

}  // namespace torchrec_hkv::hash_table::cuda
