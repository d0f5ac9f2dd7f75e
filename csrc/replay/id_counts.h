// Counts of all ids of a log, in a hash map that grows. CPU only.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace torchrec_hkv::replay {

class IdCounts {
 public:
  // max_bytes: memory that the map may take, also while it grows.
  explicit IdCounts(int64_t max_bytes);

  // Counts the ids of a step. found[i]: whether an earlier step had ids[i].
  void count(const int64_t* ids, int64_t n, bool* found);

  int64_t size() const { return static_cast<int64_t>(used_); }
  // Whether ids were left out because the memory is too small.
  bool overflowed() const { return overflowed_; }
  // Writes size() ids and their counts, in any order.
  void entries(int64_t* ids, int64_t* counts) const;

 private:
  struct IdCount {
    int64_t id;
    uint64_t count;  // 0: free
  };
  // Added to the count of an id that is new in the present step.
  static constexpr uint64_t kNew = uint64_t{1} << 63;
  static constexpr size_t kMin = 1024;

  size_t place_of(int64_t id) const;
  bool grow();

  std::vector<IdCount> entries_;  // a power of two
  std::vector<size_t> new_;       // places of the ids that are new in the present step
  size_t used_ = 0;
  size_t max_entries_;
  bool overflowed_ = false;
};

}  // namespace torchrec_hkv::replay
