// Where an id goes, on the CPU.
#pragma once

#include <algorithm>
#include <cstdint>

#include "hash_table/bucket_cpu.h"
#include "hash_table/table_view.h"

namespace torchrec_hkv::hash_table::cpu {

// The free positions of a bucket, a bit each.
inline uint64_t free_positions(const TableView& table, uint32_t bucket) {
  return match_digests(digest_line(table, bucket), kEmptyDigest);
}

// Whether an id takes its first bucket whatever the second is like. While ids are placed, buckets
// only fill: if it holds now, it held for all ids of this call that have come before.
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

struct Victim {
  int64_t slot;  // kNoSlot: none
  Rank rank;
};

// Last steps and scores of a bucket.
inline void prefetch_ranks(const TableView& table, uint32_t bucket) {
  const int64_t base = first_slot_of(table, bucket);
  prefetch_bytes(&table.last_steps[base], table.bucket_slots * sizeof(uint32_t));
  if (table.scores != nullptr) {
    prefetch_bytes(&table.scores[base], table.bucket_slots * sizeof(uint64_t));
  }
}

// The first slot of the lowest rank in a full bucket. Pinned slots do not take part. Loops without
// branches, so that a compiler can vectorise them.
inline Victim lowest_rank_in(const TableView& table, uint32_t bucket, uint32_t pinned_from) {
  const int64_t base = first_slot_of(table, bucket);
  const int32_t n = table.bucket_slots;
  const uint32_t* steps = table.last_steps + base;
  uint64_t low = UINT64_MAX;
  uint32_t step = UINT32_MAX;
  if (table.scores == nullptr) {
    for (int32_t p = 0; p < n; ++p) step = std::min(step, steps[p]);
    if (step >= pinned_from) return Victim{kNoSlot, {UINT64_MAX, UINT32_MAX}};
    low = step;
  } else {
    const uint64_t* scores = table.scores + base;
    for (int32_t p = 0; p < n; ++p) {
      low = std::min(low, steps[p] < pinned_from ? scores[p] : UINT64_MAX);
    }
    for (int32_t p = 0; p < n; ++p) {
      if (scores[p] == low && steps[p] < pinned_from) step = std::min(step, steps[p]);
    }
    if (step == UINT32_MAX) return Victim{kNoSlot, {UINT64_MAX, UINT32_MAX}};
  }
  int32_t at = 0;
  while (steps[at] != step || (table.scores != nullptr && table.scores[base + at] != low)) ++at;
  return Victim{base + at, {low, step}};
}

// The same in two full buckets.
inline Victim lowest_rank(const TableView& table, const BucketChoice& choice,
                          uint32_t pinned_from) {
  const Victim first = lowest_rank_in(table, choice.first, pinned_from);
  if (choice.first == choice.second) return first;
  const Victim second = lowest_rank_in(table, choice.second, pinned_from);
  return second.rank < first.rank ? second : first;
}

}  // namespace torchrec_hkv::hash_table::cpu
