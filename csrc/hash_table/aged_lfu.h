// LFU with aging. An entry's count is worth half after each half-life without a lookup of its id.
// The entry with the lowest worth leaves a full bucket. The logarithm of the worth gives the same
// order and does not change with time:
//
//   log2(count * 2^(-age / half-life)) ~ last step + half-life * log2(count)
//
// So a hit adds to the count and stores the step, as under LFU; only eviction compares this sum
// instead of the count. The half-life is c times as many lookups as the table has slots: c = 0 is
// LRU, an infinite c is LFU.
//
// Steps stand for lookups: the device tracks the average number of lookups in a step. Both devices
// compute the same bits: integers, and doubles that are only multiplied and divided.
#pragma once

#include <cstdint>

#include "common/macros.h"

namespace torchrec_hkv::hash_table {

constexpr int kFractionBits = 16;
constexpr uint64_t kMaxLogCount = (uint64_t{1} << 52) - 1;  // higher counts rank the same
constexpr uint64_t kMaxHalfLife = (uint64_t{1} << 42) - 1;  // 2^26 steps
constexpr uint64_t kInfiniteHalfLife = ~uint64_t{0};

// log2(1 + f) ~ f + .344 f (1 - f).
constexpr uint32_t kBend = 22544;

// log2(1 + f) of the fraction f with 16 bits. The error is below .009. The function never
// decreases.
HKV_HOST_DEVICE uint32_t log2_of_fraction(uint32_t f) {
  return f + ((f * (65536 - f) >> 16) * kBend >> 16);
}

// log2(count) with 16 bits of fraction, truncated; 0 and 1 give 0.
HKV_HOST_DEVICE uint64_t log2_of_count(uint64_t count) {
  if (count < 2) return 0;
  if (count > kMaxLogCount) count = kMaxLogCount;
#ifdef __CUDA_ARCH__
  const int exponent = 63 - __clzll(static_cast<long long>(count));
#else
  const int exponent = 63 - __builtin_clzll(count);
#endif
  const uint64_t fraction = exponent > kFractionBits ? count >> (exponent - kFractionBits)
                                                     : count << (kFractionBits - exponent);
  return static_cast<uint64_t>(exponent) << kFractionBits |
         log2_of_fraction(static_cast<uint32_t>(fraction) & 0xffffu);
}

// Half-lives by which a new id may rank below an entry that it replaces in a training lookup. Of
// the values 0 to 4, 2 had the highest AUC over the streams of benchmarks/quality.py.
constexpr uint64_t kGraceHalfLives = 2;

// How entries of one table are ranked in one call.
struct Ranking {
  bool aged;           // false: by the score itself
  uint64_t half_life;  // steps, with 16 bits of fraction

  HKV_HOST_DEVICE uint64_t of(uint64_t score, uint32_t last_step) const {
    if (!aged) return score;
    return (static_cast<uint64_t>(last_step) << kFractionBits) +
           (half_life * log2_of_count(score) >> kFractionBits);
  }
  // The highest rank that a new id replaces in a training lookup. A new id ranks as if it had been
  // looked up four times as often: it is given time to come again.
  HKV_HOST_DEVICE uint64_t replaced_by_new(uint64_t score, uint32_t now) const {
    return of(score, now) + kGraceHalfLives * half_life;
  }
};

// State of a table under LFU with aging, in the memory of the device that runs the kernels. The
// host writes `c`, and the other values when a table is loaded or cleared. torchrec_hkv.hash_table
// reads it as float64 [7].
struct AgedLfu {
  double c;             // half-life in lookups / slots
  double lookups;       // lookups of the table in `steps` steps
  double steps;         // both are halved from time to time
  double seen_lookups;  // the table's lookup counter at the last update
  double seen_step;     // of the last update; -1: none
  double unit;          // the half-life for c = 1, as below
  uint64_t half_life;   // as Ranking::half_life, or kInfiniteHalfLife

  HKV_HOST_DEVICE Ranking ranking() const {
    return Ranking{half_life != kInfiniteHalfLife, half_life};
  }

  // Called at the start of a call. `now` is its step, `counted` the number of lookups of earlier
  // calls. A finite half-life is 0 until the first lookup is counted.
  HKV_HOST_DEVICE void begin_call(uint32_t now, uint64_t counted, int64_t slots) {
    const double step = now, all_lookups = static_cast<double>(counted);
    if (seen_step >= 0 && step >= seen_step && all_lookups >= seen_lookups) {
      lookups += all_lookups - seen_lookups;
      steps += step - seen_step;
    }
    seen_lookups = all_lookups;
    seen_step = step;
    while (lookups > 8.0 * static_cast<double>(slots) && steps > 1) {
      lookups *= .5;
      steps *= .5;
    }
    set_half_life(slots);
  }

  HKV_HOST_DEVICE void set_half_life(int64_t slots) {
    const double per_lookup = lookups > 0 ? steps / lookups : 0;
    unit = static_cast<double>(slots) * per_lookup * 65536.0;
    half_life = c > 1e300 ? kInfiniteHalfLife : half_life_of(c);
  }

  HKV_HOST_DEVICE uint64_t half_life_of(double any_c) const {
    const double wanted = any_c * unit;
    return wanted < static_cast<double>(kMaxHalfLife) ? static_cast<uint64_t>(wanted)
                                                      : kMaxHalfLife;
  }
  // The ranking with another, finite c.
  HKV_HOST_DEVICE Ranking ranking_of(double any_c) const {
    return Ranking{true, half_life_of(any_c)};
  }
};
static_assert(sizeof(AgedLfu) == 7 * sizeof(double));

}  // namespace torchrec_hkv::hash_table
