// Scores decide which id leaves a full bucket: the lowest score; among equal scores the id that was
// looked up longest ago. Under kAgedLfu scores are compared after aging, see hash_table/aged_lfu.h.
#pragma once

#include <cstdint>

#include "common/macros.h"

namespace torchrec_hkv {

enum class Eviction : int32_t {
  kLru = 0,         // score = step of the last lookup
  kLfu = 1,         // score = number of lookups, or the sum of the given counts
  kEpochLru = 2,    // score = epoch in the high 32 bits, step in the low
  kEpochLfu = 3,    // score = epoch of the last lookup in the high 32 bits, lookups in the low
  kCustomized = 4,  // score = the last given value, as bits that are compared unsigned
  kAgedLfu = 5,     // score as under kLfu; aged_lfu.h compares it
};

// Whether a policy takes scores with ids: counts under the frequency policies (1 by default), the
// score itself under kCustomized.
HKV_HOST_DEVICE bool takes_scores(Eviction policy) {
  return policy == Eviction::kLfu || policy == Eviction::kAgedLfu ||
         policy == Eviction::kEpochLfu || policy == Eviction::kCustomized;
}

// Whether an id's score is the sum over its lookups.
HKV_HOST_DEVICE bool sums_scores(Eviction policy) {
  return policy == Eviction::kLfu || policy == Eviction::kAgedLfu || policy == Eviction::kEpochLfu;
}

// Whether scores are counts of 63 bits.
HKV_HOST_DEVICE bool counts_lookups(Eviction policy) {
  return policy == Eviction::kLfu || policy == Eviction::kAgedLfu;
}

// LRU scores are the last steps, which every table has; other policies need a score array.
HKV_HOST_DEVICE bool keeps_scores(Eviction policy) { return policy != Eviction::kLru; }

// The scores that tables of a group store.
enum class StoredScores {
  kNone,      // all tables evict by LRU
  kReplaced,  // a lookup replaces the score
  kSums,      // of some table: a lookup adds to the score
};

HKV_HOST_DEVICE StoredScores scores_stored_by(Eviction policy) {
  return sums_scores(policy)    ? StoredScores::kSums
         : keeps_scores(policy) ? StoredScores::kReplaced
                                : StoredScores::kNone;
}

// The maximum of a count; callers get counts as int64.
constexpr uint64_t kMaxCounts = ~0ull >> 1;

HKV_HOST_DEVICE uint64_t with_epoch(uint32_t epoch, uint64_t low) {
  return static_cast<uint64_t>(epoch) << 32 | (low > 0xffffffffull ? 0xffffffffull : low);
}

// Score of a new id.
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
      return old + given > kMaxCounts || old > kMaxCounts ? kMaxCounts : old + given;
    case Eviction::kEpochLfu:
      return with_epoch(epoch, (old & 0xffffffffull) + with_epoch(0, given));
    default:
      return first_score(policy, now, epoch, given);
  }
}

// If both buckets have free slots, an id takes its first bucket until that is three quarters full
// (finds then read one line), and later the emptier one, so that no bucket fills before the others.
HKV_HOST_DEVICE bool prefers_first(int bucket_slots, int free_first, int free_second) {
  if (free_first == 0) return false;
  return free_first > bucket_slots / 4 || free_first >= free_second;
}

}  // namespace torchrec_hkv
