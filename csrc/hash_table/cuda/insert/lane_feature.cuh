// The feature of a position, for all lanes of a warp at once.
#pragma once

#include <cstdint>

#include "hash_table/cuda/bucket.cuh"
#include "hash_table/table_view.h"

namespace torchrec_hkv::hash_table::cuda {

// Feature of each lane's position, equal to Batch::feature_of. If all lanes have the same feature,
// as is usual, one load of the offsets replaces the search. If offsets decrease, it searches, so
// that all kernels agree on features. Called by all lanes.
__device__ __forceinline__ int32_t feature_of_lane(const Batch& batch, int64_t at) {
  const int lane = threadIdx.x % kWarp;
  const int64_t first = at - lane;
  const int64_t last = min(first + kWarp, batch.num_ids) - 1;
  if (batch.num_features <= kWarp) {
    const int64_t start = lane < batch.num_features ? batch.feature_start(lane) : INT64_MAX;
    const int64_t before = __shfl_up_sync(kAllLanes, start, 1);
    const bool in_order = __all_sync(kAllLanes, lane == 0 || before <= start);
    const int begun = __popc(__ballot_sync(kAllLanes, start <= first));
    const int begun_later = __popc(__ballot_sync(kAllLanes, start <= last));
    if (in_order && begun == begun_later) return max(begun - 1, 0);
  }
  return at < batch.num_ids ? batch.feature_of(at) : 0;
}

}  // namespace torchrec_hkv::hash_table::cuda
