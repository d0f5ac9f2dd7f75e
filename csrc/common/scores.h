// Scores: which id leaves a full bucket. The lowest goes; among equals the one looked up longest
// ago. Under kAgedLfu scores are not compared as they are, see hash_table/aged_lfu.h.
#pragma once

#include <cstdint>

#include "common/macros.h"

namespace torchrec_hkv {

enum class Eviction : int32_t {
  kLru = 0,         // score = step of the last lookup
  kLfu = 1,         // score = lookups, or the counts given with them, added up
  kEpochLru = 2,    // score = epoch in the high 32 bits, step in the low
  kEpochLfu = 3,    // score = epoch of the last lookup in the high 32 bits, lookups in the low
  kCustomized = 4,  // score = what was given last, as bits that are compared without a sign
  kAgedLfu = 5,     // score as under kLfu; aged_lfu.h says how it is compared
};

// Whether a policy takes scores with ids: counts under the frequency policies, where 1 stands for
// none given; the score itself under kCustomized.
HKV_HOST_DEVICE bool takes_scores(Eviction policy) {
  return policy == Eviction::kLfu || policy == Eviction::kAgedLfu ||
         policy == Eviction::kEpochLfu || policy == Eviction::kCustomized;
}

// Whether a score is the sum of what all lookups of an id give.
HKV_HOST_DEVICE bool sums_scores(Eviction policy) {
  return policy == Eviction::kLfu || policy == Eviction::kAgedLfu || policy == Eviction::kEpochLfu;
}

// LRU scores are the last steps, which every table keeps; the others need an array of their own.
HKV_HOST_DEVICE bool keeps_scores(Eviction policy) { return policy != Eviction::kLru; }

// Counts add up to at most this, and callers get them as int64.
constexpr uint64_t kMostCounts = ~0ull >> 1;

HKV_HOST_DEVICE uint64_t with_epoch(uint32_t epoch, uint64_t low) {
  return static_cast<uint64_t>(epoch) << 32 | (low > 0xffffffffull ? 0xffffffffull : low);
}

// Score of an id that is inserted.
HKV_HOST_DEVICE uint64_t first_score(Eviction policy, uint32_t now, uint32_t epoch,
                                     uint64_t given) {
  switch (policy) {
    case Eviction::kLru:
      return now;
    case Eviction::kEpochLru:
      return with_epoch(epoch, now);
    case Eviction::kEpochLfu:
      return with_epoch(epoch, given);
    default:
      return given;
  }
}

// Score of an id that is looked up again.
HKV_HOST_DEVICE uint64_t next_score(Eviction policy, uint64_t old, uint32_t now, uint32_t epoch,
                                    uint64_t given) {
  switch (policy) {
    case Eviction::kLfu:
    case Eviction::kAgedLfu:
      return old + given > kMostCounts || old > kMostCounts ? kMostCounts : old + given;
    case Eviction::kEpochLfu:
      return with_epoch(epoch, (old & 0xffffffffull) + with_epoch(0, given));
    default:
      return first_score(policy, now, epoch, given);
  }
}

// With free slots in both buckets an id takes its first one until that is three quarters full
// (finds then read one line), later the emptier one, which keeps every bucket from filling before
// the others.
HKV_HOST_DEVICE bool prefers_first(int bucket_slots, int free_first, int free_second) {
  if (free_first == 0) return false;
  return free_first > bucket_slots / 4 || free_first >= free_second;
}

}  // namespace torchrec_hkv
