// The lowest rank of a bucket whose steps and counts are in CountedSteps, on the CPU.
//
// Words are converted to numbers in the order of ranks, or nearly so: under LFU the count above the
// step in the window; with aging short ranks. Usually, the words of the lowest number are equal,
// not pinned, and have a small count: then they have the lowest rank. Otherwise a second pass
// leaves out pinned words and computes the ranks of larger counts (HighRanks). It reads the high
// bits of counts if the lowest count seems to have some. If that does not decide, all counts are
// read.
#pragma once

#include <cstdint>

#include "hash_table/aged_lfu.h"
#include "hash_table/counted_steps.h"
#include "hash_table/cpu/lowest_lanes.h"
#include "hash_table/cpu/lowest_of_subset.h"
#include "hash_table/cpu/lowest_score.h"
#include "hash_table/cpu/lowest_words_avx512.h"
#include "hash_table/cpu/word_ranks.h"

namespace torchrec_hkv::hash_table::cpu {

// lowest_counted by the exact ranks of all entries.
[[gnu::noinline]] inline LowestRank lowest_of_all(const WordRanks& ranks,
                                                  const CountedSteps& counted, int64_t base,
                                                  int32_t n) {
  uint64_t counts[kBucketDigests];
  uint32_t steps[kBucketDigests];
  ranks.note_high();
  for (int32_t p = 0; p < n; ++p) {
    counts[p] = counted.count(base + p);
    steps[p] = counted.step(base + p);
  }
  const auto lowest =
      ranks.ranking.aged ? lowest_score<true, uint64_t> : lowest_score<false, uint64_t>;
  return lowest(ranks.ranking, counts, steps, n, ranks.pinned_from);
}

// The lowest of some positions, with aging. Returns kUnknown if a count is above `most`.
inline LowestRank lowest_of_subset(const WordRanks& ranks, const CountedSteps& counted,
                                   int64_t base, uint64_t positions, uint64_t most) {
  return lowest_of_subset(
      ranks.ranking, positions, most, [&](int p) { return counted.count(base + p); },
      [&](int p) { return counted.step(base + p); });
}

#ifdef __AVX2__
// The words of the lowest number. n: at least kNumberLanes.
template <WordOrder kOrder>
inline LowestWords lowest_words(const WordRanks& ranks, const uint32_t* words, int32_t n) {
  if (kOrder == WordOrder::kCount) {
    const int32_t lowest = lowest_signed(words, n);
    return LowestWords{match_lanes(words, n, static_cast<uint32_t>(lowest)), false, lowest < 0};
  }
  const ShortRankLanes lanes(ranks.short_ranks);
  __m256i any = _mm256_setzero_si256();
  const LowestNumber low = lowest_number(n, [&](int32_t p) {
    const __m256i word = load_eight(words + p);
    any = _mm256_or_si256(any, word);
    const __m256i step = _mm256_and_si256(word, eight_of(CountedSteps::kDistance));
    if (kOrder == WordOrder::kStep) return step;
    return lanes.of(_mm256_srli_epi32(word, CountedSteps::kStepBits), step);
  });
  const bool far = _mm256_movemask_ps(_mm256_castsi256_ps(any)) != 0;
  if (kOrder == WordOrder::kStep) return LowestWords{low.positions, false, far};
  const uint64_t same = match_lanes(words, n, words[__builtin_ctzll(low.positions)]);
  return LowestWords{low.positions, (low.positions & ~same) != 0, far};
}

// The counts of eight words. highs: of their slots, or null.
inline __m256i counts_of(__m256i word, const uint16_t* highs) {
  __m256i high = eight_of(1);
  if (highs != nullptr) {
    high = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(highs)));
  }
  const __m256i flag = eight_of(CountedSteps::kHasHighCount);
  const __m256i has = _mm256_cmpeq_epi32(_mm256_and_si256(word, flag), flag);
  const __m256i low = _mm256_and_si256(_mm256_srli_epi32(word, CountedSteps::kStepBits),
                                       eight_of(CountedSteps::kLowCount));
  high = _mm256_slli_epi32(_mm256_and_si256(high, has), CountedSteps::kCountBits);
  return _mm256_or_si256(low, high);
}

// The unpinned words of the lowest number. highs: the upper bits of the counts; null: counts with
// upper bits are taken for some number above kLowCount.
inline LowestWords lowest_unpinned(const WordRanks& ranks, const uint32_t* words,
                                   const uint16_t* highs, int32_t n) {
  const bool aged = ranks.ranking.aged;
#ifdef HKV_AVX512
  if (ranks.wide) {
    if (aged) {
      return highs != nullptr ? lowest_unpinned_avx512<true, true>(ranks, words, highs, n)
                              : lowest_unpinned_avx512<true, false>(ranks, words, highs, n);
    }
    return highs != nullptr ? lowest_unpinned_avx512<false, true>(ranks, words, highs, n)
                            : lowest_unpinned_avx512<false, false>(ranks, words, highs, n);
  }
#endif
  const HighRankLanes lanes(ranks.high_ranks);
  const __m256i last_unpinned = _mm256_set1_epi32(ranks.last_unpinned);
  const __m256i distance = eight_of(CountedSteps::kDistance);
  uint32_t counts[kBucketDigests];
  __m256i any = _mm256_setzero_si256();
  const auto number = [&](int32_t p) {
    const __m256i word = load_eight(words + p), step = _mm256_and_si256(word, distance);
    any = _mm256_or_si256(any, word);
    const __m256i count = counts_of(word, highs == nullptr ? nullptr : highs + p);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(counts + p), count);
    return _mm256_or_si256(aged ? lanes.of(count, step) : count,
                           _mm256_cmpgt_epi32(step, last_unpinned));
  };
  const LowestNumber low = lowest_number(n, number, ranks.high_ranks.rounds());
  const bool far = _mm256_movemask_ps(_mm256_castsi256_ps(any)) != 0;
  if (low.number == UINT32_MAX) return LowestWords{0, false, far};
  const int one = __builtin_ctzll(low.positions);
  if (aged) {
    const uint64_t same = match_lanes(words, n, words[one]) & match_lanes(counts, n, counts[one]);
    return LowestWords{low.positions, (low.positions & ~same) != 0, far};
  }
  const LowestNumber first = lowest_number(n, [&](int32_t p) {
    const __m256i same = _mm256_cmpeq_epi32(load_eight(counts + p), eight_of(low.number));
    const __m256i step = _mm256_and_si256(load_eight(words + p), distance);
    return _mm256_or_si256(step, _mm256_xor_si256(same, eight_of(UINT32_MAX)));
  });
  return LowestWords{first.positions, false, far};
}

// As lowest_counted, for the unpinned words. Returns kUnknown if a word is far, or the lowest count
// has too many bits.
inline LowestRank lowest_unpinned(const WordRanks& ranks, const CountedSteps& counted, int64_t base,
                                  int32_t n, bool reads_high) {
  if (reads_high) ranks.note_high();
  const LowestWords found = lowest_unpinned(ranks, counted.words + base,
                                            reads_high ? counted.window->high + base : nullptr, n);
  if (found.far) return kUnknown;
  if (found.positions == 0) return kAllPinned;
  const uint32_t most = reads_high ? HighRanks::kMax : CountedSteps::kLowCount;
  const int64_t one = base + __builtin_ctzll(found.positions);
  const uint64_t count = counted.count(one);
  if (count > most) return kUnknown;
  if (found.differ) return lowest_of_subset(ranks, counted, base, found.positions, most);
  const uint32_t step = counted.step(one);
  return LowestRank{found.positions, {ranks.ranking.of(count, step), step}};
}

// Whether the first eight counts have high bits: then those of the whole bucket are likely to.
inline bool all_high(const uint32_t* words) {
  static_assert(CountedSteps::kHasHighCount << 1 == 1u << 31);
  const __m256i signs = _mm256_slli_epi32(load_eight(words), 1);
  return _mm256_movemask_ps(_mm256_castsi256_ps(signs)) == 0xff;
}
#endif

// As lowest_counted, if the words of the lowest number do not decide. high: whether even the lowest
// count has high bits.
[[gnu::noinline]] inline LowestRank lowest_of_unpinned(const WordRanks& ranks,
                                                       const CountedSteps& counted, int64_t base,
                                                       int32_t n, [[maybe_unused]] bool high) {
#ifdef __AVX2__
  if (n >= kNumberLanes) {
    const bool reads = high || ranks.needs_high();
    LowestRank lowest = lowest_unpinned(ranks, counted, base, n, reads);
    if (is_unknown(lowest) && !reads) lowest = lowest_unpinned(ranks, counted, base, n, true);
    if (!is_unknown(lowest)) return lowest;
  }
#endif
  return lowest_of_all(ranks, counted, base, n);
}

// As lowest_counted. found: from lowest_words. most: the highest count that has a short rank of its
// own.
template <WordOrder kOrder>
inline LowestRank lowest_of_words(const WordRanks& ranks, const CountedSteps& counted, int64_t base,
                                  int32_t n, const LowestWords& found, uint32_t most) {
  const uint32_t word = counted.words[base + __builtin_ctzll(found.positions)];
  const auto distance = static_cast<int32_t>(word & CountedSteps::kDistance);
  const uint32_t step = ranks.begin + static_cast<uint32_t>(distance);
  const uint32_t count = word >> CountedSteps::kStepBits;
  const bool unpinned = distance <= ranks.last_unpinned;
  if (kOrder == WordOrder::kStep) {
    if (unpinned && !found.far) [[likely]]
      return LowestRank{found.positions, {ranks.ranking.of(1, step), step}};
    return !unpinned && !found.far ? kAllPinned
                                   : lowest_of_unpinned(ranks, counted, base, n, false);
  }
  if (unpinned && count <= most && !found.far) [[likely]] {
    if (kOrder == WordOrder::kCount) return LowestRank{found.positions, {count, step}};
    if (!found.differ) [[likely]]
      return LowestRank{found.positions, {ranks.short_ranks.exactly(count, step), step}};
  }
  return lowest_of_unpinned(ranks, counted, base, n, unpinned && count > CountedSteps::kLowCount);
}

template <WordOrder kOrder>
inline LowestRank lowest_of_words(const WordRanks& ranks, const CountedSteps& counted, int64_t base,
                                  int32_t n) {
  [[maybe_unused]] const uint32_t* const words = counted.words + base;
  [[maybe_unused]] constexpr bool kShort = kOrder == WordOrder::kRank;
#ifdef __AVX2__
  if (kOrder != WordOrder::kStep && n >= kNumberLanes && all_high(words))
    return lowest_of_unpinned(ranks, counted, base, n, true);
#endif
#ifdef HKV_AVX512
  if (ranks.wide) {
    return lowest_of_words<kOrder>(ranks, counted, base, n,
                                   lowest_words_avx512<kOrder>(ranks, words, n),
                                   kShort ? ShortRanks::kMax : CountedSteps::kLowCount);
  }
#endif
#ifdef __AVX2__
  if (n >= kNumberLanes) {
    return lowest_of_words<kOrder>(ranks, counted, base, n, lowest_words<kOrder>(ranks, words, n),
                                   kShort ? ShortRankLanes::kMax : CountedSteps::kLowCount);
  }
#endif
  return lowest_of_all(ranks, counted, base, n);
}

// The unpinned slots of the lowest rank, of n slots from `base` on.
inline LowestRank lowest_counted(const WordRanks& ranks, const CountedSteps& counted, int64_t base,
                                 int32_t n) {
  switch (ranks.order) {
    case WordOrder::kStep:
      return lowest_of_words<WordOrder::kStep>(ranks, counted, base, n);
    case WordOrder::kCount:
      return lowest_of_words<WordOrder::kCount>(ranks, counted, base, n);
    default:
      return lowest_of_words<WordOrder::kRank>(ranks, counted, base, n);
  }
}

}  // namespace torchrec_hkv::hash_table::cpu
