// Repeated ids in a part of a batch, on the CPU.
#pragma once

#include <algorithm>
#include <cstdint>

#include "common/select.h"
#include "hash_table/table_view.h"

namespace torchrec_hkv::hash_table::cpu {

// Finds the positions of a range that repeat the id of an earlier position, as far as a small table
// of recent ids remembers it.
class Repeats {
 public:
  static constexpr int64_t kMax = 4096;  // positions at a time

  // For positions from `first` on.
  Repeats(const int64_t* ids, int64_t first) : all_ids_(ids) { forget(first); }

  // Restarts at position `first`.
  void forget(int64_t first) {
    ids_ = all_ids_ + first;
    first_ = first;
    std::fill_n(firsts_, 1 << kBits, 0u);
  }

  // Lists the positions in [begin, end), at most kMax, that do not repeat an earlier one. Returns
  // their number.
  int64_t list(int64_t begin, int64_t end) {
    int64_t n = 0;
    uint32_t idle;
    for (int64_t at = begin; at < end; ++at) {
      const auto index = static_cast<uint32_t>(at - first_);
      uint32_t& entry =
          firsts_[static_cast<uint64_t>(ids_[index]) * 0x9e3779b97f4a7c15ull >> kShift];
      const uint32_t first = entry;
      const bool repeats =
          (ids_[first] == ids_[index]) & (first != index);  // no branch, as in IdFinder
      // Stores only a changed value, so that the next position of a hot id does not wait for the
      // store.
      *select(repeats, &idle, &entry) = index;
      origins_[at - begin] = static_cast<uint32_t>(select(repeats, first, index));
      listed_[n] = at;
      repeated_[at - begin - n] = at;
      n += !repeats;
    }
    return n;
  }
  const int64_t* listed() const { return listed_; }
  // The other positions.
  const int64_t* repeated() const { return repeated_; }
  // The position that position `begin` + i repeats, or itself.
  int64_t origin(int64_t i) const { return first_ + origins_[i]; }

  // The scores of the n listed ids: the sum over the positions of an id before `end`, or the last
  // one. list() must have been called once, for positions from the first to `end`.
  const uint64_t* given(int64_t end, int64_t n, bool sums, const CallContext& context) {
    // Indexed by position, then by number.
    for (int64_t i = 0; i < n; ++i) given_[listed_[i] - first_] = 0;
    if (sums && context.scores == nullptr) {
      for (int64_t i = 0; i < end - first_; ++i) ++given_[origins_[i]];
    } else {
      for (int64_t at = first_; at < end; ++at) {
        uint64_t& total = given_[origins_[at - first_]];
        const uint64_t more = context.given(at);
        total = sums ? std::min(total + more, kMaxCounts) : more;
      }
    }
    for (int64_t i = 0; i < n; ++i) given_[i] = given_[listed_[i] - first_];
    return given_;
  }

 private:
  static constexpr int kBits = 12, kShift = 64 - kBits;

  const int64_t* const all_ids_;
  const int64_t* ids_;
  int64_t first_;
  uint32_t firsts_[1 << kBits];  // position - first_, by a hash of the id
  uint32_t origins_[kMax];
  int64_t listed_[kMax], repeated_[kMax];
  uint64_t given_[kMax];
};

}  // namespace torchrec_hkv::hash_table::cpu
