#include "replay/windows.h"

#include <algorithm>
#include <limits>

namespace torchrec_hkv::replay {

bool HashSet::add(int64_t hash) {
  if (hash == 0) {
    const bool is_new = !has_zero_;
    has_zero_ = true;
    return is_new;
  }
  const size_t mask = slots_.size() - 1;
  size_t at = static_cast<size_t>(hash) & mask;
  for (; slots_[at] != 0; at = (at + 1) & mask) {
    if (slots_[at] == hash) return false;
  }
  slots_[at] = hash;
  if (++used_ * 2 > slots_.size()) grow();
  return true;
}

void HashSet::clear() {
  if (used_ != 0) std::fill(slots_.begin(), slots_.end(), 0);
  used_ = 0;
  has_zero_ = false;
}

void HashSet::grow() {
  std::vector<int64_t> old(2 * slots_.size(), 0);
  old.swap(slots_);
  const size_t mask = slots_.size() - 1;
  for (const int64_t hash : old) {
    if (hash == 0) continue;
    size_t at = static_cast<size_t>(hash) & mask;
    while (slots_[at] != 0) at = (at + 1) & mask;
    slots_[at] = hash;
  }
}

Window::Window(int64_t length, int64_t cells, bool within_parts)
    : length_(length == 0 ? std::numeric_limits<int64_t>::max() : length),
      within_parts_(within_parts),
      cells_(static_cast<size_t>(cells / 64), 0) {}

void Window::see(const SelectedIds& ids, std::vector<int64_t>* occupied) {
  const uint64_t mask = cells_.size() * 64 - 1;
  int64_t counted = 0, sampled = 0;
  for (int64_t begin = 0; begin < ids.length;) {
    const int64_t taken = std::min(ids.length - begin, length_ - seen_);
    const int64_t end = begin + taken;
    const int64_t stop = std::lower_bound(ids.at + counted, ids.at + ids.num_counted, end) - ids.at;
    for (; counted < stop; ++counted) {
      const uint64_t cell = static_cast<uint64_t>(ids.bits[counted]) & mask;
      cells_[cell / 64] |= uint64_t{1} << cell % 64;
    }
    for (; sampled < ids.num_sampled && ids.sampled[sampled] < stop; ++sampled) {
      const int64_t bits = ids.bits[ids.sampled[sampled]];
      of_groups_[group_of(bits)] += sampled_.add(bits);
    }
    seen_ += taken;
    begin = end;
    if (seen_ == length_) close(occupied);
  }
  if (within_parts_) close(occupied);
}

void Window::close(std::vector<int64_t>* occupied) {
  if (seen_ == 0) return;
  int64_t count = 0;
  for (uint64_t& cells : cells_) {
    count += __builtin_popcountll(cells);
    cells = 0;
  }
  occupied->push_back(count);
  sampled_.clear();
  seen_ = 0;
  ++number_;
}

}  // namespace torchrec_hkv::replay
