// Invalid offsets: bags that decrease or overrun the ids.
#pragma once

#include <cstdint>

#include "hash_table/cuda/bucket.cuh"
#include "hash_table/table_view.h"

namespace torchrec_hkv::hash_table::cuda {

// Whether a bag's offsets are invalid.
__device__ __forceinline__ bool is_bad_bag(const Batch& batch, int64_t bag, int64_t from,
                                           int64_t to) {
  return from < 0 || to < from || to > batch.num_ids || (bag == 0 && from != 0) ||
         (bag + 1 == batch.num_bags && to != batch.num_ids);
}

// Reports an invalid bag, unless another one is already reported.
__device__ __forceinline__ void refuse_bag(const Batch& batch, int64_t bag, int64_t from,
                                           int64_t to) {
  if (batch.refused == nullptr || atomicExch(batch.refused, 1u) != 0) return;
  volatile BadOffsets* const report = batch.bad_offsets;
  report->bag = bag;
  report->from = from;
  report->to = to;
  report->num_ids = batch.num_ids;
  __threadfence_system();  // if the host sees `found`, it sees the others
  report->found = batch.group_number;
}

// All threads of a grid check all bags of the batch. Refuses an invalid bag and stores its number,
// counted from 1.
__device__ __forceinline__ void note_bad_bag(const Batch& batch, int64_t* bad_bag) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t bag = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
       bag < batch.num_bags; bag += step) {
    const int64_t from = batch.offsets[bag], to = batch.offsets[bag + 1];
    if (is_bad_bag(batch, bag, from, to)) {
      refuse_bag(batch, bag, from, to);
      *bad_bag = bag + 1;
    }
  }
}

// Whether a kernel before this one has refused offsets.
__device__ __forceinline__ bool is_refused(const Batch& batch) {
  return batch.refused != nullptr && load_l2(batch.refused) != 0;
}

}  // namespace torchrec_hkv::hash_table::cuda
