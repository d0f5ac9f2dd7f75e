// Pooling of rows whose dims are multiples of four, the usual case.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "hash_table/table_view.h"

namespace torchrec_hkv::hash_table::cuda {

// As pool_rows. shape.four_wide, and out.stride is a multiple of four. hot: batches have had hot
// ids; only speed depends on it.
void pool_four_wide(const TableView* tables, const Batch& batch, const int64_t* slots,
                    Pooling pooling, Output<char> out, const GroupShape& shape, bool hot,
                    cudaStream_t stream);

// From this number of positions on, rows that are read once evict from L2 all that the next kernels
// need. If each bag has one id, rows are then read with the evict-last policy, with which memory
// serves reads among as many writes faster.
constexpr int64_t kManyOnce = int64_t{1} << 19;

}  // namespace torchrec_hkv::hash_table::cuda
