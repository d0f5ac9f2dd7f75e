// What a call needs to compare the words of a table's CountedSteps, on the CPU.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

#include "common/initial_rows_avx512.h"
#include "hash_table/counted_steps.h"
#include "hash_table/cpu/high_ranks.h"
#include "hash_table/cpu/short_ranks.h"

namespace torchrec_hkv::hash_table::cpu {

// The number by which words are compared, as a signed integer.
enum class WordOrder {
  kStep,   // the step as a distance from the begin of the window
  kCount,  // the count above the step. Higher if the count has high bits, below 0 if the step is
           // far
  kRank,   // a short rank
};

// Computed once a call for each table, since the step of a call and its half-life do not change.
struct WordRanks {
  WordRanks() = default;
  WordRanks(const Ranking& table_ranking, uint32_t window_begin, uint32_t first_pinned)
      : ranking(table_ranking), pinned_from(first_pinned), begin(window_begin) {
    const uint32_t first = pinned_from > begin ? pinned_from - begin : 0;
    last_unpinned = static_cast<int32_t>(std::min(first, CountedSteps::kWindow)) - 1;
    if (!ranking.aged) return;
    order = ranking.half_life == 0 ? WordOrder::kStep : WordOrder::kRank;
    const auto last = static_cast<uint32_t>(std::max(last_unpinned, 0));
    short_ranks = ShortRanks(ranking, last);
    high_ranks = HighRanks(ranking, last);
  }

  // note_high: the call has read high bits of counts; later prefetches include them. Any thread may
  // call both.
  void note_high() const {
    std::atomic_ref<bool> noted(reads_high);
    if (!noted.load(std::memory_order_relaxed)) noted.store(true, std::memory_order_relaxed);
  }
  bool needs_high() const {
    return std::atomic_ref<bool>(reads_high).load(std::memory_order_relaxed);
  }

  Ranking ranking{};
  uint32_t pinned_from = 0;
  uint32_t begin = 0;
  int32_t last_unpinned = -1;  // the largest distance that is not pinned; -1: all are
  WordOrder order = WordOrder::kCount;
  ShortRanks short_ranks;
  HighRanks high_ranks;
  mutable bool reads_high = false;
#ifdef HKV_AVX512
  bool wide = has_avx512();
#endif
};

// The words of a bucket that have the lowest number, pinned ones included unless said otherwise.
struct LowestWords {
  uint64_t positions;  // one bit each
  bool differ;         // whether these words differ, if ordered by kRank
  bool far;            // whether a word has kIsFar; nothing else is valid then
};

}  // namespace torchrec_hkv::hash_table::cpu
