// Ranks with aging in 32 bits, on the CPU.
#pragma once

#include <algorithm>
#include <cstdint>

#include "hash_table/aged_lfu.h"

namespace torchrec_hkv::hash_table::cpu {

// Ranks of entries with small counts, from arrays that a call computes once for each table. A short
// rank is a step with a few bits of fraction, as many as fit for the given half-life and steps. A
// lower short rank is a lower rank; entries with the same short rank are compared exactly. An entry
// with a higher count has the short rank of kMax: its rank is at least that.
class ShortRanks {
 public:
  static constexpr uint32_t kMax = 15;

  ShortRanks() = default;
  // last: the highest step of a compared entry.
  ShortRanks(const Ranking& ranking, uint32_t last) {
    for (uint32_t count = 0; count <= kMax; ++count) {
      worths_[count] = ranking.half_life * kLogs[count] >> kFractionBits;
    }
    const uint64_t steps = last + (worths_[kMax] >> kFractionBits) + 1;
    fit_ = steps <= INT32_MAX;
    if (!fit_) return;
    // One bit stays unused, because short ranks are compared as signed integers.
    bits_ = std::min(kFractionBits, __builtin_clz(static_cast<uint32_t>(steps)) - 1);
    for (uint32_t count = 0; count <= kMax; ++count) {
      short_worths_[count] = static_cast<uint32_t>(worths_[count] >> (kFractionBits - bits_));
    }
  }

  // Whether short ranks have room for the steps. If not, no short ranks are computed.
  bool fit() const { return fit_; }
  // The bits of fraction.
  int bits() const { return bits_; }
  // By count: what a short rank has above the step.
  const uint32_t* worths() const { return short_worths_; }

  // Ranking::of a count up to kMax, without a branch.
  uint64_t exactly(uint64_t count, uint32_t step) const {
    return (static_cast<uint64_t>(step) << kFractionBits) + worths_[count];
  }

 private:
  // log2_of_count of 0 to kMax.
  static constexpr uint32_t kLogs[kMax + 1] = {0,      0,      65536,  103940, 131072, 151683,
                                               169476, 184451, 196608, 207265, 217219, 226467,
                                               235012, 242851, 249987, 256417};
  uint64_t worths_[kMax + 1];
  uint32_t short_worths_[kMax + 1];
  int bits_ = 0;
  bool fit_ = false;
};

}  // namespace torchrec_hkv::hash_table::cpu
