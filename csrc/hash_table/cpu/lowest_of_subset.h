// The lowest of a few entries by exact rank, on the CPU.
#pragma once

#include <cstdint>

#include "hash_table/aged_lfu.h"
#include "hash_table/cpu/lowest_score.h"

namespace torchrec_hkv::hash_table::cpu {

// No result. Differs from kAllPinned, whose score is the highest.
constexpr LowestRank kUnknown{0, {0, 0}};

inline bool is_unknown(const LowestRank& lowest) {
  return lowest.positions == 0 && lowest.rank.score == 0;
}

// The lowest of some entries by exact rank. positions: a bit for each. Returns kUnknown if a count
// is above `most`, because the caller has ranked it too low.
template <typename CountAt, typename StepAt>
inline LowestRank lowest_of_subset(const Ranking& ranking, uint64_t positions, uint64_t most,
                                   const CountAt& count_at, const StepAt& step_at) {
  LowestRank lowest = kAllPinned;
  for (uint64_t remaining = positions; remaining != 0; remaining &= remaining - 1) {
    const int p = __builtin_ctzll(remaining);
    const uint64_t count = count_at(p);
    if (count > most) [[unlikely]]
      return kUnknown;
    const uint32_t step = step_at(p);
    const Rank rank{ranking.of(count, step), step};
    if (lowest.rank < rank) continue;
    const uint64_t others = rank < lowest.rank ? 0 : lowest.positions;
    lowest = LowestRank{others | uint64_t{1} << p, rank};
  }
  return lowest;
}

}  // namespace torchrec_hkv::hash_table::cpu
