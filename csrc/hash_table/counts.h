// The counts of a table under LFU, aged or not, on a CPU: the low 15 bits of each and the 48 bits
// above them in two arrays. A hit adds to the low bits, of which those of a bucket fill two cache
// lines, and few hits carry. An eviction reads the low bits only, unless all counts that it has to
// compare have more.
#pragma once

#include <cstdint>
#include <cstring>

#include "common/scores.h"

namespace torchrec_hkv::hash_table {

constexpr uint16_t kHasHighBits = 0x8000;
constexpr uint16_t kLowBits = kHasHighBits - 1;
constexpr int kNumLowBits = 15;
constexpr int kHighWords = 3;
static_assert(kMostCounts == (uint64_t{1} << (16 * kHighWords + kNumLowBits)) - 1);

struct CountArrays {
  uint16_t* low;  // [num_slots] and kHasHighBits, unless those are 0; null: no counts are kept here
  uint16_t* high;  // [num_slots][kHighWords] undefined without kHasHighBits

  bool kept() const { return low != nullptr; }

  uint64_t of(int64_t slot) const { return with_high(low[slot], slot); }
  void set(int64_t slot, uint64_t count) const {
    if (count > kMostCounts) count = kMostCounts;
    low[slot] = low_of(count);
    set_high(slot, count);
  }
  // Adds as next_score does.
  void add(int64_t slot, uint64_t given) const {
    if (!carries(low[slot], given)) [[likely]] {
      low[slot] = static_cast<uint16_t>(low[slot] + given);
    } else {
      set(slot, sum(of(slot), given));
    }
  }

  // Whether the low bits have no room for so much more.
  static bool carries(uint16_t from, uint64_t given) {
    return given > static_cast<uint64_t>(kLowBits - (from & kLowBits));
  }
  static uint64_t sum(uint64_t count, uint64_t given) {
    return next_score(Eviction::kLfu, count, 0, 0, given);
  }

  // A count whose element of `low` is `from`.
  uint64_t with_high(uint16_t from, int64_t slot) const {
    if ((from & kHasHighBits) == 0) [[likely]]
      return from;
    uint64_t bits = 0;
    std::memcpy(&bits, high + slot * kHighWords, kHighWords * sizeof(uint16_t));
    return bits << kNumLowBits | (from & kLowBits);
  }
  static uint16_t low_of(uint64_t count) {
    return static_cast<uint16_t>((count & kLowBits) | (count > kLowBits ? kHasHighBits : 0));
  }
  void set_high(int64_t slot, uint64_t count) const {
    const uint64_t bits = count >> kNumLowBits;
    if (bits == 0) return;
    std::memcpy(high + slot * kHighWords, &bits, kHighWords * sizeof(uint16_t));
  }
};

}  // namespace torchrec_hkv::hash_table
