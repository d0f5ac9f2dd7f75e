// Positions of a batch grouped by slot, for the backward on the CPU.
//
// A counting sort puts positions into partitions of a few thousand by a hash of their slots; each
// partition is then grouped by one thread, in a hash table that fits its cache. Groups keep the
// order of the batch, whatever the number of threads.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

#include "common/parallel.h"
#include "hash_table/table_view.h"

namespace torchrec_hkv::hash_table::cpu {

struct Occurrence {
  int64_t slot;
  uint32_t position;
  uint32_t bag;
};

// Spreads neighbouring slots: the high bits tell the partition, the next ones the place in its hash
// table.
inline uint64_t slot_hash(int64_t slot) {
  return static_cast<uint64_t>(slot) * 0x9e3779b97f4a7c15ull;
}

class Partitions {
 public:
  Partitions(const Batch& batch, const int64_t* slots, int threads) {
    while (bits_ < kMaxBits && (batch.num_ids >> bits_) > kSize) ++bits_;
    const int64_t bags = batch.num_bags;
    const int64_t blocks = std::max<int64_t>(1, std::min<int64_t>(threads, bags / 64));
    const auto first_bag = [&](int64_t block) { return bags * block / blocks; };
    // counts[block][partition], then the place of the block's first entry there.
    std::vector<int64_t> counts(blocks * size(), 0);
    parallel_for(blocks, 1, threads, [&](int64_t begin, int64_t end) {
      for (int64_t block = begin; block < end; ++block) {
        int64_t* mine = counts.data() + block * size();
        const int64_t last = batch.offsets[first_bag(block + 1)];
        for (int64_t at = batch.offsets[first_bag(block)]; at < last; ++at) {
          if (slots[at] != kNoSlot) ++mine[partition_of(slots[at])];
        }
      }
    });
    starts_.resize(size() + 1);
    int64_t total = 0;
    for (int64_t p = 0; p < size(); ++p) {
      starts_[p] = total;
      for (int64_t block = 0; block < blocks; ++block) {
        const int64_t here = counts[block * size() + p];
        counts[block * size() + p] = total;
        total += here;
      }
    }
    starts_[size()] = total;
    entries_ = std::make_unique_for_overwrite<Occurrence[]>(total);
    parallel_for(blocks, 1, threads, [&](int64_t begin, int64_t end) {
      for (int64_t block = begin; block < end; ++block) {
        int64_t* mine = counts.data() + block * size();
        for (int64_t bag = first_bag(block); bag < first_bag(block + 1); ++bag) {
          for (int64_t at = batch.offsets[bag]; at < batch.offsets[bag + 1]; ++at) {
            if (slots[at] == kNoSlot) continue;
            entries_[mine[partition_of(slots[at])]++] =
                Occurrence{slots[at], static_cast<uint32_t>(at), static_cast<uint32_t>(bag)};
          }
        }
      }
    });
  }

  int64_t size() const { return int64_t{1} << bits_; }
  int bits() const { return bits_; }
  const Occurrence* begin(int64_t partition) const { return entries_.get() + starts_[partition]; }
  const Occurrence* end(int64_t partition) const { return entries_.get() + starts_[partition + 1]; }

 private:
  static constexpr int64_t kSize = 4096;  // about; with its hash table in the second-level cache
  static constexpr int kMaxBits = 12;

  int64_t partition_of(int64_t slot) const {
    return bits_ == 0 ? 0 : static_cast<int64_t>(slot_hash(slot) >> (64 - bits_));
  }

  int bits_ = 0;
  std::vector<int64_t> starts_;  // [partitions + 1]
  std::unique_ptr<Occurrence[]> entries_;
};

// The groups of one partition at a time; a thread reuses it, with its memory.
class SlotGroups {
 public:
  static constexpr uint32_t kEnd = UINT32_MAX;

  struct Group {
    int64_t slot;
    uint32_t first;  // its occurrences, by number in the partition: first, next(first), ... kEnd
    uint32_t last;
  };

  void assign(const Partitions& partitions, int64_t partition) {
    occurrences_ = partitions.begin(partition);
    const auto n = static_cast<uint32_t>(partitions.end(partition) - occurrences_);
    int bits = 4;
    while ((uint32_t{1} << bits) < 2 * n) ++bits;
    const uint32_t mask = (uint32_t{1} << bits) - 1;
    const int shift = std::max(0, 64 - partitions.bits() - bits);
    places_.assign(mask + 1, kEnd);
    next_.resize(n);
    groups_.clear();
    for (uint32_t i = 0; i < n; ++i) {
      const int64_t slot = occurrences_[i].slot;
      uint32_t at = static_cast<uint32_t>(slot_hash(slot) >> shift) & mask;
      while (places_[at] != kEnd && groups_[places_[at]].slot != slot) at = (at + 1) & mask;
      next_[i] = kEnd;
      if (places_[at] == kEnd) {
        places_[at] = static_cast<uint32_t>(groups_.size());
        groups_.push_back(Group{slot, i, i});
      } else {
        Group& group = groups_[places_[at]];
        next_[group.last] = i;
        group.last = i;
      }
    }
  }

  const std::vector<Group>& groups() const { return groups_; }
  const Occurrence& occurrence(uint32_t i) const { return occurrences_[i]; }
  uint32_t next(uint32_t i) const { return next_[i]; }

 private:
  const Occurrence* occurrences_ = nullptr;
  std::vector<Group> groups_;
  std::vector<uint32_t> places_;  // open addressing: a group's number, or kEnd
  std::vector<uint32_t> next_;
};

}  // namespace torchrec_hkv::hash_table::cpu
