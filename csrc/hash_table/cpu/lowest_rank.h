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

// Eight slots' last steps, in GCC's and Clang's vector extension. Where a lane's condition holds,
// the comparison has all bits there.
typedef uint32_t StepLanes __attribute__((vector_size(32)));
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

#ifdef __AVX2__
// Ranking::of four entries at a time.
class RankLanes {
 public:
  explicit RankLanes(const Ranking& ranking)
      : low_(all(ranking.half_life & 0xffffffffu)), high_(all(ranking.half_life >> 32)) {}

  static __m256i all(uint64_t value) { return _mm256_set1_epi64x(static_cast<int64_t>(value)); }

  __m256i of(__m256i count, __m256i step) const {
    const __m256i two_to_52 = _mm256_castpd_si256(_mm256_set1_pd(0x1p52));
    const __m256i most = all(kMostLogCount);
    count = _mm256_blendv_epi8(count, most, _mm256_cmpgt_epi64(count, most));  // no sign bit
    count = _mm256_sub_epi64(count, _mm256_cmpeq_epi64(count, _mm256_setzero_si256()));
    // The double of the same number has the exponent and the fraction of log2_of_count.
    const __m256d number = _mm256_sub_pd(_mm256_castsi256_pd(_mm256_or_si256(count, two_to_52)),
                                         _mm256_castsi256_pd(two_to_52));
    const __m256i log =
        _mm256_sub_epi64(_mm256_srli_epi64(_mm256_castpd_si256(number), 52 - kFractionBits),
                         all(uint64_t{1023} << kFractionBits));
    // As log2_of_fraction; products of 32 bits.
    const __m256i f = _mm256_and_si256(log, all(0xffff));
    const __m256i arc =
        _mm256_srli_epi64(_mm256_mul_epu32(f, _mm256_sub_epi64(all(1 << kFractionBits), f)), 16);
    const __m256i bent =
        _mm256_add_epi64(log, _mm256_srli_epi64(_mm256_mul_epu32(arc, all(kBend)), 16));
    const __m256i worth = _mm256_add_epi64(_mm256_mul_epu32(low_, bent),
                                           _mm256_slli_epi64(_mm256_mul_epu32(high_, bent), 32));
    return _mm256_add_epi64(_mm256_slli_epi64(step, kFractionBits),
                            _mm256_srli_epi64(worth, kFractionBits));
  }

 private:
  const __m256i low_, high_;
};

inline __m256i load_steps(const uint32_t* steps) {
  return _mm256_cvtepu32_epi64(_mm_loadu_si128(reinterpret_cast<const __m128i*>(steps)));
}

inline __m256i load_scores(const uint64_t* scores) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(scores));
}
#endif

// ranks[p] = Ranking::of the scores and steps, which are all read.
inline void rank_scores(const Ranking& ranking, const uint64_t* scores, const uint32_t* steps,
                        int32_t n, uint64_t* ranks) {
  int32_t p = 0;
#ifdef __AVX2__
  const RankLanes lanes(ranking);
  for (; p + 4 <= n; p += 4) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(ranks + p),
                        lanes.of(load_scores(scores + p), load_steps(steps + p)));
  }
#endif
  for (; p < n; ++p) ranks[p] = ranking.of(scores[p], steps[p]);
}

// The slots of the lowest rank among those of a bucket, where the table keeps scores. Slot `but`
// (-1: none) and pinned ones do not take part. No branch depends on a rank, which can't be
// predicted.
template <bool kAged>
Lowest lowest_score(const Ranking& ranking, const uint64_t* scores, const uint32_t* steps,
                    int32_t n, uint32_t pinned_from, int32_t but) {
  alignas(64) uint64_t ranks[kBucketDigests];  // the highest where a slot does not take part
  uint64_t low = UINT64_MAX, positions = 0;
  int32_t p = 0;
#ifdef __AVX2__
  const RankLanes lanes(ranking);
  // Comparisons take numbers for signed: without their highest bit the order is right.
  const __m256i sign = RankLanes::all(uint64_t{1} << 63);
  const __m256i last_free = _mm256_set1_epi64x(int64_t{pinned_from} - 1);
  const __m256i excluded = _mm256_set1_epi64x(but), four = RankLanes::all(4);
  __m256i at = _mm256_set_epi64x(3, 2, 1, 0), lows = RankLanes::all(~uint64_t{0} >> 1);
  for (; p + 4 <= n; p += 4, at = _mm256_add_epi64(at, four)) {
    const __m256i step = load_steps(steps + p), score = load_scores(scores + p);
    const __m256i out =
        _mm256_or_si256(_mm256_cmpgt_epi64(step, last_free), _mm256_cmpeq_epi64(at, excluded));
    const __m256i rank = _mm256_or_si256(kAged ? lanes.of(score, step) : score, out);
    _mm256_store_si256(reinterpret_cast<__m256i*>(ranks + p), rank);
    const __m256i ordered = _mm256_xor_si256(rank, sign);
    lows = _mm256_blendv_epi8(lows, ordered, _mm256_cmpgt_epi64(lows, ordered));
  }
  alignas(32) uint64_t each[4];
  _mm256_store_si256(reinterpret_cast<__m256i*>(each), _mm256_xor_si256(lows, sign));
  for (const uint64_t one : each) low = std::min(low, one);
#endif
  for (; p < n; ++p) {
    const bool out = (steps[p] >= pinned_from) | (p == but);
    ranks[p] = out ? UINT64_MAX : kAged ? ranking.of(scores[p], steps[p]) : scores[p];
    low = std::min(low, ranks[p]);
  }
  if (low == UINT64_MAX) {  // a slot that takes part may have this score, too
    for (p = 0; p < n; ++p) {
      if (steps[p] >= pinned_from || p == but) ranks[p] = 0;
    }
  }
  p = 0;
#ifdef __AVX2__
  const __m256i wanted = RankLanes::all(low);
  for (; p + 4 <= n; p += 4) {
    const __m256i same = _mm256_cmpeq_epi64(load_scores(ranks + p), wanted);
    positions |= static_cast<uint64_t>(_mm256_movemask_pd(_mm256_castsi256_pd(same))) << p;
  }
#endif
  for (; p < n; ++p) positions |= static_cast<uint64_t>(ranks[p] == low) << p;
  if (positions == 0) return kAllPinned;
  if ((positions & (positions - 1)) == 0) {
    return Lowest{positions, {low, steps[__builtin_ctzll(positions)]}};
  }
  // Of those with that rank, the lowest step.
  uint32_t others[kBucketDigests];
  for (p = 0; p < n; ++p) others[p] = ranks[p] == low ? steps[p] : UINT32_MAX;
  const uint32_t step = lowest_step(others, n, -1);
  return Lowest{match_steps(others, n, step), {low, step}};
}

// The slots of the lowest rank in a full bucket, but for position `but` (-1: none). Pinned slots do
// not take part.
inline Lowest lowest_rank_in(const TableView& table, uint32_t bucket, uint32_t pinned_from,
                             int32_t but = -1) {
  const int64_t base = first_slot_of(table, bucket);
  const int32_t n = table.bucket_slots;
  const uint32_t* const steps = table.last_steps + base;
  if (table.scores == nullptr) {
    const uint64_t allowed = but < 0 ? ~uint64_t{0} : ~(uint64_t{1} << but);
    const uint32_t step = lowest_step(steps, n, but);
    if (step >= pinned_from) return kAllPinned;
    return Lowest{match_steps(steps, n, step) & allowed, {step, step}};
  }
  const Ranking ranking = table.ranking();
  const auto lowest = ranking.aged ? lowest_score<true> : lowest_score<false>;
  return lowest(ranking, table.scores + base, steps, n, pinned_from, but);
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
