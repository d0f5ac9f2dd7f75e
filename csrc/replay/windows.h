// Distinct ids in windows of a log (torchrec_hkv/replay/windows.py). CPU only.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "replay/sample.h"

namespace torchrec_hkv::replay {

// A set of hashes of ids.
class HashSet {
 public:
  HashSet() : slots_(kMin, 0) {}

  // Whether the hash was added.
  bool add(int64_t hash);
  void clear();

 private:
  static constexpr size_t kMin = 64;

  void grow();

  std::vector<int64_t> slots_;  // a power of two; 0: free
  size_t used_ = 0;
  bool has_zero_ = false;
};

// Ids of a part of a log that take() took.
struct SelectedIds {
  const int64_t* bits;     // [counted]
  const int64_t* at;       // [counted]
  const int64_t* sampled;  // [sampled]
  int64_t num_counted;
  int64_t num_sampled;
  int64_t length;  // ids of the part
};

// Successive windows with the same number of lookups. Linear counting tells the number of distinct
// ids of the larger sample in each: the cells that their hashes occupy. Distinct ids of the smaller
// sample are counted by group.
class Window {
 public:
  // length: lookups in a window; 0: one window covers the log. cells: a power of two, at least 64.
  // within_parts: a window ends with the part of the log.
  Window(int64_t length, int64_t cells, bool within_parts);

  // Counts the next part of the log. Appends the occupied cells of each window that ends to
  // `occupied`.
  void see(const SelectedIds& ids, std::vector<int64_t>* occupied);
  // Ends the window, if one has begun.
  void close(std::vector<int64_t>* occupied);

  int64_t number() const { return number_; }
  const std::array<int64_t, kGroups>& of_groups() const { return of_groups_; }

 private:
  int64_t length_;
  bool within_parts_;
  std::vector<uint64_t> cells_;  // a bit each
  HashSet sampled_;
  std::array<int64_t, kGroups> of_groups_{};
  int64_t seen_ = 0;  // lookups of the window so far
  int64_t number_ = 0;
};

}  // namespace torchrec_hkv::replay
