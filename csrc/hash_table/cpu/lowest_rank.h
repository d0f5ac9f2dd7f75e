// The lowest rank of a full bucket, on the CPU.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "common/select.h"
#include "hash_table/cpu/bucket.h"
#include "hash_table/table_view.h"

namespace torchrec_hkv::hash_table::cpu {

struct Victim {
  int64_t slot;  // kNoSlot: none
  Rank rank;
};

// The slots of a bucket's lowest rank.
struct Lowest {
  uint64_t positions;  // a bit each; none: all are pinned
  Rank rank;

  Victim first(int64_t base) const {
    return Victim{positions == 0 ? kNoSlot : base + __builtin_ctzll(positions), rank};
  }
};

constexpr Lowest kAllPinned{0, {UINT64_MAX, UINT32_MAX}};

// Eight slots' last steps and scores, in GCC's and Clang's vector extension. Where a lane's
// condition holds, the comparison that tells so has all bits there.
typedef uint32_t StepLanes __attribute__((vector_size(32)));
typedef uint64_t ScoreLanes __attribute__((vector_size(64)));
typedef int64_t LongLanes __attribute__((vector_size(64)));
constexpr int32_t kLanes = 8;

template <typename LanesOf, typename T>
inline void load_lanes(LanesOf& to, const T* from) {
  std::memcpy(&to, from, sizeof(to));
}

// A bit for each of up to 64 slots: whether they have this step.
inline uint64_t match_steps(const uint32_t* steps, int32_t n, uint32_t step) {
  uint64_t mask = 0;
  int32_t p = 0;
#ifdef __AVX2__
  const __m256i wanted = _mm256_set1_epi32(static_cast<int32_t>(step));
  for (; p + kLanes <= n; p += kLanes) {
    const __m256i some = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(steps + p));
    const auto same = _mm256_movemask_ps(_mm256_castsi256_ps(_mm256_cmpeq_epi32(some, wanted)));
    mask |= static_cast<uint64_t>(static_cast<uint32_t>(same)) << p;
  }
#endif
  for (; p < n; ++p) mask |= static_cast<uint64_t>(steps[p] == step) << p;
  return mask;
}

// `but`: a slot that does not take part, at which steps need not be read; -1: all do.
inline uint32_t lowest_step(const uint32_t* steps, int32_t n, int32_t but) {
  StepLanes low = ~StepLanes{};
  StepLanes at = {0, 1, 2, 3, 4, 5, 6, 7};
  int32_t p = 0;
  for (; p + kLanes <= n; p += kLanes, at += kLanes) {
    StepLanes some;
    load_lanes(some, steps + p);
    some |= (StepLanes)(at == static_cast<uint32_t>(but));
    low = some < low ? some : low;
  }
  uint32_t step = UINT32_MAX;
  for (int32_t k = 0; k < kLanes; ++k) step = std::min(step, low[k]);
  for (; p < n; ++p) step = std::min(step, p == but ? UINT32_MAX : steps[p]);
  return step;
}

// ranks[p] = Ranking::of the scores and steps, which are all read.
inline void rank_scores(const Ranking& ranking, const uint64_t* scores, const uint32_t* steps,
                        int32_t n, uint64_t* ranks) {
  int32_t p = 0;
#ifdef __AVX2__
  const auto all = [](uint64_t value) { return _mm256_set1_epi64x(static_cast<int64_t>(value)); };
  const auto lesser = [](__m256i a, __m256i b) {  // counts have no sign bit
    return _mm256_blendv_epi8(a, b, _mm256_cmpgt_epi64(a, b));
  };
  const __m256i two_to_52 = _mm256_castpd_si256(_mm256_set1_pd(0x1p52));
  const __m256i fraction = all(0xffff), one = all(1 << kFractionBits);
  const __m256i low = all(ranking.half_life & 0xffffffffu), high = all(ranking.half_life >> 32);
  for (; p + 4 <= n; p += 4) {
    __m256i count = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(scores + p));
    count = lesser(count, all(kMostLogCount));
    count = _mm256_add_epi64(count, _mm256_srli_epi64(_mm256_cmpeq_epi64(count, all(0)), 63));
    // The double of the same number has the exponent and the fraction of log2_of_count.
    const __m256d number = _mm256_sub_pd(_mm256_castsi256_pd(_mm256_or_si256(count, two_to_52)),
                                         _mm256_castsi256_pd(two_to_52));
    const __m256i log =
        _mm256_sub_epi64(_mm256_srli_epi64(_mm256_castpd_si256(number), 52 - kFractionBits),
                         all(uint64_t{1023} << kFractionBits));
    // As log2_of_fraction; products of 32 bits.
    const __m256i f = _mm256_and_si256(log, fraction);
    const __m256i arc = _mm256_srli_epi64(_mm256_mul_epu32(f, _mm256_sub_epi64(one, f)), 16);
    const __m256i bent =
        _mm256_add_epi64(log, _mm256_srli_epi64(_mm256_mul_epu32(arc, all(kBend)), 16));
    const __m256i worth = _mm256_add_epi64(_mm256_mul_epu32(low, bent),
                                           _mm256_slli_epi64(_mm256_mul_epu32(high, bent), 32));
    const __m256i step =
        _mm256_cvtepu32_epi64(_mm_loadu_si128(reinterpret_cast<const __m128i*>(steps + p)));
    const __m256i rank = _mm256_add_epi64(_mm256_slli_epi64(step, kFractionBits),
                                          _mm256_srli_epi64(worth, kFractionBits));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(ranks + p), rank);
  }
#endif
  for (; p < n; ++p) ranks[p] = ranking.of(scores[p], steps[p]);
}

// The slots of the lowest rank in a full bucket, `but` aside: a position, or -1. Pinned slots do
// not take part. No branches on ranks: they are not to be foreseen.
inline Lowest lowest_rank_in(const TableView& table, uint32_t bucket, uint32_t pinned_from,
                             int32_t but = -1) {
  const int64_t base = first_slot_of(table, bucket);
  const int32_t n = table.bucket_slots;
  const uint32_t* const steps = table.last_steps + base;
  const uint64_t allowed = but < 0 ? ~uint64_t{0} : ~(uint64_t{1} << but);
  if (table.scores == nullptr) {
    const uint32_t step = lowest_step(steps, n, but);
    if (step >= pinned_from) return kAllPinned;
    return Lowest{match_steps(steps, n, step) & allowed, {step, step}};
  }
  const uint64_t* scores = table.scores + base;
  uint64_t aged[kBucketDigests];
  if (const Ranking ranking = table.ranking(); ranking.aged) {
    rank_scores(ranking, scores, steps, n, aged);
    scores = aged;
  }
  ScoreLanes lows = ~ScoreLanes{};
  StepLanes at = {0, 1, 2, 3, 4, 5, 6, 7};
  int32_t p = 0;
  for (; p + kLanes <= n; p += kLanes, at += kLanes) {
    StepLanes step;
    ScoreLanes score;
    load_lanes(step, steps + p);
    load_lanes(score, scores + p);
    // All bits are set of the score of a slot that is out of it.
    const auto out = (step >= pinned_from) | (at == static_cast<uint32_t>(but));
    score |= (ScoreLanes) __builtin_convertvector(out, LongLanes);
    lows = score < lows ? score : lows;
  }
  uint64_t low = UINT64_MAX;
  for (int32_t k = 0; k < kLanes; ++k) low = std::min(low, lows[k]);
  for (; p < n; ++p) low = std::min(low, steps[p] < pinned_from && p != but ? scores[p] : low);
  // Of those with that score, the lowest step.
  uint32_t others[kBucketDigests];
  for (p = 0; p < n; ++p) {
    const bool in = (scores[p] == low) & (steps[p] < pinned_from) & (p != but);
    others[p] = in ? steps[p] : UINT32_MAX;
  }
  const uint32_t step = lowest_step(others, n, -1);
  if (step == UINT32_MAX) return kAllPinned;
  return Lowest{match_steps(others, n, step), {low, step}};
}

// Which of two buckets' victims goes: among equals the first bucket's.
inline Victim lower_rank(const Victim& first, const Victim& second) {
  const Rank &a = first.rank, &b = second.rank;
  const bool other = (b.score < a.score) | ((b.score == a.score) & (b.last_step < a.last_step));
  return Victim{static_cast<int64_t>(select(other, second.slot, first.slot)),
                {select(other, b.score, a.score),
                 static_cast<uint32_t>(select(other, b.last_step, a.last_step))}};
}

// The first slot of the lowest rank in two full buckets.
inline Victim lowest_rank(const TableView& table, const BucketChoice& choice,
                          uint32_t pinned_from) {
  const auto in = [&](uint32_t bucket) {
    return lowest_rank_in(table, bucket, pinned_from).first(first_slot_of(table, bucket));
  };
  return lower_rank(in(choice.first), in(choice.second));
}

inline void prefetch_ranks(const TableView& table, uint32_t bucket) {
  const int64_t base = first_slot_of(table, bucket);
  prefetch_bytes(&table.last_steps[base], table.bucket_slots * sizeof(uint32_t));
  if (table.scores != nullptr) {
    prefetch_bytes(&table.scores[base], table.bucket_slots * sizeof(uint64_t));
  }
}

}  // namespace torchrec_hkv::hash_table::cpu
