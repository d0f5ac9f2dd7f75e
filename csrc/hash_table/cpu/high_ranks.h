// Ranks with aging in 32 bits for entries with any counts, on the CPU.
#pragma once

#include <algorithm>
#include <cstdint>

#include "hash_table/aged_lfu.h"
#include "hash_table/counted_steps.h"

namespace torchrec_hkv::hash_table::cpu {

// As ShortRanks, but for counts up to kMax, whose logarithms are computed. Higher counts rank as
// some count between kMax and kHighest.
class HighRanks {
 public:
  static constexpr uint32_t kMax = (CountedSteps::kLongHigh << CountedSteps::kCountBits) - 1;
  static constexpr uint32_t kHighest = (1u << 23) - 1;
  // Logarithms are shifted by this. The upper 32 bits of the product with half_life() are what a
  // rank has above the step.
  static constexpr int kLogShift = 11;

  HighRanks() = default;
  // last: the highest step of a compared entry, as a distance in the window of CountedSteps.
  HighRanks(const Ranking& ranking, uint32_t last) {
    const uint64_t worth = ranking.half_life * kLogEnd >> 2 * kFractionBits;
    const auto steps = static_cast<uint32_t>(last + worth + 1);
    bits_ = std::min(kFractionBits, __builtin_clz(steps) - 1);
    const int shift = kLogShift - bits_;
    if (shift <= 0) {
      half_life_ = static_cast<uint32_t>(ranking.half_life << -shift);
    } else {
      half_life_ = static_cast<uint32_t>(ranking.half_life >> shift);
      rounds_ = uint64_t{half_life_} << shift != ranking.half_life;
    }
  }

  // The bits of fraction.
  int bits() const { return bits_; }
  uint32_t half_life() const { return half_life_; }
  // Whether some ranks are lower by one than they should be.
  bool rounds() const { return rounds_; }

 private:
  static constexpr uint64_t kLogEnd = uint64_t{23} << kFractionBits;  // above that of kHighest
  static_assert(kLogEnd << kLogShift < uint64_t{1} << 32);
  static_assert((kMaxHalfLife * kLogEnd >> 2 * kFractionBits) + (1u << 23) < INT32_MAX);

  uint32_t half_life_ = 0;
  int bits_ = 0;
  bool rounds_ = false;
};

}  // namespace torchrec_hkv::hash_table::cpu
