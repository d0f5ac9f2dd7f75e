// The last steps and counts of a table under LFU, aged or not, on a CPU: one word of 32 bits for a
// slot, so that a hit changes one cache line and an eviction reads no more lines than under LRU.
//
// A word has the low 7 bits of the count and, below them, the step: a distance of 23 bits from the
// begin of a window. Two more arrays have the other bits of the count: `high` has 16 bits a slot,
// `upper` what does not fit, for counts above 8 million. A hit needs them only if it carries. An
// eviction reads `high` only if all counts that it compares have bits there. The window follows the
// clock, half of its length at a time (cpu/step_window.cpp). The few entries that it leaves behind
// have the upper bits of their steps in these arrays, too.
#pragma once

#include <cstdint>

#include "common/scores.h"

namespace torchrec_hkv::hash_table {

// What a table's words refer to.
struct StepWindow {
  using Upper = uint16_t[3];

  uint32_t begin;  // the step of distance 0
  // See CountedSteps::encode.
  uint16_t* high;  // [num_slots], defined where a word says so
  Upper* upper;    // [num_slots], defined where a word or `high` says so
};

struct CountedSteps {
  // The fields of a word, from its lowest bit.
  static constexpr int kStepBits = 23;
  static constexpr uint32_t kWindow = 1u << kStepBits;
  static constexpr uint32_t kDistance = kWindow - 1;
  static constexpr int kCountBits = 7;
  static constexpr uint32_t kLowCount = (1u << kCountBits) - 1;  // shifted to the lowest bit
  static constexpr uint32_t kHasHighCount = 1u << 30;            // the count has bits in `high`
  static constexpr uint32_t kIsFar = 1u << 31;                   // the step is not in the window
  // From this value of `high` on, there is an element of `upper`.
  static constexpr uint32_t kLongHigh = 0xff00;

  uint32_t* words;  // [num_slots]; null: the table keeps none
  StepWindow* window;

  bool enabled() const { return words != nullptr; }
  uint32_t begin() const { return window->begin; }

  bool is_near(uint32_t step) const { return step - begin() < kWindow; }

  uint32_t step(int64_t slot) const { return step_of(words[slot], slot); }
  uint64_t count(int64_t slot) const { return count_of(words[slot], slot); }

  // The step and count of a slot whose word is `word`.
  uint32_t step_of(uint32_t word, int64_t slot) const {
    if ((word & kIsFar) == 0) [[likely]]
      return begin() + (word & kDistance);
    return static_cast<uint32_t>(rest_of(word, slot) >> kFarCountBits) << kStepBits |
           (word & kDistance);
  }
  uint64_t count_of(uint32_t word, int64_t slot) const {
    const uint64_t low = word >> kStepBits & kLowCount;
    if ((word & (kIsFar | kHasHighCount)) == 0) [[likely]]
      return low;
    const uint64_t rest = rest_of(word, slot);
    if ((word & kIsFar) == 0) {
      const uint64_t high = rest < kLongHigh ? rest : rest >> 16 << 8 | (rest & 0xff);
      return high << kCountBits | low;
    }
    const uint64_t bit = (word & kHasHighCount) != 0 ? 1 : 0;
    return (rest & kFarCount) << (kCountBits + 1) | bit << kCountBits | low;
  }

  // A word and, if it has kHasHighCount or kIsFar, 16 bits for `high` and above them 48 for
  // `upper`.
  //
  // Without kIsFar these are the bits of the count above kCountBits: a value below kLongHigh, or 8
  // bits with kLongHigh and the others in `upper`. With kIsFar, the word has the low bits of the
  // step itself and, in place of kHasHighCount, one more bit of the count; the 64 bits are the
  // upper bits of the step above those of the count.
  struct EncodedEntry {
    uint32_t word;
    uint64_t rest;
  };
  EncodedEntry encode(uint32_t step, uint64_t count) const {
    if (count > kMaxCounts) count = kMaxCounts;
    const uint32_t low = (static_cast<uint32_t>(count) & kLowCount) << kStepBits;
    const uint64_t high = count >> kCountBits;
    if (is_near(step)) {
      const uint32_t flag = high != 0 ? kHasHighCount : 0;
      const uint64_t rest = high < kLongHigh ? high : high >> 8 << 16 | kLongHigh | (high & 0xff);
      return EncodedEntry{(step - begin()) | low | flag, rest};
    }
    const uint32_t bit = (high & 1) != 0 ? kHasHighCount : 0;
    return EncodedEntry{kIsFar | bit | low | (step & kDistance),
                        uint64_t{step >> kStepBits} << kFarCountBits | high >> 1};
  }
  // Stores the bits of an entry that are not in its word.
  void set_rest(int64_t slot, const EncodedEntry& encoded) const {
    if ((encoded.word & (kIsFar | kHasHighCount)) == 0) [[likely]]
      return;
    const auto high = static_cast<uint16_t>(encoded.rest);
    window->high[slot] = high;
    if (!has_upper(encoded.word, high)) return;
    for (int i = 0; i < 3; ++i) {
      window->upper[slot][i] = static_cast<uint16_t>(encoded.rest >> (16 * (i + 1)));
    }
  }

  void set(int64_t slot, uint32_t step, uint64_t count) const { set(slot, encode(step, count)); }
  void set_count(int64_t slot, uint64_t count) const { set(slot, step(slot), count); }
  void copy(int64_t from, int64_t to) const {
    const uint32_t word = words[from];
    const bool has_rest = (word & (kIsFar | kHasHighCount)) != 0;
    set(to, EncodedEntry{word, has_rest ? rest_of(word, from) : 0});
  }

  // Whether a lookup changes the word only.
  static bool fits_word(uint32_t word, uint64_t given) {
    const uint32_t count = word >> kStepBits & (kIsFar >> kStepBits | kLowCount);
    return given <= kLowCount && count + given <= kLowCount;
  }
  // The word after such a lookup. distance: from the begin of the window to the present step.
  static uint32_t word_after_lookup(uint32_t word, uint32_t distance, uint64_t given) {
    return ((word & ~kDistance) | distance) + (static_cast<uint32_t>(given) << kStepBits);
  }
  // The entry after any lookup. word: its word before.
  EncodedEntry entry_after_lookup(uint32_t word, int64_t slot, uint32_t now, uint64_t given) const {
    return encode(now, next_score(Eviction::kLfu, count_of(word, slot), 0, 0, given));
  }
  // Counts a lookup in the step `now`, which must be in the window.
  void add_lookup(int64_t slot, uint32_t now, uint64_t given) const {
    if (fits_word(words[slot], given)) [[likely]] {
      words[slot] = word_after_lookup(words[slot], now - begin(), given);
    } else {
      set(slot, entry_after_lookup(words[slot], slot, now, given));
    }
  }

 private:
  static bool has_upper(uint32_t word, uint16_t high) {
    return (word & kIsFar) != 0 || high >= kLongHigh;
  }
  uint64_t rest_of(uint32_t word, int64_t slot) const {
    uint64_t rest = window->high[slot];
    if (!has_upper(word, window->high[slot])) [[likely]]
      return rest;
    for (int i = 0; i < 3; ++i) rest |= uint64_t{window->upper[slot][i]} << (16 * (i + 1));
    return rest;
  }
  void set(int64_t slot, const EncodedEntry& encoded) const {
    words[slot] = encoded.word;
    set_rest(slot, encoded);
  }

  static constexpr int kFarCountBits = 64 - (32 - kStepBits);
  static constexpr uint64_t kFarCount = (uint64_t{1} << kFarCountBits) - 1;
  static_assert(kMaxCounts >> (kCountBits + 1) <= kFarCount);
  static_assert(kMaxCounts >> (kCountBits + 8) < uint64_t{1} << 48);
};

}  // namespace torchrec_hkv::hash_table
