// The lowest rank with aging of a miniature's set, on the CPU.
#pragma once

#include <cstdint>

#include "hash_table/aged_lfu.h"
#include "hash_table/cpu/lowest_lanes.h"
#include "hash_table/cpu/lowest_score.h"

namespace torchrec_hkv::hash_table::cpu {

// No result. Differs from kAllPinned, whose score is the highest.
constexpr Lowest kUnknown{0, {0, 0}};

inline bool is_unknown(const Lowest& lowest) {
  return lowest.positions == 0 && lowest.rank.score == 0;
}

// The lowest of some entries by exact rank. positions: a bit for each. Returns kUnknown if a count
// is above `most`, because the caller has ranked it too low.
template <typename CountAt, typename StepAt>
inline Lowest lowest_of_some(const Ranking& ranking, uint64_t positions, uint64_t most,
                             const CountAt& count_at, const StepAt& step_at) {
  Lowest lowest = kAllPinned;
  for (uint64_t left = positions; left != 0; left &= left - 1) {
    const int p = __builtin_ctzll(left);
    const uint64_t count = count_at(p);
    if (count > most) [[unlikely]]
      return kUnknown;
    const uint32_t step = step_at(p);
    const Rank rank{ranking.of(count, step), step};
    if (lowest.rank < rank) continue;
    const uint64_t others = rank < lowest.rank ? 0 : lowest.positions;
    lowest = Lowest{others | uint64_t{1} << p, rank};
  }
  return lowest;
}

// The entries of the lowest rank, without the pinned ones. All entries are ranked in whole steps
// first. Those of the lowest such rank, usually one, are then ranked exactly.
inline Lowest lowest_aged(const Ranking& ranking, const uint32_t* counts, const uint32_t* steps,
                          int32_t n, uint32_t pinned_from) {
#ifdef __AVX2__
  constexpr uint32_t kMostRanked = 1 << 15;
  if (n >= kNumberLanes && has_whole_ranks(ranking) && pinned_from <= INT32_MAX) {
    const WholeRanks ranks(ranking, kMostRanked);
    const __m256i first_pinned = eight_of(pinned_from);
    const LowestNumber low = lowest_number(n, [&](int32_t p) {
      const __m256i step = load_eight(steps + p);
      return _mm256_or_si256(ranks.of(load_eight(counts + p), step), not_below(step, first_pinned));
    });
    if (low.number == UINT32_MAX) return kAllPinned;
    const Lowest lowest = lowest_of_some(
        ranking, low.positions, kMostRanked, [&](int p) { return counts[p]; },
        [&](int p) { return steps[p]; });
    if (!is_unknown(lowest)) return lowest;
  }
#endif
  return lowest_score<true>(ranking, counts, steps, n, pinned_from);
}

}  // namespace torchrec_hkv::hash_table::cpu
