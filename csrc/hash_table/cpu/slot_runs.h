// Positions of a call grouped by slot, on the CPU. The slots are numbered through the tables of a
// group, in any order.
#pragma once

#include <cstdint>
#include <vector>

namespace torchrec_hkv::hash_table::cpu {

class SlotRuns {
 public:
  // Groups those of n positions for which takes(slot).
  template <typename Takes>
  SlotRuns(const int64_t* slots, int64_t n, const Takes& takes) {
    std::vector<int64_t> taken;
    for (int64_t i = 0; i < n; ++i) {
      if (takes(slots[i])) taken.push_back(i);
    }
    const std::vector<uint32_t> run_of = count(slots, taken);
    int64_t total = 0;
    for (Run& run : runs_) {
      run.begin = run.end = total;
      total += run.count;
    }
    positions_.resize(total);
    for (size_t k = 0; k < taken.size(); ++k) positions_[runs_[run_of[k]].end++] = taken[k];
  }

  int64_t size() const { return static_cast<int64_t>(runs_.size()); }
  // Runs are in the order of their first positions.
  int64_t slot(int64_t run) const { return runs_[run].slot; }
  int64_t count(int64_t run) const { return runs_[run].count; }
  // The positions of a run, in ascending order.
  const int64_t* positions(int64_t run) const { return positions_.data() + runs_[run].begin; }

 private:
  struct Run {
    int64_t slot;
    int64_t count;
    int64_t begin, end;
  };

  static constexpr uint32_t kNone = UINT32_MAX;

  // Creates the runs. Returns the run of each taken position.
  std::vector<uint32_t> count(const int64_t* slots, const std::vector<int64_t>& taken) {
    int bits = 4;
    while ((uint64_t{1} << bits) < 2 * taken.size()) ++bits;
    const uint64_t mask = (uint64_t{1} << bits) - 1;
    std::vector<uint32_t> heads(mask + 1, kNone);  // open addressing: numbers of runs
    std::vector<uint32_t> run_of(taken.size());
    for (size_t k = 0; k < taken.size(); ++k) {
      const int64_t slot = slots[taken[k]];
      uint64_t at = static_cast<uint64_t>(slot) * 0x9e3779b97f4a7c15ull >> (64 - bits);
      while (heads[at] != kNone && runs_[heads[at]].slot != slot) at = (at + 1) & mask;
      if (heads[at] == kNone) {
        heads[at] = static_cast<uint32_t>(runs_.size());
        runs_.push_back(Run{slot, 0, 0, 0});
      }
      run_of[k] = heads[at];
      ++runs_[heads[at]].count;
    }
    return run_of;
  }

  std::vector<Run> runs_;
  std::vector<int64_t> positions_;  // by run
};

}  // namespace torchrec_hkv::hash_table::cpu
