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
HKV_AVX512 LowestWords lowest_words_avx512(const WordRanks& ranks, const uint32_t* words,
                                           int32_t n) {
  const auto in_last = static_cast<__mmask16>(0xffffu >> (kVectors * 16 - n));
  const __m512i worths = _mm512_maskz_loadu_epi32(kAllSixteen, ranks.short_ranks.worths());
  const __m128i bits = _mm_cvtsi32_si128(ranks.short_ranks.bits());
  __m512i slot_words[kVectors], numbers[kVectors];
  __m512i lows = sixteen_of(INT32_MAX), any = _mm512_setzero_si512();
  for (int v = 0; v < kVectors; ++v) {
    const __mmask16 slots = v == kVectors - 1 ? in_last : kAllSixteen;
    const __m512i word = _mm512_maskz_loadu_epi32(slots, words + v * 16);
    slot_words[v] = numbers[v] = word;
    if (kOrder != WordOrder::kCount) {
      any = _mm512_or_si512(any, word);
      numbers[v] = _mm512_and_si512(word, sixteen_of(CountedSteps::kDistance));
    }
    if (kOrder == WordOrder::kRank) {
      __m512i count = _mm512_maskz_srli_epi32(kAllSixteen, word, CountedSteps::kStepBits);
      count = _mm512_maskz_min_epu32(kAllSixteen, count, sixteen_of(ShortRanks::kMax));
      const __m512i step = _mm512_maskz_sll_epi32(kAllSixteen, numbers[v], bits);
      numbers[v] =
          _mm512_add_epi32(step, _mm512_maskz_permutexvar_epi32(kAllSixteen, count, worths));
    }
    lows = _mm512_mask_min_epi32(lows, slots, lows, numbers[v]);
  }
  const int32_t number = lowest_of_sixteen(lows);
  const __m512i low = _mm512_set1_epi32(number);
  LowestWords found{0, false, number < 0};
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
      others =
          _mm512_mask_or_epi32(others, lowest[v], others, _mm512_xor_si512(slot_words[v], first));
    }
    found.differ = _mm512_test_epi32_mask(others, others) != 0;
  }
  return found;
}

template <WordOrder kOrder>
inline LowestWords lowest_words_avx512(const WordRanks& ranks, const uint32_t* words, int32_t n) {
  if (n > 48) [[likely]]
    return lowest_words_avx512<kOrder, 4>(ranks, words, n);
  if (n > 32) return lowest_words_avx512<kOrder, 3>(ranks, words, n);
  return n > 16 ? lowest_words_avx512<kOrder, 2>(ranks, words, n)
                : lowest_words_avx512<kOrder, 1>(ranks, words, n);
}

// HighRanks of sixteen entries.
HKV_AVX512 inline __m512i high_ranks_avx512(const HighRanks& ranks, __m512i count, __m512i step) {
  count = _mm512_maskz_max_epi32(kAllSixteen, count, sixteen_of(1));
  const __m512 number =
      _mm512_maskz_cvt_roundepi32_ps(kAllSixteen, count, _MM_FROUND_TO_ZERO | _MM_FROUND_NO_EXC);
  const __m512i log = _mm512_sub_epi32(
      _mm512_maskz_srli_epi32(kAllSixteen, _mm512_castps_si512(number), 23 - kFractionBits),
      sixteen_of(127u << kFractionBits));
  // As log2_of_fraction.
  const __m512i f = _mm512_and_si512(log, sixteen_of(0xffff));
  // Upper halves of products of 16 bits.
  __m512i arc = _mm512_mulhi_epu16(f, _mm512_sub_epi32(_mm512_setzero_si512(), f));
  arc = _mm512_mulhi_epu16(arc, sixteen_of(kBend));
  __m512i log_approx = _mm512_add_epi32(log, arc);
  log_approx = _mm512_maskz_slli_epi32(kAllSixteen, log_approx, HighRanks::kLogShift);
  const __m512i half_life = sixteen_of(ranks.half_life());
  const __m512i even = shift_right_wide<32>(multiply_wide(log_approx, half_life));
  const __m512i odd = multiply_wide(shift_right_wide<32>(log_approx), half_life);
  const __m512i worth = _mm512_mask_mov_epi32(even, 0xaaaa, odd);
  const __m128i bits = _mm_cvtsi32_si128(ranks.bits());
  return _mm512_add_epi32(_mm512_maskz_sll_epi32(kAllSixteen, step, bits), worth);
}

// As lowest_unpinned. kHighs: whether `highs` is not null.
template <bool kAged, bool kHighs>
HKV_AVX512 LowestWords lowest_unpinned_avx512(const WordRanks& ranks, const uint32_t* words,
                                              const uint16_t* highs, int32_t n) {
  constexpr int kVectors = kBucketDigests / 16;
  const uint64_t all = ~uint64_t{0} >> (kBucketDigests - n);
  const __m512i last_unpinned = sixteen_of(static_cast<uint32_t>(ranks.last_unpinned));
  const __m512i flag = sixteen_of(CountedSteps::kHasHighCount);
  __m512i slot_words[kVectors], counts[kVectors], steps[kVectors], numbers[kVectors];
  __mmask16 lowest[kVectors];
  __m512i lows = sixteen_of(INT32_MAX), any = _mm512_setzero_si512();
  for (int v = 0; v < kVectors; ++v) {
    const auto slots = static_cast<__mmask16>(all >> (v * 16));
    slot_words[v] = _mm512_maskz_loadu_epi32(slots, words + v * 16);
    any = _mm512_or_si512(any, slot_words[v]);
    steps[v] = _mm512_and_si512(slot_words[v], sixteen_of(CountedSteps::kDistance));
    __m512i high;
    const __mmask16 has = _mm512_test_epi32_mask(slot_words[v], flag);
    if (kHighs) {
      const __m512i loaded = _mm512_maskz_loadu_epi16(slots, highs + v * 16);
      high = _mm512_maskz_cvtepu16_epi32(has, _mm512_maskz_extracti64x4_epi64(0xf, loaded, 0));
    } else {
      high = _mm512_maskz_set1_epi32(has, 1);
    }
    high = _mm512_maskz_slli_epi32(kAllSixteen, high, CountedSteps::kCountBits);
    const __m512i low =
        _mm512_maskz_srli_epi32(kAllSixteen, slot_words[v], CountedSteps::kStepBits);
    counts[v] = _mm512_or_si512(_mm512_and_si512(low, sixteen_of(CountedSteps::kLowCount)), high);
    numbers[v] = kAged ? high_ranks_avx512(ranks.high_ranks, counts[v], steps[v]) : counts[v];
    lowest[v] = _mm512_mask_cmple_epi32_mask(slots, steps[v], last_unpinned);
    lows = _mm512_mask_min_epi32(lows, lowest[v], lows, numbers[v]);
  }
  LowestWords found{0, false, _mm512_movepi32_mask(any) != 0};
  const int most = lowest_of_sixteen(lows) + (kAged && ranks.high_ranks.rounds() ? 1 : 0);
  lows = sixteen_of(INT32_MAX);
  for (int v = 0; v < kVectors; ++v) {
    lowest[v] = _mm512_mask_cmple_epi32_mask(lowest[v], numbers[v], _mm512_set1_epi32(most));
    lows = _mm512_mask_min_epi32(lows, lowest[v], lows, steps[v]);
  }
  if (!kAged) {
    const __m512i first = _mm512_set1_epi32(lowest_of_sixteen(lows));
    for (int v = 0; v < kVectors; ++v) {
      lowest[v] = _mm512_mask_cmpeq_epi32_mask(lowest[v], steps[v], first);
    }
  }
  for (int v = 0; v < kVectors; ++v) found.positions |= uint64_t{lowest[v]} << (v * 16);
  if (kAged && (found.positions & (found.positions - 1)) != 0) {
    const int one = __builtin_ctzll(found.positions);
    const uint32_t high_bits = kHighs ? highs[one] : 1;
    const uint32_t high = (words[one] & CountedSteps::kHasHighCount) != 0 ? high_bits : 0;
    const uint32_t low_count = words[one] >> CountedSteps::kStepBits & CountedSteps::kLowCount;
    const __m512i word = sixteen_of(words[one]);
    const __m512i count = sixteen_of(high << CountedSteps::kCountBits | low_count);
    __m512i others = _mm512_setzero_si512();
    for (int v = 0; v < kVectors; ++v) {
      const __m512i other = _mm512_or_si512(_mm512_xor_si512(slot_words[v], word),
                                            _mm512_xor_si512(counts[v], count));
      others = _mm512_mask_or_epi32(others, lowest[v], others, other);
    }
    found.differ = _mm512_test_epi32_mask(others, others) != 0;
  }
  return found;
}

}  // namespace torchrec_hkv::hash_table::cpu
#endif
