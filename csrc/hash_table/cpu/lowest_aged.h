// The lowest rank with aging of a miniature's set, on the CPU.
#pragma once

#include <cstdint>

#include "hash_table/aged_lfu.h"
#include "hash_table/cpu/lowest_lanes.h"
#include "hash_table/cpu/lowest_of_subset.h"
#include "hash_table/cpu/lowest_score.h"
#include "hash_table/cpu/short_ranks.h"

namespace torchrec_hkv::hash_table::cpu {

// The unpinned entries of the lowest rank. Those of the lowest short rank are compared exactly.
// short_ranks: those of the ranking, for steps below pinned_from.
inline LowestRank lowest_aged(const Ranking& ranking,
                              [[maybe_unused]] const ShortRanks& short_ranks,
                              const uint32_t* counts, const uint32_t* steps, int32_t n,
                              uint32_t pinned_from) {
#ifdef __AVX2__
  if (n >= kNumberLanes && short_ranks.fit()) {
    const ShortRankLanes ranks(short_ranks);
    const __m256i first_pinned = eight_of(pinned_from);
    const LowestNumber low = lowest_number(n, [&](int32_t p) {
      const __m256i step = load_eight(steps + p);
      return _mm256_or_si256(ranks.of(load_eight(counts + p), step),
                             greater_equal(step, first_pinned));
    });
    if (low.number == UINT32_MAX) return kAllPinned;
    const LowestRank lowest = lowest_of_subset(
        ranking, low.positions, ShortRankLanes::kMax, [&](int p) { return counts[p]; },
        [&](int p) { return steps[p]; });
    if (!is_unknown(lowest)) return lowest;
  }
#endif
  return lowest_score<true>(ranking, counts, steps, n, pinned_from);
}

}  // namespace torchrec_hkv::hash_table::cpu
