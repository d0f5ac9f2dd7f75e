// The lowest rank of a bucket whose counts are in CountArrays, on the CPU.
//
// Under LFU the entries of the lowest count are compared by their steps. With aging all entries are
// ranked, first in whole steps, which eight lanes compute at once, then exactly those of the lowest
// such rank, mostly one.
#pragma once

#include <cstdint>

#ifdef __AVX2__
#include <immintrin.h>
#endif

#include "hash_table/aged_lfu.h"
#include "hash_table/counts.h"
#include "hash_table/cpu/lowest_score.h"

namespace torchrec_hkv::hash_table::cpu {

// By ranking all entries.
inline Lowest lowest_of_all(const Ranking& ranking, const CountArrays& counts, int64_t base,
                            const uint32_t* steps, int32_t n, uint32_t pinned_from) {
  uint64_t all[kBucketDigests];
  for (int32_t p = 0; p < n; ++p) all[p] = counts.of(base + p);
  return ranking.aged ? lowest_score<true>(ranking, all, steps, n, pinned_from)
                      : lowest_score<false>(ranking, all, steps, n, pinned_from);
}

#ifdef __AVX2__
// Some entries of a bucket, at least as many as a vector has lanes. The last vector overlaps the
// one before it if their number is not a multiple of the lanes.
template <typename Count>
class CountLanes {
 public:
  static constexpr int32_t kLeast = 16;

  CountLanes(const Count* counts, const uint32_t* steps, int32_t n)
      : counts_(counts), steps_(steps), n_(n) {}

  // The lowest count, of those above `above` if that is not negative. Counts with high bits are
  // above kLowBits; so is the result if there is none.
  int32_t lowest(int32_t above) const {
    const __m256i all = _mm256_set1_epi16(-1);
    const __m256i bound = _mm256_set1_epi16(static_cast<int16_t>(above));
    const __m256i bounded = above < 0 ? _mm256_setzero_si256() : all;
    __m256i lows = all;
    for_vectors_of<16>([&](int32_t p) {
      const __m256i count = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(counts_ + p));
      const __m256i below = _mm256_cmpeq_epi16(_mm256_min_epu16(count, bound), count);
      lows = _mm256_min_epu16(lows, _mm256_or_si256(count, _mm256_and_si256(below, bounded)));
    });
    const __m128i half =
        _mm_min_epu16(_mm256_castsi256_si128(lows), _mm256_extracti128_si256(lows, 1));
    return _mm_cvtsi128_si32(_mm_minpos_epu16(half)) & 0xffff;
  }

  // The entries with a count.
  struct Class {
    uint64_t positions;
    uint32_t oldest;  // the lowest of their steps
  };
  Class with_count(int32_t count) const {
    const __m128i wanted = _mm_set1_epi16(static_cast<int16_t>(count));
    const __m256i all = _mm256_set1_epi32(-1);
    __m256i lows = all;
    uint64_t positions = 0;
    for_vectors_of<8>([&](int32_t p) {
      const __m128i some = _mm_loadu_si128(reinterpret_cast<const __m128i*>(counts_ + p));
      const __m256i same = _mm256_cvtepi16_epi32(_mm_cmpeq_epi16(some, wanted));
      const __m256i step = steps_at(p);
      lows = _mm256_min_epu32(lows, _mm256_or_si256(step, _mm256_xor_si256(same, all)));
      positions |= bits_of(same) << p;
    });
    return Class{positions, lowest_lane(lows)};
  }

  // The entries whose step is `step`.
  uint64_t with_step(uint32_t step) const {
    return equal_to(step, [this](int32_t p) { return steps_at(p); });
  }

  // Whether lowest_ranks() can compare them.
  static bool can_rank(const Ranking& ranking, uint32_t pinned_from) {
    return ranking.aged && ranking.half_life <= UINT32_MAX && pinned_from <= INT32_MAX;
  }
  // The entries with the lowest rank in whole steps, without the pinned ones. Counts above kLowBits
  // rank as the lowest of these. The exponent and fraction of a float are those of log2_of_count;
  // its bias raises all ranks alike, by a whole number of their units.
  uint64_t lowest_ranks(const Ranking& ranking, uint32_t pinned_from) const {
    alignas(32) uint32_t ranks[kBucketDigests];
    const __m256i fraction = _mm256_set1_epi32(0xffff), bend = _mm256_set1_epi32(kBend);
    const __m256i half_life = _mm256_set1_epi32(static_cast<int32_t>(ranking.half_life));
    const __m256i first_pinned = _mm256_set1_epi32(static_cast<int32_t>(pinned_from));
    __m256i lows = _mm256_set1_epi32(kNoRank);
    for_vectors_of<8>([&](int32_t p) {
      const __m256 count = _mm256_cvtepi32_ps(bounded_at(counts_ + p));
      const __m256i log = _mm256_srli_epi32(_mm256_castps_si256(count), 23 - kFractionBits);
      // As log2_of_fraction: upper halves of products of 16 bits.
      const __m256i f = _mm256_and_si256(log, fraction);
      const __m256i arc = _mm256_mulhi_epu16(f, _mm256_sub_epi32(_mm256_setzero_si256(), f));
      const __m256i bent = _mm256_add_epi32(log, _mm256_mulhi_epu16(arc, bend));
      const __m256i even = _mm256_srli_epi64(_mm256_mul_epu32(bent, half_life), 32);
      const __m256i odd = _mm256_mul_epu32(_mm256_srli_epi64(bent, 32), half_life);
      const __m256i step = steps_at(p);
      const __m256i rank = _mm256_add_epi32(step, _mm256_blend_epi32(even, odd, 0xaa));
      const __m256i pinned = _mm256_cmpeq_epi32(_mm256_max_epu32(step, first_pinned), step);
      const __m256i its = _mm256_or_si256(rank, pinned);  // kNoRank if it is
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(ranks + p), its);
      lows = _mm256_min_epu32(lows, its);
    });
    const uint32_t lowest = lowest_lane(lows);
    if (lowest == kNoRank) return 0;
    return equal_to(lowest, [&](int32_t p) {
      return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(ranks + p));
    });
  }

 private:
  static constexpr uint32_t kNoRank = UINT32_MAX;

  // Bits of the entries whose lane is `wanted`.
  template <typename Lanes>
  uint64_t equal_to(uint32_t wanted, const Lanes& lanes) const {
    const __m256i value = _mm256_set1_epi32(static_cast<int32_t>(wanted));
    uint64_t positions = 0;
    for_vectors_of<8>(
        [&](int32_t p) { positions |= bits_of(_mm256_cmpeq_epi32(lanes(p), value)) << p; });
    return positions;
  }
  template <int32_t kLanesOf, typename Visit>
  [[gnu::always_inline]] void for_vectors_of(const Visit& visit) const {
    int32_t p = 0;
    for (; p + kLanesOf <= n_; p += kLanesOf) visit(p);
    if (p < n_) visit(n_ - kLanesOf);
  }
  // Eight counts from 1 to kLowBits + 1.
  static __m256i bounded_at(const uint16_t* from) {
    const __m128i some = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
    const __m128i most = _mm_set1_epi16(static_cast<int16_t>(kLowBits + 1));
    return _mm256_cvtepu16_epi32(_mm_min_epu16(_mm_max_epu16(some, _mm_set1_epi16(1)), most));
  }
  static __m256i bounded_at(const uint32_t* from) {
    const __m256i some = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
    const __m256i most = _mm256_set1_epi32(kLowBits + 1);
    return _mm256_min_epu32(_mm256_max_epu32(some, _mm256_set1_epi32(1)), most);
  }
  __m256i steps_at(int32_t p) const {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(steps_ + p));
  }
  static uint64_t bits_of(__m256i lanes) {
    return static_cast<uint32_t>(_mm256_movemask_ps(_mm256_castsi256_ps(lanes)));
  }
  static uint32_t lowest_lane(__m256i lanes) {
    __m128i low = _mm_min_epu32(_mm256_castsi256_si128(lanes), _mm256_extracti128_si256(lanes, 1));
    low = _mm_min_epu32(low, _mm_shuffle_epi32(low, 0x4e));
    low = _mm_min_epu32(low, _mm_shuffle_epi32(low, 0xb1));
    return static_cast<uint32_t>(_mm_cvtsi128_si32(low));
  }

  const Count* const counts_;
  const uint32_t* const steps_;
  const int32_t n_;
};
#endif

// The slots of the lowest rank with aging, without the pinned ones. Counts above kLowBits may have
// high bits elsewhere: where the steps do not decide, all_ranked() does.
template <typename Count, typename AllRanked>
Lowest lowest_aged(const Ranking& ranking, const Count* counts, const uint32_t* steps, int32_t n,
                   uint32_t pinned_from, const AllRanked& all_ranked) {
#ifdef __AVX2__
  using Lanes = CountLanes<Count>;
  if (n >= Lanes::kLeast && Lanes::can_rank(ranking, pinned_from)) {
    Lowest lowest = kAllPinned;
    uint64_t left = Lanes(counts, steps, n).lowest_ranks(ranking, pinned_from);
    for (; left != 0; left &= left - 1) {
      const int p = __builtin_ctzll(left);
      if (counts[p] > kLowBits) [[unlikely]]
        return all_ranked();
      const Rank rank{ranking.of(counts[p], steps[p]), steps[p]};
      if (lowest.rank < rank) continue;
      const uint64_t others = rank < lowest.rank ? 0 : lowest.positions;
      lowest = Lowest{others | uint64_t{1} << p, rank};
    }
    return lowest;
  }
#endif
  return all_ranked();
}

// The slots of the lowest rank of n slots from `base` on, without the pinned ones; `steps`: of
// these slots.
inline Lowest lowest_count(const Ranking& ranking, const CountArrays& counts, int64_t base,
                           const uint32_t* steps, int32_t n, uint32_t pinned_from) {
  if (ranking.aged && ranking.half_life == 0) {  // counts do not matter
    Lowest lowest = oldest_of(steps, n, pinned_from);
    if (lowest.positions != 0) lowest.rank.score = ranking.of(1, lowest.rank.last_step);
    return lowest;
  }
  const uint16_t* const low = counts.low + base;
  const auto all_ranked = [&] {
    return lowest_of_all(ranking, counts, base, steps, n, pinned_from);
  };
  if (ranking.aged) return lowest_aged(ranking, low, steps, n, pinned_from, all_ranked);
#ifdef __AVX2__
  if (n < CountLanes<uint16_t>::kLeast) return all_ranked();
  const CountLanes<uint16_t> lanes(low, steps, n);
  for (int32_t count = lanes.lowest(-1); count <= kLowBits; count = lanes.lowest(count)) {
    const auto its = lanes.with_count(count);
    if (its.oldest >= pinned_from) continue;  // all entries of this count are pinned
    return Lowest{its.positions & lanes.with_step(its.oldest),
                  {static_cast<uint64_t>(count), its.oldest}};
  }
#endif
  return all_ranked();
}

}  // namespace torchrec_hkv::hash_table::cpu
