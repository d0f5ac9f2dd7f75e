// The lowest words of a bucket with AVX-512, for processors that have it at run time: sixteen words
// at once, all in registers.
#pragma once

#include <cstdint>

#ifdef __x86_64__
#include <immintrin.h>
#endif

#include "common/initial_rows_avx512.h"
#include "hash_table/cpu/rank_lanes.h"
#include "hash_table/cpu/word_ranks.h"

#ifdef HKV_AVX512
namespace torchrec_hkv::hash_table::cpu {

// Masked intrinsics, also for all lanes, as in rank_lanes.h.
constexpr __mmask16 kAllSixteen = 0xffff;

HKV_AVX512 inline __m512i sixteen_of(uint32_t value) {
  return _mm512_set1_epi32(static_cast<int32_t>(value));
}

HKV_AVX512 inline int32_t lowest_of_sixteen(__m512i lanes) {
  const __m256i eight = _mm256_min_epi32(_mm512_maskz_extracti64x4_epi64(0xf, lanes, 0),
                                         _mm512_maskz_extracti64x4_epi64(0xf, lanes, 1));
  __m128i four = _mm_min_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
  four = _mm_min_epi32(four, _mm_shuffle_epi32(four, 0x4e));
  four = _mm_min_epi32(four, _mm_shuffle_epi32(four, 0xb1));
  return _mm_cvtsi128_si32(four);
}

// n: more than 16 * (kVectors - 1), and at most 16 * kVectors.
template <WordOrder kOrder, int kVectors>
HKV_AVX512 FoundWords lowest_words_wide(const WordRanks& ranks, const uint32_t* words, int32_t n) {
  const auto in_last = static_cast<__mmask16>(0xffffu >> (kVectors * 16 - n));
  const __m512i worths = _mm512_maskz_loadu_epi32(kAllSixteen, ranks.short_ranks.worths());
  const __m128i bits = _mm_cvtsi32_si128(ranks.short_ranks.bits());
  __m512i its[kVectors], numbers[kVectors];
  __m512i lows = sixteen_of(INT32_MAX), any = _mm512_setzero_si512();
  for (int v = 0; v < kVectors; ++v) {
    const __mmask16 slots = v == kVectors - 1 ? in_last : kAllSixteen;
    const __m512i word = _mm512_maskz_loadu_epi32(slots, words + v * 16);
    its[v] = numbers[v] = word;
    if (kOrder != WordOrder::kCount) {
      any = _mm512_or_si512(any, word);
      numbers[v] = _mm512_and_si512(word, sixteen_of(CountedSteps::kDistance));
    }
    if (kOrder == WordOrder::kRank) {
      __m512i count = _mm512_maskz_srli_epi32(kAllSixteen, word, CountedSteps::kStepBits);
      count = _mm512_maskz_min_epu32(kAllSixteen, count, sixteen_of(ShortRanks::kMost));
      const __m512i step = _mm512_maskz_sll_epi32(kAllSixteen, numbers[v], bits);
      numbers[v] =
          _mm512_add_epi32(step, _mm512_maskz_permutexvar_epi32(kAllSixteen, count, worths));
    }
    lows = _mm512_mask_min_epi32(lows, slots, lows, numbers[v]);
  }
  const int32_t number = lowest_of_sixteen(lows);
  const __m512i low = _mm512_set1_epi32(number);
  FoundWords found{0, false, number < 0};
  __mmask16 lowest[kVectors];
  for (int v = 0; v < kVectors; ++v) {
    const __mmask16 slots = v == kVectors - 1 ? in_last : kAllSixteen;
    lowest[v] = _mm512_mask_cmpeq_epi32_mask(slots, numbers[v], low);
    found.positions |= uint64_t{lowest[v]} << (v * 16);
  }
  if (kOrder != WordOrder::kCount) found.far = _mm512_movepi32_mask(any) != 0;
  if (kOrder == WordOrder::kRank) {
    const __m512i first = sixteen_of(words[__builtin_ctzll(found.positions)]);
    __m512i others = _mm512_setzero_si512();
    for (int v = 0; v < kVectors; ++v) {
      others = _mm512_mask_or_epi32(others, lowest[v], others, _mm512_xor_si512(its[v], first));
    }
    found.differ = _mm512_test_epi32_mask(others, others) != 0;
  }
  return found;
}

template <WordOrder kOrder>
inline FoundWords lowest_words_wide(const WordRanks& ranks, const uint32_t* words, int32_t n) {
  if (n > 48) [[likely]]
    return lowest_words_wide<kOrder, 4>(ranks, words, n);
  if (n > 32) return lowest_words_wide<kOrder, 3>(ranks, words, n);
  return n > 16 ? lowest_words_wide<kOrder, 2>(ranks, words, n)
                : lowest_words_wide<kOrder, 1>(ranks, words, n);
}

// Counts and last steps of n slots. Returns false if a step is far.
HKV_AVX512 inline bool read_counted_wide(const CountedSteps& counted, int64_t base, int32_t n,
                                         uint64_t* counts, uint32_t* steps) {
  const __m512i low = all_wide(CountedSteps::kLowCount),
                high = all_wide(CountedSteps::kHasHighCount);
  __mmask8 far = 0;
  for (int32_t p = 0; p < n; p += 8) {
    const auto some = static_cast<__mmask8>(n - p < 8 ? (1u << (n - p)) - 1 : 0xffu);
    const __m512i word = widen_eight(some, counted.words + base + p);
    far |= _mm512_test_epi64_mask(word, all_wide(CountedSteps::kIsFar));
    const __mmask8 has = _mm512_test_epi64_mask(word, high);
    const __m512i rest = _mm512_maskz_loadu_epi64(has, counted.window->rest + base + p);
    const __m512i count = _mm512_and_si512(shift_right_wide<CountedSteps::kStepBits>(word), low);
    _mm512_mask_storeu_epi64(
        counts + p, some, _mm512_or_si512(count, shift_left_wide<CountedSteps::kCountBits>(rest)));
    const __m512i distance = _mm512_and_si512(word, all_wide(CountedSteps::kDistance));
    _mm512_mask_cvtepi64_storeu_epi32(steps + p, some,
                                      _mm512_add_epi64(distance, all_wide(counted.begin())));
  }
  return far == 0;
}

}  // namespace torchrec_hkv::hash_table::cpu
#endif
