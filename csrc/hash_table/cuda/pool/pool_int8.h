// The forward of groups with rows of 8 bits.
#pragma once

#include <cstdint>

#include "hash_table/kernels.h"

namespace torchrec_hkv::hash_table::cuda {

void pool_int8(const TableView* tables, const Batch& batch, const int64_t* slots, Pooling pooling,
               Output<char> out, const GroupShape& shape, cudaStream_t stream);

}  // namespace torchrec_hkv::hash_table::cuda
