// Scores: which id leaves a full bucket.
#pragma once

#include <cstdint>

#include "common/macros.h"

namespace torchrec_hkv {

// The lowest goes. LRU: the step of the last training lookup. LFU: the number of training lookups;
// among equals the longest unseen goes.
HKV_HOST_DEVICE uint64_t lru_score(uint32_t last_step) { return last_step; }
HKV_HOST_DEVICE uint64_t lfu_score(uint32_t frequency, uint32_t last_step) {
  return static_cast<uint64_t>(frequency) << 32 | last_step;
}

// With free slots in both buckets an id takes its first one until that is three quarters full
// (finds then read one line), later the emptier one, which keeps every bucket from filling before
// the others.
HKV_HOST_DEVICE bool prefers_first(int bucket_slots, int free_first, int free_second) {
  if (free_first == 0) return false;
  return free_first > bucket_slots / 4 || free_first >= free_second;
}

}  // namespace torchrec_hkv
