// Runs miniatures (miniatures.h) on the GPU.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "hash_table/clock.h"
#include "hash_table/cuda/insert/miniature_lists.cuh"
#include "hash_table/table_view.h"

namespace torchrec_hkv::hash_table::cuda {

// Passes the listed ids of a call to the miniatures of the tables.
void simulate(const TableView* tables, const Batch& batch, const CallContext& context,
              const SampleLists& lists, cudaStream_t stream);

}  // namespace torchrec_hkv::hash_table::cuda
