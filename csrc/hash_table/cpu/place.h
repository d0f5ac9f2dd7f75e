// Selects the slot of a new id, on the CPU.
#pragma once

#include <algorithm>
#include <cstdint>

#include "hash_table/cpu/bucket.h"
#include "hash_table/table_view.h"

namespace torchrec_hkv::hash_table::cpu {

// The free positions of a bucket, one bit each.
inline uint64_t free_positions(const TableView& table, uint32_t bucket) {
  return match_digests(digest_line(table, bucket), kEmptyDigest);
}

// Whether an id takes its first bucket without a look at the second. Buckets only fill while ids
// are placed, so this also held for all earlier ids of the call.
inline bool takes_first(const TableView& table, uint64_t free_first) {
  return prefers_first(table.bucket_slots, __builtin_popcountll(free_first), kBucketDigests);
}

// A free slot in the better of the two buckets, or kNoSlot.
inline int64_t free_slot(const TableView& table, const BucketChoice& choice, uint64_t free_first) {
  if (takes_first(table, free_first)) {
    return first_slot_of(table, choice.first) + __builtin_ctzll(free_first);
  }
  const uint64_t free_second = free_positions(table, choice.second);
  if ((free_first | free_second) == 0) return kNoSlot;
  const bool first = prefers_first(table.bucket_slots, __builtin_popcountll(free_first),
                                   __builtin_popcountll(free_second));
  return first_slot_of(table, first ? choice.first : choice.second) +
         __builtin_ctzll(first ? free_first : free_second);
}

inline int64_t free_slot(const TableView& table, const BucketChoice& choice) {
  return free_slot(table, choice, free_positions(table, choice.first));
}

}  // namespace torchrec_hkv::hash_table::cpu
