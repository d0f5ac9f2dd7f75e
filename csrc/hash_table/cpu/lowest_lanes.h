// The lowest of the numbers of some slots, eight of which are computed at once, on the CPU.
#pragma once

#ifdef __AVX2__
#include <immintrin.h>

#include <cstdint>

#include "common/hashing.h"
#include "hash_table/aged_lfu.h"
#include "hash_table/cpu/high_ranks.h"
#include "hash_table/cpu/short_ranks.h"

namespace torchrec_hkv::hash_table::cpu {

constexpr int32_t kNumberLanes = 8;

inline __m256i eight_of(uint32_t value) { return _mm256_set1_epi32(static_cast<int32_t>(value)); }
inline __m256i load_eight(const uint32_t* from) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
}

// Sets all bits of the lanes that are not below a bound.
inline __m256i greater_equal(__m256i lanes, __m256i bound) {
  return _mm256_cmpeq_epi32(_mm256_max_epu32(lanes, bound), lanes);
}

// A bit for each of up to 64 numbers: whether it is `wanted`.
inline uint64_t match_lanes(const uint32_t* numbers, int32_t n, uint32_t wanted) {
  const __m256i value = eight_of(wanted);
  const auto same = [&](int32_t p) { return _mm256_cmpeq_epi32(load_eight(numbers + p), value); };
  uint64_t mask = 0;
  int32_t p = 0;
  for (; p + 32 <= n; p += 32) {
    // packs works within 128-bit lanes; the permutation restores the order.
    const __m256i low = _mm256_packs_epi32(same(p), same(p + 8));
    const __m256i high = _mm256_packs_epi32(same(p + 16), same(p + 24));
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    const __m256i all = _mm256_permutevar8x32_epi32(_mm256_packs_epi16(low, high), order);
    mask |= static_cast<uint64_t>(static_cast<uint32_t>(_mm256_movemask_epi8(all))) << p;
  }
  const auto match_eight = [&](int32_t from) {
    const auto bits = static_cast<uint32_t>(_mm256_movemask_ps(_mm256_castsi256_ps(same(from))));
    mask |= static_cast<uint64_t>(bits) << from;
  };
  for (; p + kNumberLanes <= n; p += kNumberLanes) match_eight(p);
  if (p < n && n >= kNumberLanes) {
    match_eight(n - kNumberLanes);  // overlaps
    return mask;
  }
  for (; p < n; ++p) mask |= static_cast<uint64_t>(numbers[p] == wanted) << p;
  return mask;
}

// The lowest of n signed integers. n: at least kNumberLanes.
inline int32_t lowest_signed(const uint32_t* from, int32_t n) {
  __m256i lows = load_eight(from + n - kNumberLanes);
  for (int32_t p = 0; p + kNumberLanes <= n; p += kNumberLanes) {
    lows = _mm256_min_epi32(lows, load_eight(from + p));
  }
  __m128i low = _mm_min_epi32(_mm256_castsi256_si128(lows), _mm256_extracti128_si256(lows, 1));
  low = _mm_min_epi32(low, _mm_shuffle_epi32(low, 0x4e));
  low = _mm_min_epi32(low, _mm_shuffle_epi32(low, 0xb1));
  return _mm_cvtsi128_si32(low);
}

struct LowestNumber {
  uint64_t positions;  // those with this number
  uint32_t number;
};

// The lowest of n numbers. n: at least kNumberLanes. numbers(p): those of slots p to p + 7. The
// last vector overlaps the one before it if n is not a multiple of the lanes. or_next: also returns
// the positions of the lowest number + 1.
template <typename Numbers>
[[gnu::always_inline]] inline LowestNumber lowest_number(int32_t n, const Numbers& numbers,
                                                         bool or_next = false) {
  alignas(32) uint32_t all[kBucketDigests];
  __m256i lows = eight_of(UINT32_MAX);
  const auto visit = [&](int32_t p) {
    const __m256i lanes_of_slots = numbers(p);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(all + p), lanes_of_slots);
    lows = _mm256_min_epu32(lows, lanes_of_slots);
  };
  int32_t p = 0;
  for (; p + kNumberLanes <= n; p += kNumberLanes) visit(p);
  if (p < n) visit(n - kNumberLanes);
  __m128i low = _mm_min_epu32(_mm256_castsi256_si128(lows), _mm256_extracti128_si256(lows, 1));
  low = _mm_min_epu32(low, _mm_shuffle_epi32(low, 0x4e));
  low = _mm_min_epu32(low, _mm_shuffle_epi32(low, 0xb1));
  const auto number = static_cast<uint32_t>(_mm_cvtsi128_si32(low));
  uint64_t positions = match_lanes(all, n, number);
  if (or_next) positions |= match_lanes(all, n, number + 1);
  return LowestNumber{positions, number};
}

// ShortRanks of counts up to kMax, one per lane; higher counts rank as kMax.
class ShortRankLanes {
 public:
  static constexpr uint32_t kMax = kNumberLanes - 1;
  static_assert(kMax <= ShortRanks::kMax);

  explicit ShortRankLanes(const ShortRanks& ranks)
      : worths_(load_eight(ranks.worths())), bits_(_mm_cvtsi32_si128(ranks.bits())) {}

  __m256i of(__m256i count, __m256i step) const {
    count = _mm256_min_epu32(count, eight_of(kMax));
    return _mm256_add_epi32(_mm256_sll_epi32(step, bits_),
                            _mm256_permutevar8x32_epi32(worths_, count));
  }

 private:
  const __m256i worths_;
  const __m128i bits_;
};

// HighRanks of eight entries.
class HighRankLanes {
 public:
  explicit HighRankLanes(const HighRanks& ranks)
      : half_life_(eight_of(ranks.half_life())), bits_(_mm_cvtsi32_si128(ranks.bits())) {}

  // count: at most HighRanks::kHighest
  __m256i of(__m256i count, __m256i step) const {
    count = _mm256_max_epi32(count, eight_of(1));
    // The exponent and fraction of a float are those of log2_of_count.
    const __m256i number = _mm256_castps_si256(_mm256_cvtepi32_ps(count));
    const __m256i log = _mm256_sub_epi32(_mm256_srli_epi32(number, 23 - kFractionBits),
                                         eight_of(127u << kFractionBits));
    // As log2_of_fraction: upper halves of products of 16 bits.
    const __m256i f = _mm256_and_si256(log, eight_of(0xffff));
    const __m256i arc = _mm256_mulhi_epu16(f, _mm256_sub_epi32(_mm256_setzero_si256(), f));
    __m256i log_approx = _mm256_add_epi32(log, _mm256_mulhi_epu16(arc, eight_of(kBend)));
    log_approx = _mm256_slli_epi32(log_approx, HighRanks::kLogShift);
    const __m256i even = _mm256_srli_epi64(_mm256_mul_epu32(log_approx, half_life_), 32);
    const __m256i odd = _mm256_mul_epu32(_mm256_srli_epi64(log_approx, 32), half_life_);
    const __m256i worth = _mm256_blend_epi32(even, odd, 0xaa);
    return _mm256_add_epi32(_mm256_sll_epi32(step, bits_), worth);
  }

 private:
  const __m256i half_life_;
  const __m128i bits_;
};

}  // namespace torchrec_hkv::hash_table::cpu
#endif
