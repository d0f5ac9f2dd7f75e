// Ranks of several slots at once, on the CPU.
#pragma once

#include <algorithm>
#include <cstdint>

#ifdef __x86_64__
#include <immintrin.h>
#endif

#include "common/initial_rows_avx512.h"
#include "hash_table/aged_lfu.h"

namespace torchrec_hkv::hash_table::cpu {

#ifdef __AVX2__
// Ranking::of four entries at once.
class RankLanes {
 public:
  explicit RankLanes(const Ranking& ranking)
      : low_(all(ranking.half_life & 0xffffffffu)), high_(all(ranking.half_life >> 32)) {}

  static __m256i all(uint64_t value) { return _mm256_set1_epi64x(static_cast<int64_t>(value)); }

  __m256i of(__m256i count, __m256i step) const {
    const __m256i two_to_52 = _mm256_castpd_si256(_mm256_set1_pd(0x1p52));
    const __m256i most = all(kMaxLogCount);
    count = _mm256_blendv_epi8(count, most, _mm256_cmpgt_epi64(count, most));  // no sign bit
    count = _mm256_sub_epi64(count, _mm256_cmpeq_epi64(count, _mm256_setzero_si256()));
    // The exponent and fraction of a double are those of log2_of_count.
    const __m256d number = _mm256_sub_pd(_mm256_castsi256_pd(_mm256_or_si256(count, two_to_52)),
                                         _mm256_castsi256_pd(two_to_52));
    const __m256i log =
        _mm256_sub_epi64(_mm256_srli_epi64(_mm256_castpd_si256(number), 52 - kFractionBits),
                         all(uint64_t{1023} << kFractionBits));
    // As log2_of_fraction; products of 32 bits.
    const __m256i f = _mm256_and_si256(log, all(0xffff));
    const __m256i arc =
        _mm256_srli_epi64(_mm256_mul_epu32(f, _mm256_sub_epi64(all(1 << kFractionBits), f)), 16);
    const __m256i log_approx =
        _mm256_add_epi64(log, _mm256_srli_epi64(_mm256_mul_epu32(arc, all(kBend)), 16));
    const __m256i worth =
        _mm256_add_epi64(_mm256_mul_epu32(low_, log_approx),
                         _mm256_slli_epi64(_mm256_mul_epu32(high_, log_approx), 32));
    return _mm256_add_epi64(_mm256_slli_epi64(step, kFractionBits),
                            _mm256_srli_epi64(worth, kFractionBits));
  }

 private:
  const __m256i low_, high_;
};

inline __m256i widen_four(const uint32_t* from) {
  return _mm256_cvtepu32_epi64(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
}
inline __m256i widen_four(const uint64_t* from) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
}
#endif

#ifdef HKV_AVX512
// Masked intrinsics, also for all lanes, because GCC warns of undefined values in those without a
// mask.
constexpr __mmask8 kAllEight = 0xff;

HKV_AVX512 inline __m512i all_wide(uint64_t value) {
  return _mm512_set1_epi64(static_cast<int64_t>(value));
}

// Loads the numbers of eight slots; zeros where `some` has no bit.
HKV_AVX512 inline __m512i widen_eight(__mmask8 some, const uint32_t* from) {
  const WideLanes all = (WideLanes)_mm512_maskz_loadu_epi32(some, from);
  const auto narrow = __builtin_shufflevector(all, all, 0, 1, 2, 3);
  return _mm512_maskz_cvtepu32_epi64(some, (__m256i)narrow);
}
HKV_AVX512 inline __m512i widen_eight(__mmask8 some, const uint64_t* from) {
  return _mm512_maskz_loadu_epi64(some, from);
}

HKV_AVX512 inline __m512i multiply_wide(__m512i a, __m512i b) {
  return _mm512_maskz_mul_epu32(kAllEight, a, b);
}
template <int kBits>
HKV_AVX512 inline __m512i shift_right_wide(__m512i a) {
  return _mm512_maskz_srli_epi64(kAllEight, a, kBits);
}
template <int kBits>
HKV_AVX512 inline __m512i shift_left_wide(__m512i a) {
  return _mm512_maskz_slli_epi64(kAllEight, a, kBits);
}

// Ranking::of eight slots, as RankLanes computes it.
HKV_AVX512 inline __m512i rank_avx512(const Ranking& ranking, __m512i count, __m512i step) {
  count = _mm512_maskz_min_epu64(kAllEight, count, all_wide(kMaxLogCount));
  count = _mm512_maskz_max_epu64(kAllEight, count, all_wide(1));
  const __m512i number = _mm512_castpd_si512(_mm512_maskz_cvtepu64_pd(kAllEight, count));
  const __m512i log = _mm512_sub_epi64(shift_right_wide<52 - kFractionBits>(number),
                                       all_wide(uint64_t{1023} << kFractionBits));
  const __m512i f = _mm512_and_si512(log, all_wide(0xffff));
  const __m512i rest = _mm512_sub_epi64(all_wide(1 << kFractionBits), f);
  const __m512i arc = multiply_wide(shift_right_wide<16>(multiply_wide(f, rest)), all_wide(kBend));
  const __m512i log_approx = _mm512_add_epi64(log, shift_right_wide<16>(arc));
  const __m512i low = multiply_wide(all_wide(ranking.half_life & 0xffffffffu), log_approx);
  const __m512i high = multiply_wide(all_wide(ranking.half_life >> 32), log_approx);
  const __m512i worth = _mm512_add_epi64(low, shift_left_wide<32>(high));
  return _mm512_add_epi64(shift_left_wide<kFractionBits>(step),
                          shift_right_wide<kFractionBits>(worth));
}

// As lowest_score (lowest_score.h): the positions, one bit each, their rank and step.
template <bool kAged, typename Score>
HKV_AVX512 uint64_t lowest_score_avx512(const Ranking& ranking, const Score* scores,
                                        const uint32_t* steps, int32_t n, uint32_t pinned_from,
                                        uint64_t* rank, uint32_t* step) {
  constexpr int32_t kMax = 64;
  const uint64_t slots = n < kMax ? (uint64_t{1} << n) - 1 : ~uint64_t{0};
  __m512i ranks[kMax / 8], lows = all_wide(UINT64_MAX);
  uint64_t free = 0, positions = 0;
  for (int32_t p = 0; p < n; p += 8) {
    const auto some = static_cast<__mmask8>(slots >> p);
    const __m512i last = widen_eight(some, steps + p), score = widen_eight(some, scores + p);
    const __mmask8 takes_part = _mm512_mask_cmplt_epu64_mask(some, last, all_wide(pinned_from));
    ranks[p / 8] = kAged ? rank_avx512(ranking, score, last) : score;
    lows = _mm512_mask_min_epu64(lows, takes_part, lows, ranks[p / 8]);
    free |= static_cast<uint64_t>(takes_part) << p;
  }
  alignas(64) uint64_t each[8];
  _mm512_store_si512(each, lows);
  *rank = *std::min_element(each, each + 8);
  for (int32_t p = 0; p < n; p += 8) {
    const __mmask8 same = _mm512_cmpeq_epu64_mask(ranks[p / 8], all_wide(*rank));
    positions |= static_cast<uint64_t>(same) << p;
  }
  positions &= free;
  *step = UINT32_MAX;
  for (uint64_t remaining = positions; remaining != 0; remaining &= remaining - 1) {
    *step = std::min(*step, steps[__builtin_ctzll(remaining)]);
  }
  if ((positions & (positions - 1)) == 0) return positions;
  const __m512i wanted = _mm512_set1_epi32(static_cast<int32_t>(*step));
  uint64_t earliest = 0;
  for (int32_t p = 0; p < n; p += 16) {
    const auto some = static_cast<__mmask16>(positions >> p);
    const __m512i last = _mm512_maskz_loadu_epi32(some, steps + p);
    earliest |= static_cast<uint64_t>(_mm512_mask_cmpeq_epu32_mask(some, last, wanted)) << p;
  }
  return earliest;
}
#endif

}  // namespace torchrec_hkv::hash_table::cpu
