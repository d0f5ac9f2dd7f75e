// The lowest rank of a bucket whose steps and counts are in CountedSteps, on the CPU.
//
// Words turn into numbers that order as the ranks do, or nearly so: under LFU the count above the
// step in the window; with aging the rank in whole steps, of which the lowest, mostly one, are then
// compared exactly.
#pragma once

#include <algorithm>
#include <cstdint>

#include "hash_table/aged_lfu.h"
#include "hash_table/counted_steps.h"
#include "hash_table/cpu/lowest_aged.h"
#include "hash_table/cpu/lowest_lanes.h"
#include "hash_table/cpu/lowest_score.h"

namespace torchrec_hkv::hash_table::cpu {

// lowest_counted by the exact ranks of all entries.
[[gnu::noinline]] inline Lowest lowest_of_all(const Ranking& ranking, const CountedSteps& counted,
                                              int64_t base, int32_t n, uint32_t pinned_from) {
  uint64_t counts[kBucketDigests];
  uint32_t steps[kBucketDigests];
  for (int32_t p = 0; p < n; ++p) {
    counts[p] = counted.count(base + p);
    steps[p] = counted.step(base + p);
  }
  return ranking.aged ? lowest_score<true>(ranking, counts, steps, n, pinned_from)
                      : lowest_score<false>(ranking, counts, steps, n, pinned_from);
}

#ifdef __AVX2__
// The words of a bucket.
class WordLanes {
 public:
  WordLanes(const CountedSteps& counted, int64_t base, int32_t n, uint32_t pinned_from)
      : words_(counted.words + base),
        n_(n),
        last_free_(eight_of(last_free(counted.begin(), pinned_from))) {}

  // The slots of the lowest number, without the pinned ones; the number is UINT32_MAX if all are
  // pinned. far: whether a word has kIsFar; nothing else is valid then.
  struct Found {
    LowestNumber lowest;
    bool far;
  };

  Found by_step() const {
    return lowest([](__m256i, __m256i step) { return step; });
  }
  // By count, then by step. A count with high bits ranks above all others.
  Found by_count() const {
    return lowest([](__m256i word, __m256i) { return word; });
  }
  // By rank in whole steps, as SmallWholeRanks or WholeRanks compute it. A count with high bits is
  // above kLowCount.
  template <typename Ranks>
  Found by_rank(const Ranks& ranks) const {
    return lowest([&](__m256i word, __m256i step) {
      return ranks.of(_mm256_srli_epi32(word, CountedSteps::kStepBits), step);
    });
  }

 private:
  // The largest distance from the begin of the window that is not pinned; -1 if all are.
  static uint32_t last_free(uint32_t begin, uint32_t pinned_from) {
    const uint32_t first = pinned_from > begin ? pinned_from - begin : 0;
    return std::min(first, CountedSteps::kWindow) - 1;
  }

  // number(words, distances from the begin of the window)
  template <typename Number>
  [[gnu::always_inline]] Found lowest(const Number& number) const {
    const __m256i distance = eight_of(CountedSteps::kDistance);
    __m256i any = _mm256_setzero_si256();
    const LowestNumber low = lowest_number(n_, [&](int32_t p) {
      const __m256i word = load_eight(words_ + p);
      any = _mm256_or_si256(any, word);
      const __m256i step = _mm256_and_si256(word, distance);
      return _mm256_or_si256(number(word, step), _mm256_cmpgt_epi32(step, last_free_));
    });
    return Found{low, _mm256_movemask_ps(_mm256_castsi256_ps(any)) != 0};
  }

  const uint32_t* const words_;
  const int32_t n_;
  const __m256i last_free_;
};

// lowest_counted for a half-life above 0. Returns kUnknown if the words alone do not tell.
inline Lowest lowest_aged(const Ranking& ranking, const CountedSteps& counted, int64_t base,
                          int32_t n, const WordLanes& words) {
  const SmallWholeRanks small(ranking);
  const WordLanes::Found found = words.by_rank(small);
  if (found.far || found.lowest.number == UINT32_MAX) return found.far ? kUnknown : kAllPinned;
  const int64_t first = base + __builtin_ctzll(found.lowest.positions);
  const uint32_t word = counted.words[first], count = word >> CountedSteps::kStepBits;
  // The lowest entries usually have the same small count.
  const uint64_t same = match_lanes(counted.words + base, n, word);
  if (count <= SmallWholeRanks::kMost && (found.lowest.positions & ~same) == 0) [[likely]] {
    const uint32_t step = counted.step(first);
    return Lowest{same, {small.exactly(count, step), step}};
  }
  constexpr uint32_t kMost = CountedSteps::kLowCount;
  const LowestNumber all = words.by_rank(WholeRanks(ranking, kMost + 1)).lowest;
  return lowest_of_some(
      ranking, all.positions, kMost, [&](int p) { return counted.count(base + p); },
      [&](int p) { return counted.step(base + p); });
}

// lowest_counted from the words alone. Returns kUnknown if they do not tell.
inline Lowest lowest_of_words(const Ranking& ranking, const CountedSteps& counted, int64_t base,
                              int32_t n, uint32_t pinned_from) {
  if (n < kNumberLanes || (ranking.aged && !has_whole_ranks(ranking))) return kUnknown;
  const WordLanes words(counted, base, n, pinned_from);
  if (ranking.aged && ranking.half_life > 0) return lowest_aged(ranking, counted, base, n, words);
  const WordLanes::Found found = ranking.aged ? words.by_step() : words.by_count();
  if (found.far || found.lowest.number == UINT32_MAX) return found.far ? kUnknown : kAllPinned;
  const int64_t first = base + __builtin_ctzll(found.lowest.positions);
  const uint32_t step = counted.step(first);
  const uint64_t count = ranking.aged ? 1 : counted.count(first);
  if (count > CountedSteps::kLowCount) return kUnknown;
  return Lowest{found.lowest.positions, {ranking.of(count, step), step}};
}
#endif

// The slots of the lowest rank of n slots from `base` on, without the pinned ones.
inline Lowest lowest_counted(const Ranking& ranking, const CountedSteps& counted, int64_t base,
                             int32_t n, uint32_t pinned_from) {
#ifdef __AVX2__
  const Lowest lowest = lowest_of_words(ranking, counted, base, n, pinned_from);
  if (!is_unknown(lowest)) [[likely]]
    return lowest;
#endif
  return lowest_of_all(ranking, counted, base, n, pinned_from);
}

}  // namespace torchrec_hkv::hash_table::cpu
