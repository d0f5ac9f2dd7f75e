// The clock on the GPU.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "hash_table/clock.h"
#include "hash_table/cuda/bucket.cuh"

namespace torchrec_hkv::hash_table::cuda {

// Advances the clock. Called by all lanes of one warp of the grid.
__device__ __forceinline__ void tick_warp(Clock* clock, const Tick& tick) {
  const int lane = threadIdx.x % kWarp;
  const uint32_t now = next_step(clock->now, tick);
  uint32_t oldest = now;
  for (int32_t pin_index = lane; pin_index < kMaxPins; pin_index += kWarp) {
    oldest = min(oldest, tick_pin(*clock, tick, pin_index, now));
  }
  oldest = __reduce_min_sync(kAllLanes, oldest);  // all lanes have read `now` too
  if (lane != 0) return;
  clock->now = now;
  clock->pinned_from = oldest;
}

}  // namespace torchrec_hkv::hash_table::cuda
