// The lowest of a bucket's scores, on the CPU.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "hash_table/cpu/bucket.h"
#include "hash_table/cpu/lowest_lanes.h"
#include "hash_table/cpu/rank_lanes.h"
#include "hash_table/table_view.h"

namespace torchrec_hkv::hash_table::cpu {

struct Victim {
  int64_t slot;  // kNoSlot: no victim
  Rank rank;
};

// The slots of a bucket's lowest rank.
struct LowestRank {
  uint64_t positions;  // one bit each; 0: all are pinned
  Rank rank;

  Victim first(int64_t base) const {
    return Victim{positions == 0 ? kNoSlot : base + __builtin_ctzll(positions), rank};
  }
};

constexpr LowestRank kAllPinned{0, {UINT64_MAX, UINT32_MAX}};

// Last steps of eight slots, as a vector of GCC and Clang. A comparison sets all bits of a lane if
// its condition holds.
typedef uint32_t StepLanes __attribute__((vector_size(32)));
constexpr int32_t kLanes = 8;

template <typename LanesOf, typename T>
inline void load_lanes(LanesOf& to, const T* from) {
  std::memcpy(&to, from, sizeof(to));
}

// A bit for each of up to 64 slots: whether they have this step.
inline uint64_t match_steps(const uint32_t* steps, int32_t n, uint32_t step) {
#ifdef __AVX2__
  return match_lanes(steps, n, step);
#else
  uint64_t mask = 0;
  for (int32_t p = 0; p < n; ++p) mask |= static_cast<uint64_t>(steps[p] == step) << p;
  return mask;
#endif
}

inline uint32_t lowest_step(const uint32_t* steps, int32_t n) {
  StepLanes low = ~StepLanes{};
  int32_t p = 0;
  for (; p + kLanes <= n; p += kLanes) {
    StepLanes some;
    load_lanes(some, steps + p);
    low = some < low ? some : low;
  }
  uint32_t step = UINT32_MAX;
  for (int32_t k = 0; k < kLanes; ++k) step = std::min(step, low[k]);
  for (; p < n; ++p) step = std::min(step, steps[p]);
  return step;
}

// The unpinned slots of the lowest step, if scores are steps.
inline LowestRank oldest_of(const uint32_t* steps, int32_t n, uint32_t pinned_from) {
  const uint32_t step = lowest_step(steps, n);
  if (step >= pinned_from) return kAllPinned;
  return LowestRank{match_steps(steps, n, step), {step, step}};
}

// The lowest rank of n slots without the pinned ones, and the slots with this rank and, among
// these, the lowest step. No branch depends on a rank, because ranks are unpredictable.
template <bool kAged, typename Score>
LowestRank lowest_score(const Ranking& ranking, const Score* scores, const uint32_t* steps,
                        int32_t n, uint32_t pinned_from) {
#ifdef HKV_AVX512
  if (has_avx512()) {
    uint64_t rank;
    uint32_t step;
    const uint64_t positions =
        lowest_score_avx512<kAged>(ranking, scores, steps, n, pinned_from, &rank, &step);
    return positions == 0 ? kAllPinned : LowestRank{positions, {rank, step}};
  }
#endif
  // Pinned slots get the highest value.
  alignas(64) uint64_t ranks[kBucketDigests];
  uint64_t low = UINT64_MAX, positions = 0;
  int32_t p = 0;
#ifdef __AVX2__
  const RankLanes lanes(ranking);
  // Comparisons are signed: flipping the highest bit gives the unsigned order.
  const __m256i sign = RankLanes::all(uint64_t{1} << 63);
  const __m256i last_unpinned = _mm256_set1_epi64x(int64_t{pinned_from} - 1);
  __m256i lows = RankLanes::all(~uint64_t{0} >> 1);
  for (; p + 4 <= n; p += 4) {
    const __m256i step = widen_four(steps + p), score = widen_four(scores + p);
    const __m256i pinned = _mm256_cmpgt_epi64(step, last_unpinned);
    const __m256i rank = _mm256_or_si256(kAged ? lanes.of(score, step) : score, pinned);
    _mm256_store_si256(reinterpret_cast<__m256i*>(ranks + p), rank);
    const __m256i ordered = _mm256_xor_si256(rank, sign);
    lows = _mm256_blendv_epi8(lows, ordered, _mm256_cmpgt_epi64(lows, ordered));
  }
  alignas(32) uint64_t each[4];
  _mm256_store_si256(reinterpret_cast<__m256i*>(each), _mm256_xor_si256(lows, sign));
  for (const uint64_t one : each) low = std::min(low, one);
#endif
  for (; p < n; ++p) {
    const bool pinned = steps[p] >= pinned_from;
    ranks[p] = pinned ? UINT64_MAX : kAged ? ranking.of(scores[p], steps[p]) : scores[p];
    low = std::min(low, ranks[p]);
  }
  if (low == UINT64_MAX) {  // an unpinned slot may have this score, too
    for (p = 0; p < n; ++p) {
      if (steps[p] >= pinned_from) ranks[p] = 0;
    }
  }
  p = 0;
#ifdef __AVX2__
  const __m256i wanted = RankLanes::all(low);
  for (; p + 4 <= n; p += 4) {
    const __m256i same = _mm256_cmpeq_epi64(widen_four(ranks + p), wanted);
    positions |= static_cast<uint64_t>(_mm256_movemask_pd(_mm256_castsi256_pd(same))) << p;
  }
#endif
  for (; p < n; ++p) positions |= static_cast<uint64_t>(ranks[p] == low) << p;
  if (positions == 0) return kAllPinned;
  if ((positions & (positions - 1)) == 0) {
    return LowestRank{positions, {low, steps[__builtin_ctzll(positions)]}};
  }
  uint32_t others[kBucketDigests];
  for (p = 0; p < n; ++p) others[p] = ranks[p] == low ? steps[p] : UINT32_MAX;
  const uint32_t step = lowest_step(others, n);
  return LowestRank{match_steps(others, n, step), {low, step}};
}

}  // namespace torchrec_hkv::hash_table::cpu
