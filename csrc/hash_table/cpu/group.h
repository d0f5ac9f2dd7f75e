// Positions of a batch grouped by slot, for the backward on the CPU.
//
// A counting sort puts the positions of each table into partitions of some thousand by a hash of
// their slots; each partition is then grouped by one thread, in a hash table that fits its cache.
// Occurrences keep the order of the batch, whatever the number of threads.
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

// Positions of one table whose slots' hashes have the same upper bits.
struct Partition {
  int32_t table;
  int bits;  // how many of them
  const Occurrence* begin;
  const Occurrence* end;
};

// Spreads neighbouring slots: the upper bits tell the partition, the next ones the place in its
// hash table.
inline uint64_t slot_hash(int64_t slot) {
  return static_cast<uint64_t>(slot) * 0x9e3779b97f4a7c15ull;
}

class Partitions {
 public:
  Partitions(const TableView* tables, int32_t num_tables, const Batch& batch, const int64_t* slots,
             int threads)
      : batch_(batch), slots_(slots), firsts_(num_tables), bits_(num_tables) {
    cut(tables);
    blocks_ = std::max<int64_t>(1, std::min<int64_t>(threads, batch.num_bags / 64));
    // places[block][partition]: its entries, then the place of the next one.
    std::vector<int64_t> places(blocks_ * size());
    parallel_for(blocks_, 1, threads, [&](int64_t begin, int64_t end) {
      for (int64_t block = begin; block < end; ++block) {
        count(block, places.data() + block * size());
      }
    });
    reserve(places.data());
    parallel_for(blocks_, 1, threads, [&](int64_t begin, int64_t end) {
      for (int64_t block = begin; block < end; ++block) {
        deal(block, places.data() + block * size());
      }
    });
  }

  int64_t size() const { return static_cast<int64_t>(partitions_.size()); }
  const Partition& operator[](int64_t number) const { return partitions_[number]; }

 private:
  // Positions of a partition, about, in tables of 64 columns; fewer where they are wider. With its
  // hash table and the sums of gradients in the second-level cache.
  static constexpr int64_t kSize = 8192, kLeast = 1024;
  static constexpr int kMaxBits = 12;

  // How many partitions each table has.
  void cut(const TableView* tables) {
    std::vector<int64_t> ids(bits_.size());
    for (int32_t f = 0; f < batch_.num_features; ++f) {
      ids[batch_.feature_tables[f]] += batch_.feature_start(f + 1) - batch_.feature_start(f);
    }
    for (size_t t = 0; t < bits_.size(); ++t) {
      const int64_t most = std::clamp<int64_t>(kSize * 64 / tables[t].dim(), kLeast, kSize);
      while (bits_[t] < kMaxBits && (ids[t] >> bits_[t]) > most) ++bits_[t];
      firsts_[t] = size();
      partitions_.resize(size() + (int64_t{1} << bits_[t]),
                         Partition{static_cast<int32_t>(t), bits_[t], nullptr, nullptr});
    }
  }

  // Calls visit(first bag, one past the last, table) for the bags of each feature in a block.
  template <typename Visit>
  void for_features(int64_t block, const Visit& visit) const {
    int64_t bag = batch_.num_bags * block / blocks_;
    const int64_t end = batch_.num_bags * (block + 1) / blocks_;
    while (bag < end) {
      const int32_t feature = batch_.feature_of_bag(bag);
      const int64_t stop = std::min(end, batch_.first_bag(feature + 1));
      visit(bag, stop, batch_.feature_tables[feature]);
      bag = stop;
    }
  }

  static int64_t upper_bits(int64_t slot, int bits) {
    return static_cast<int64_t>(slot_hash(slot) >> 1 >> (63 - bits));
  }

  void count(int64_t block, int64_t* counts) const {
    for_features(block, [&](int64_t bag, int64_t stop, int32_t table) {
      int64_t* const own = counts + firsts_[table];
      const int bits = bits_[table];
      const int64_t last = batch_.offsets[stop];
      for (int64_t at = batch_.offsets[bag]; at < last; ++at) {
        if (slots_[at] != kNoSlot) ++own[upper_bits(slots_[at], bits)];
      }
    });
  }

  // Gives each block its part of each partition: counts become places.
  void reserve(int64_t* places) {
    std::vector<int64_t> starts(size() + 1);
    int64_t total = 0;
    for (int64_t p = 0; p < size(); ++p) {
      starts[p] = total;
      for (int64_t block = 0; block < blocks_; ++block) {
        const int64_t here = places[block * size() + p];
        places[block * size() + p] = total;
        total += here;
      }
    }
    starts[size()] = total;
    occurrences_ = std::make_unique_for_overwrite<Occurrence[]>(total);
    for (int64_t p = 0; p < size(); ++p) {
      partitions_[p].begin = occurrences_.get() + starts[p];
      partitions_[p].end = occurrences_.get() + starts[p + 1];
    }
  }

  void deal(int64_t block, int64_t* places) {
    for_features(block, [&](int64_t first_bag, int64_t stop, int32_t table) {
      int64_t* const own = places + firsts_[table];
      const int bits = bits_[table];
      for (int64_t bag = first_bag; bag < stop; ++bag) {
        for (int64_t at = batch_.offsets[bag]; at < batch_.offsets[bag + 1]; ++at) {
          if (slots_[at] == kNoSlot) continue;
          occurrences_[own[upper_bits(slots_[at], bits)]++] =
              Occurrence{slots_[at], static_cast<uint32_t>(at), static_cast<uint32_t>(bag)};
        }
      }
    });
  }

  const Batch& batch_;
  const int64_t* slots_;
  int64_t blocks_;               // parts of the batch that are counted and dealt by one thread each
  std::vector<int64_t> firsts_;  // by table, its first partition
  std::vector<int> bits_;        // by table
  std::vector<Partition> partitions_;
  std::unique_ptr<Occurrence[]> occurrences_;
};

// The groups of one partition at a time; a thread reuses it, with its memory.
class SlotGroups {
 public:
  struct Group {
    int64_t slot;
    uint32_t left;    // occurrences; the caller counts them down
    uint32_t number;  // for the caller; kNone at first
  };

  static constexpr uint32_t kNone = UINT32_MAX;

  void assign(const Partition& partition) {
    const auto n = static_cast<uint32_t>(partition.end - partition.begin);
    int bits = 4;
    while ((uint32_t{1} << bits) < 2 * n) ++bits;
    const uint32_t mask = (uint32_t{1} << bits) - 1;
    const int shift = std::max(0, 64 - partition.bits - bits);
    places_.assign(mask + 1, kNone);
    group_of_.resize(n);
    groups_.clear();
    for (uint32_t i = 0; i < n; ++i) {
      const int64_t slot = partition.begin[i].slot;
      uint32_t at = static_cast<uint32_t>(slot_hash(slot) >> shift) & mask;
      while (places_[at] != kNone && groups_[places_[at]].slot != slot) at = (at + 1) & mask;
      if (places_[at] == kNone) {
        places_[at] = static_cast<uint32_t>(groups_.size());
        groups_.push_back(Group{slot, 0, kNone});
      }
      group_of_[i] = places_[at];
      ++groups_[places_[at]].left;
    }
  }

  // That of an occurrence, by its number in the partition.
  Group& of(int64_t occurrence) { return groups_[group_of_[occurrence]]; }

 private:
  std::vector<Group> groups_;
  std::vector<uint32_t> places_;  // open addressing: a group's number, or kNone
  std::vector<uint32_t> group_of_;
};

}  // namespace torchrec_hkv::hash_table::cpu
