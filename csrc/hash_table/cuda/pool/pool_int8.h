// Pooling of rows of 8 bits whose dims are multiples of four.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "hash_table/table_view.h"

namespace torchrec_hkv::hash_table::cuda {

// As pool_rows. shape.four_wide, all rows have 8 bits, and out.stride is a multiple of four.
void pool_int8(const TableView* tables, const Batch& batch, const int64_t* slots, Pooling pooling,
               Output<char> out, const GroupShape& shape, cudaStream_t stream);

}  // namespace torchrec_hkv::hash_table::cuda
