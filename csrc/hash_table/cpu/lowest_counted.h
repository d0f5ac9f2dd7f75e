// The lowest rank of a bucket whose steps and counts are in CountedSteps, on the CPU.
//
// Words turn into numbers that order as the ranks do, or nearly so: under LFU the count above the
// step in the window; with aging short ranks. The words of the lowest number are mostly equal, not
// pinned, and of a small count: then they have the lowest rank. Otherwise a second pass leaves out
// pinned words and ranks all counts without high bits. If that does not tell, all counts are read.
#pragma once

#include <cstdint>

#include "hash_table/aged_lfu.h"
#include "hash_table/counted_steps.h"
#include "hash_table/cpu/lowest_lanes.h"
#include "hash_table/cpu/lowest_score.h"
#include "hash_table/cpu/lowest_some.h"
#include "hash_table/cpu/lowest_wide.h"
#include "hash_table/cpu/word_ranks.h"

namespace torchrec_hkv::hash_table::cpu {

// lowest_counted by the exact ranks of all entries.
[[gnu::noinline]] inline Lowest lowest_of_all(const WordRanks& ranks, const CountedSteps& counted,
                                              int64_t base, int32_t n) {
  uint64_t counts[kBucketDigests];
  uint32_t steps[kBucketDigests];
  ranks.note_rest();
  bool known = false;
#ifdef HKV_AVX512
  known = ranks.wide && read_counted_wide(counted, base, n, counts, steps);
#endif
  for (int32_t p = 0; p < n && !known; ++p) {
    counts[p] = counted.count(base + p);
    steps[p] = counted.step(base + p);
  }
  const auto lowest =
      ranks.ranking.aged ? lowest_score<true, uint64_t> : lowest_score<false, uint64_t>;
  return lowest(ranks.ranking, counts, steps, n, ranks.pinned_from);
}

// The lowest of some positions, with aging. Returns kUnknown if a count is above `most`.
inline Lowest lowest_of_some(const WordRanks& ranks, const CountedSteps& counted, int64_t base,
                             uint64_t positions, uint64_t most) {
  return lowest_of_some(
      ranks.ranking, positions, most, [&](int p) { return counted.count(base + p); },
      [&](int p) { return counted.step(base + p); });
}

#ifdef __AVX2__
// The words of the lowest number of at least kNumberLanes words. number(words, distances from the
// begin of the window)
template <WordOrder kOrder>
inline FoundWords lowest_words(const WordRanks& ranks, const uint32_t* words, int32_t n) {
  if (kOrder == WordOrder::kCount) {
    const int32_t lowest = lowest_signed(words, n);
    return FoundWords{match_lanes(words, n, static_cast<uint32_t>(lowest)), false, lowest < 0};
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
  if (kOrder == WordOrder::kStep) return FoundWords{low.positions, false, far};
  const uint64_t same = match_lanes(words, n, words[__builtin_ctzll(low.positions)]);
  return FoundWords{low.positions, (low.positions & ~same) != 0, far};
}

// The words of the lowest number that are not pinned. The number is UINT32_MAX if all are pinned.
struct FreeWords {
  LowestNumber lowest;
  bool far;  // whether a word has kIsFar; nothing else is valid then
};

// number(words, distances from the begin of the window)
template <typename Number>
[[gnu::always_inline]] inline FreeWords lowest_free(const WordRanks& ranks, const uint32_t* words,
                                                    int32_t n, const Number& number) {
  const __m256i last_free = _mm256_set1_epi32(ranks.last_free);
  __m256i any = _mm256_setzero_si256();
  const LowestNumber low = lowest_number(n, [&](int32_t p) {
    const __m256i word = load_eight(words + p);
    any = _mm256_or_si256(any, word);
    const __m256i step = _mm256_and_si256(word, eight_of(CountedSteps::kDistance));
    return _mm256_or_si256(number(word, step), _mm256_cmpgt_epi32(step, last_free));
  });
  return FreeWords{low, _mm256_movemask_ps(_mm256_castsi256_ps(any)) != 0};
}

// lowest_counted with aging, without the pinned words. Returns kUnknown if a word is far, or the
// lowest count has high bits.
inline Lowest lowest_free_aged(const WordRanks& ranks, const CountedSteps& counted, int64_t base,
                               int32_t n) {
  // Counts with high bits are above kLowCount.
  constexpr uint32_t kMost = CountedSteps::kLowCount;
  const WholeRankLanes lanes(ranks.ranking, kMost + 1);
  const FreeWords found =
      lowest_free(ranks, counted.words + base, n, [&](__m256i word, __m256i step) {
        return lanes.of(_mm256_srli_epi32(word, CountedSteps::kStepBits), step);
      });
  if (found.far) return kUnknown;
  if (found.lowest.number == UINT32_MAX) return kAllPinned;
  return lowest_of_some(ranks, counted, base, found.lowest.positions, kMost);
}

// lowest_counted under LFU, without the pinned words; as lowest_free_aged.
inline Lowest lowest_free_count(const WordRanks& ranks, const CountedSteps& counted, int64_t base,
                                int32_t n) {
  const auto [low, far] =
      lowest_free(ranks, counted.words + base, n, [](__m256i word, __m256i) { return word; });
  if (far) return kUnknown;
  if (low.number == UINT32_MAX) return kAllPinned;
  const uint32_t count = low.number >> CountedSteps::kStepBits;
  if (count > CountedSteps::kLowCount) return kUnknown;
  return Lowest{low.positions, {count, ranks.begin + (low.number & CountedSteps::kDistance)}};
}
#endif

// lowest_counted where the words of the lowest number do not tell.
[[gnu::noinline]] inline Lowest lowest_of_free(const WordRanks& ranks, const CountedSteps& counted,
                                               int64_t base, int32_t n) {
#ifdef __AVX2__
  if (n >= kNumberLanes) {
    const Lowest lowest = ranks.ranking.aged ? lowest_free_aged(ranks, counted, base, n)
                                             : lowest_free_count(ranks, counted, base, n);
    if (!is_unknown(lowest)) return lowest;
  }
#endif
  return lowest_of_all(ranks, counted, base, n);
}

// lowest_counted. found: by lowest_words. most: the highest count that has a short rank of its own.
template <WordOrder kOrder>
inline Lowest lowest_of_words(const WordRanks& ranks, const CountedSteps& counted, int64_t base,
                              int32_t n, const FoundWords& found, uint32_t most) {
  const uint32_t word = counted.words[base + __builtin_ctzll(found.positions)];
  const auto distance = static_cast<int32_t>(word & CountedSteps::kDistance);
  const uint32_t step = ranks.begin + static_cast<uint32_t>(distance);
  const uint32_t count = word >> CountedSteps::kStepBits;
  const bool free = distance <= ranks.last_free;
  if (kOrder == WordOrder::kStep) {
    if (free && !found.far) [[likely]]
      return Lowest{found.positions, {ranks.ranking.of(1, step), step}};
    return !free && !found.far ? kAllPinned : lowest_of_free(ranks, counted, base, n);
  }
  if (free && count <= most && !found.far) [[likely]] {
    if (kOrder == WordOrder::kCount) return Lowest{found.positions, {count, step}};
    if (!found.differ) [[likely]]
      return Lowest{found.positions, {ranks.short_ranks.exactly(count, step), step}};
  }
  // Where even the lowest count has high bits, all counts have to be read.
  const bool high = count > CountedSteps::kLowCount;
  return free && high ? lowest_of_all(ranks, counted, base, n)
                      : lowest_of_free(ranks, counted, base, n);
}

template <WordOrder kOrder>
inline Lowest lowest_of_words(const WordRanks& ranks, const CountedSteps& counted, int64_t base,
                              int32_t n) {
  [[maybe_unused]] const uint32_t* const words = counted.words + base;
  [[maybe_unused]] constexpr bool kShort = kOrder == WordOrder::kRank;
#ifdef HKV_AVX512
  if (ranks.wide) {
    return lowest_of_words<kOrder>(ranks, counted, base, n,
                                   lowest_words_wide<kOrder>(ranks, words, n),
                                   kShort ? ShortRanks::kMost : CountedSteps::kLowCount);
  }
#endif
#ifdef __AVX2__
  if (n >= kNumberLanes) {
    return lowest_of_words<kOrder>(ranks, counted, base, n, lowest_words<kOrder>(ranks, words, n),
                                   kShort ? ShortRankLanes::kMost : CountedSteps::kLowCount);
  }
#endif
  return lowest_of_all(ranks, counted, base, n);
}

// The slots of the lowest rank of n slots from `base` on, without the pinned ones.
inline Lowest lowest_counted(const WordRanks& ranks, const CountedSteps& counted, int64_t base,
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
