// Pooling of float32 rows of many columns.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "hash_table/table_view.h"

namespace torchrec_hkv::hash_table::cuda {

// As pool_rows. Rows are float32, dims and out.stride multiples of four.
void pool_wide(const TableView* tables, const Batch& batch, const int64_t* slots, Pooling pooling,
               Output<char> out, cudaStream_t stream);

}  // namespace torchrec_hkv::hash_table::cuda
