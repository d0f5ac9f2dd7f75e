// The lowest rank of a full bucket, on the CPU.
#pragma once

#include <cstdint>

#include "common/select.h"
#include "hash_table/cpu/bucket.h"
#include "hash_table/cpu/lowest_counted.h"
#include "hash_table/cpu/lowest_score.h"
#include "hash_table/cpu/word_ranks.h"
#include "hash_table/table_view.h"

namespace torchrec_hkv::hash_table::cpu {

// What a call needs to rank the entries of a table: computed once.
struct TableRanks {
  TableRanks(const TableView& table, uint32_t first_pinned) : pinned_from(first_pinned) {
    if (table.counted.enabled()) {
      words = WordRanks(table.ranking(), table.counted.begin(), pinned_from);
    }
  }

  uint32_t pinned_from;
  WordRanks words;  // if the table has CountedSteps
};

// The slots of the lowest rank in a full bucket, without pinned slots.
inline LowestRank lowest_rank_in(const TableView& table, const TableRanks& ranks, uint32_t bucket) {
  const int64_t base = first_slot_of(table, bucket);
  const int32_t n = table.bucket_slots;
  if (table.counted.enabled()) return lowest_counted(ranks.words, table.counted, base, n);
  const uint32_t* const steps = table.last_steps + base;
  if (table.scores == nullptr) return oldest_of(steps, n, ranks.pinned_from);
  return lowest_score<false>(Ranking{}, table.scores + base, steps, n, ranks.pinned_from);
}

// Selects the victim of two buckets; that of the first bucket if they are equal.
inline Victim lower_rank(const Victim& first, const Victim& second) {
  const Rank &a = first.rank, &b = second.rank;
  const bool other = (b.score < a.score) | ((b.score == a.score) & (b.last_step < a.last_step));
  return Victim{static_cast<int64_t>(select(other, second.slot, first.slot)),
                {select(other, b.score, a.score),
                 static_cast<uint32_t>(select(other, b.last_step, a.last_step))}};
}

// The first slot of the lowest rank in two full buckets.
inline Victim lowest_rank(const TableView& table, const TableRanks& ranks,
                          const BucketChoice& choice) {
  const auto in = [&](uint32_t bucket) {
    return lowest_rank_in(table, ranks, bucket).first(first_slot_of(table, bucket));
  };
  return lower_rank(in(choice.first), in(choice.second));
}

inline void prefetch_ranks(const TableView& table, const TableRanks& ranks, uint32_t bucket) {
  const int64_t base = first_slot_of(table, bucket);
  const uint32_t* const steps =
      table.counted.enabled() ? table.counted.words : table.last_steps.get();
  prefetch_bytes(&steps[base], table.bucket_slots * sizeof(uint32_t));
  if (ranks.words.needs_high()) {
    prefetch_bytes(&table.counted.window->high[base], table.bucket_slots * sizeof(uint16_t));
  }
  if (table.scores != nullptr) {
    prefetch_bytes(&table.scores[base], table.bucket_slots * sizeof(uint64_t));
  }
}

}  // namespace torchrec_hkv::hash_table::cpu
