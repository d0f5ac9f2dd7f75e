// Where an id goes, on the CPU.
#pragma once

#include <cstdint>

#include "hash_table/bucket_cpu.h"
#include "hash_table/table_view.h"

namespace torchrec_hkv::hash_table::cpu {

// A free slot in the better of the two buckets, or kNoSlot.
inline int64_t free_slot(const TableView& table, const BucketChoice& choice) {
  const uint64_t free_first = match_digests(digest_line(table, choice.first), kEmptyDigest);
  const uint64_t free_second = match_digests(digest_line(table, choice.second), kEmptyDigest);
  if ((free_first | free_second) == 0) return kNoSlot;
  const bool first = prefers_first(table.bucket_slots, __builtin_popcountll(free_first),
                                   __builtin_popcountll(free_second));
  return first_slot_of(table, first ? choice.first : choice.second) +
         __builtin_ctzll(first ? free_first : free_second);
}

struct Victim {
  int64_t slot;  // kNoSlot: none
  Rank rank;
};

// The slot of the lowest rank in two full buckets. Pinned slots do not take part.
inline Victim lowest_rank(const TableView& table, const BucketChoice& choice,
                          uint32_t pinned_from) {
  Victim lowest{kNoSlot, {UINT64_MAX, UINT32_MAX}};
  const uint32_t buckets[2] = {choice.first, choice.second};
  const int num = choice.first == choice.second ? 1 : 2;
  for (int b = 0; b < num; ++b) {
    const int64_t base = first_slot_of(table, buckets[b]);
    for (int64_t slot = base; slot < base + table.bucket_slots; ++slot) {
      const Rank rank = rank_of(table, slot);
      if (rank.last_step < pinned_from && rank < lowest.rank) lowest = Victim{slot, rank};
    }
  }
  return lowest;
}

}  // namespace torchrec_hkv::hash_table::cpu
