#include "replay/id_counts.h"

#include <algorithm>

#include "common/hashing.h"

namespace torchrec_hkv::replay {
namespace {

constexpr int64_t kAhead = 16;  // ids whose entries are prefetched

}  // namespace

IdCounts::IdCounts(int64_t max_bytes)
    : entries_(kMin, IdCount{0, 0}),
      max_entries_(static_cast<size_t>(max_bytes) / sizeof(IdCount)) {}

// Returns the index of the entry that holds the id. If none does, returns that of the free entry
// where the id would be inserted.
size_t IdCounts::place_of(int64_t id) const {
  const size_t mask = entries_.size() - 1;
  size_t at = hash_of_id(id) & mask;
  while (entries_[at].count != 0 && entries_[at].id != id) at = (at + 1) & mask;
  return at;
}

void IdCounts::count(const int64_t* ids, int64_t n, bool* found) {
  for (int64_t i = 0; i < n; ++i) {
    if (i + kAhead < n) {
      __builtin_prefetch(&entries_[hash_of_id(ids[i + kAhead]) & (entries_.size() - 1)], 1);
    }
    size_t at = place_of(ids[i]);
    if (entries_[at].count == 0) {
      found[i] = false;
      // At most three quarters of the entries are used.
      if (4 * (used_ + 1) > 3 * entries_.size()) {
        if (!grow()) {
          overflowed_ = true;
          continue;
        }
        at = place_of(ids[i]);
      }
      entries_[at] = {ids[i], kNew + 1};
      new_.push_back(at);
      ++used_;
    } else {
      found[i] = entries_[at].count < kNew;
      ++entries_[at].count;
    }
  }
  for (const size_t at : new_) entries_[at].count &= ~kNew;
  new_.clear();
}

bool IdCounts::grow() {
  if (3 * entries_.size() > max_entries_) return false;  // the old entries and the new ones
  std::vector<IdCount> old(2 * entries_.size(), IdCount{0, 0});
  old.swap(entries_);
  new_.clear();
  for (const IdCount& entry : old) {
    if (entry.count == 0) continue;
    const size_t at = place_of(entry.id);
    entries_[at] = entry;
    if (entry.count >= kNew) new_.push_back(at);
  }
  return true;
}

void IdCounts::entries(int64_t* ids, int64_t* counts) const {
  for (const IdCount& entry : entries_) {
    if (entry.count == 0) continue;
    *ids++ = entry.id;
    *counts++ = static_cast<int64_t>(entry.count);
  }
}

}  // namespace torchrec_hkv::replay
