// Positions of a batch grouped by slot, for the backward on the CPU.
//
// The positions of a table form one partition, or several if they are many: a counting sort by a
// hash of their slots. One thread groups a partition, in a hash table that fits its cache. A group
// has the order of the batch, for any number of threads.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <numeric>
#include <vector>

#include "common/parallel.h"
#include "hash_table/cpu/gradients.h"
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
  int bits;                 // number of these bits; 0: all positions of the table
  const Occurrence* begin;  // in the order of the batch; null if they are all of the table
  const Occurrence* end;
  int64_t most;  // maximum number of positions
};

// Spreads neighbouring slots. The upper bits select the partition, the next ones the place in its
// hash table.
inline uint64_t slot_hash(int64_t slot) {
  return static_cast<uint64_t>(slot) * 0x9e3779b97f4a7c15ull;
}

class Partitions {
 public:
  Partitions(const TableView* tables, int32_t num_tables, const Batch& batch, const int64_t* slots,
             int threads)
      : batch_(batch), slots_(slots), firsts_(num_tables), bits_(num_tables) {
    choose_partitions(tables, threads);
    if (partitioned_ > 0) fill(threads);
    // Sorted by expected work. Results do not depend on the order.
    std::sort(partitions_.begin(), partitions_.end(), [&](const Partition& a, const Partition& b) {
      return work(tables[a.table], a.most) > work(tables[b.table], b.most);
    });
  }

  int64_t size() const { return static_cast<int64_t>(partitions_.size()); }
  const Partition& operator[](int64_t number) const { return partitions_[number]; }
  // The number of positions in tables with several partitions, and whether a table is one of these.
  int64_t partitioned() const { return partitioned_; }
  bool partitioned(int32_t table) const { return bits_[table] > 0; }

  // Calls visit(feature) for the features of a partition's table.
  template <typename Visit>
  void for_features(const Partition& partition, const Visit& visit) const {
    for (const int32_t feature : features_[partition.table]) visit(feature);
  }
  // Calls visit(slot, position) for the positions of a partition that have a slot, in the order of
  // the batch.
  template <typename Visit>
  void for_slots(const Partition& partition, const Visit& visit) const {
    if (partition.begin != nullptr) {
      for (const Occurrence* it = partition.begin; it != partition.end; ++it) {
        visit(it->slot, it->position);
      }
      return;
    }
    for_features(partition, [&](int32_t feature) {
      const int64_t last = batch_.feature_start(feature + 1);
      for (int64_t at = batch_.feature_start(feature); at < last; ++at) {
        if (slots_[at] != kNoSlot) visit(slots_[at], static_cast<uint32_t>(at));
      }
    });
  }

  // Calls visit(position, bag, place of its gradient) for the same positions.
  template <typename Visit>
  void for_gradients(const Partition& partition, const Gradients& gradients,
                     const Visit& visit) const {
    if (partition.begin != nullptr) {
      for (const Occurrence* it = partition.begin; it != partition.end; ++it) {
        visit(it->position, it->bag, gradients.offset(gradients.feature_of_bag(it->bag), it->bag));
      }
      return;
    }
    for_features(partition, [&](int32_t feature) {
      const int64_t stop = batch_.first_bag(feature + 1);
      for (int64_t bag = batch_.first_bag(feature); bag < stop; ++bag) {
        const int64_t offset = gradients.offset(feature, bag);
        for (int64_t at = batch_.offsets[bag]; at < batch_.offsets[bag + 1]; ++at) {
          if (slots_[at] != kNoSlot) visit(static_cast<uint32_t>(at), bag, offset);
        }
      }
    });
  }

 private:
  // Approximate number of positions of a partition: with its hash table and the addresses of
  // gradients it fits the L2 cache. Partitions are smaller, down to kMin, if whole tables would
  // not balance the threads.
  static constexpr int64_t kMax = 65536, kMin = 1024;
  static constexpr int kMaxBits = 12;

  // Relative cost of this number of positions.
  static int64_t work(const TableView& table, int64_t positions) {
    return positions * (table.dim() + 32);
  }

  // Sets the number of partitions of each table.
  void choose_partitions(const TableView* tables, int threads) {
    std::vector<int64_t> ids(bits_.size());
    features_.resize(bits_.size());
    int64_t total = 0;
    for (int32_t f = 0; f < batch_.num_features; ++f) {
      const int32_t table = batch_.feature_tables[f];
      const int64_t table_ids = batch_.feature_start(f + 1) - batch_.feature_start(f);
      ids[table] += table_ids;
      total += work(tables[table], table_ids);
      features_[table].push_back(f);
    }
    choose_bits(tables, ids, total, threads);
    for (size_t t = 0; t < bits_.size(); ++t) {
      firsts_[t] = size();
      if (ids[t] == 0) continue;
      partitions_.resize(size() + (int64_t{1} << bits_[t]),
                         Partition{static_cast<int32_t>(t), bits_[t], nullptr, nullptr, ids[t]});
      partitioned_ += bits_[t] > 0 ? ids[t] : 0;
    }
  }

  // Assigns whole tables as long as the work of the threads is balanced, and splits the others.
  void choose_bits(const TableView* tables, const std::vector<int64_t>& ids, int64_t total,
                   int threads) {
    std::vector<int32_t> by_work(bits_.size());
    std::iota(by_work.begin(), by_work.end(), 0);
    std::stable_sort(by_work.begin(), by_work.end(), [&](int32_t a, int32_t b) {
      return work(tables[a], ids[a]) > work(tables[b], ids[b]);
    });
    threads = std::max(threads, 1);
    std::vector<int64_t> loads(threads, 0);
    const int64_t fair = total / threads + total / (16 * threads), part = total / (2 * threads);
    for (const int32_t t : by_work) {
      const int64_t table_ids = work(tables[t], ids[t]);
      int64_t& load = *std::min_element(loads.begin(), loads.end());
      const bool whole = load + table_ids <= fair;
      if (whole) load += table_ids;
      const auto too_large = [&](int64_t positions) {
        return positions > kMax ||
               (!whole && positions > kMin && work(tables[t], positions) > part);
      };
      while (bits_[t] < kMaxBits && too_large(ids[t] >> bits_[t])) ++bits_[t];
    }
  }

  void fill(int threads) {
    blocks_ = std::max<int64_t>(1, std::min<int64_t>(threads, batch_.num_bags / 64));
    // offsets[block][partition]: number of entries, later the place of the next entry.
    std::vector<int64_t> offsets(blocks_ * size());
    parallel_for(blocks_, 1, threads, [&](int64_t begin, int64_t end) {
      for (int64_t block = begin; block < end; ++block) {
        count(block, offsets.data() + block * size());
      }
    });
    reserve(offsets.data());
    parallel_for(blocks_, 1, threads, [&](int64_t begin, int64_t end) {
      for (int64_t block = begin; block < end; ++block) {
        scatter_block(block, offsets.data() + block * size());
      }
    });
  }

  // Calls visit(first bag, one past the last, table) for the bags of each feature in a block whose
  // table has several partitions.
  template <typename Visit>
  void for_partitioned(int64_t block, const Visit& visit) const {
    int64_t bag = batch_.num_bags * block / blocks_;
    const int64_t end = batch_.num_bags * (block + 1) / blocks_;
    while (bag < end) {
      const int32_t feature = batch_.feature_of_bag(bag);
      const int64_t stop = std::min(end, batch_.first_bag(feature + 1));
      const int32_t table = batch_.feature_tables[feature];
      if (bits_[table] > 0) visit(bag, stop, table);
      bag = stop;
    }
  }

  static int64_t upper_bits(int64_t slot, int bits) {
    return static_cast<int64_t>(slot_hash(slot) >> (64 - bits));
  }

  void count(int64_t block, int64_t* counts) const {
    for_partitioned(block, [&](int64_t bag, int64_t stop, int32_t table) {
      int64_t* const first_position = counts + firsts_[table];
      const int bits = bits_[table];
      const int64_t last = batch_.offsets[stop];
      for (int64_t at = batch_.offsets[bag]; at < last; ++at) {
        if (slots_[at] != kNoSlot) ++first_position[upper_bits(slots_[at], bits)];
      }
    });
  }

  // Reserves each block's part of each partition: turns counts into places.
  void reserve(int64_t* offsets) {
    occurrences_ = std::make_unique_for_overwrite<Occurrence[]>(partitioned_);
    int64_t total = 0;
    for (int64_t p = 0; p < size(); ++p) {
      if (partitions_[p].bits == 0) continue;
      partitions_[p].begin = occurrences_.get() + total;
      for (int64_t block = 0; block < blocks_; ++block) {
        const int64_t here = offsets[block * size() + p];
        offsets[block * size() + p] = total;
        total += here;
      }
      partitions_[p].end = occurrences_.get() + total;
      partitions_[p].most = partitions_[p].end - partitions_[p].begin;
    }
  }

  void scatter_block(int64_t block, int64_t* offsets) {
    for_partitioned(block, [&](int64_t first_bag, int64_t stop, int32_t table) {
      int64_t* const first_position = offsets + firsts_[table];
      const int bits = bits_[table];
      for (int64_t bag = first_bag; bag < stop; ++bag) {
        for (int64_t at = batch_.offsets[bag]; at < batch_.offsets[bag + 1]; ++at) {
          if (slots_[at] == kNoSlot) continue;
          occurrences_[first_position[upper_bits(slots_[at], bits)]++] =
              Occurrence{slots_[at], static_cast<uint32_t>(at), static_cast<uint32_t>(bag)};
        }
      }
    });
  }

  const Batch& batch_;
  const int64_t* slots_;
  int64_t partitioned_ = 0;  // positions of tables with several partitions
  int64_t blocks_ = 0;       // parts of the batch, each of which one thread counts and distributes
  std::vector<int64_t> firsts_;                 // by table, its first partition
  std::vector<int> bits_;                       // by table
  std::vector<std::vector<int32_t>> features_;  // by table
  std::vector<Partition> partitions_;
  std::unique_ptr<Occurrence[]> occurrences_;
};

// Memory that is reused without being cleared.
template <typename T>
class ScratchBuffer {
 public:
  // Makes room for n elements; the previous contents are lost.
  T* resize(size_t n) {
    if (n > capacity_) {
      memory_ = std::make_unique_for_overwrite<T[]>(n);
      capacity_ = n;
    }
    return memory_.get();
  }
  T* get() const { return memory_.get(); }

 private:
  std::unique_ptr<T[]> memory_;
  size_t capacity_ = 0;
};

// Positions whose slots occur once in the batch, in the order of the batch, and their slots in the
// table.
struct UniqueRows {
  ScratchBuffer<uint32_t> positions;
  ScratchBuffer<int64_t> slots;
  int64_t n = 0;
};

// The groups of one partition. A thread reuses the object and its memory.
class SlotGroups {
 public:
  // A slot with several positions. The numbers of its gradients begin at `first`.
  struct Repeated {
    int64_t slot;
    uint32_t first;
    uint32_t count;
  };

  // Groups a partition. Unique rows, those with one position, are listed in `unique`.
  void assign(const Partitions& partitions, const Partition& partition, const Gradients& gradients,
              int64_t first_slot, UniqueRows& unique) {
    const int64_t n = group(partitions, partition);
    const int64_t repeats = separate(n, first_slot, unique);
    if (repeats > 0) scatter(partitions, partition, gradients, repeats);
  }

  const std::vector<Repeated>& repeated() const { return repeated_; }
  const int64_t* offsets() const { return offsets_.get(); }  // of gradients, by number
  const float* scales() const { return scales_.get(); }      // scales of gradients, if scaled

 private:
  struct SlotGroup {
    int64_t slot;
    uint32_t at;  // its first position; later the number of its next gradient
    uint32_t count;
  };

  static constexpr uint32_t kNone = UINT32_MAX;

  // Finds the group of each position. Returns the number of groups.
  uint32_t group(const Partitions& partitions, const Partition& partition) {
    const auto n = static_cast<uint64_t>(partition.most);
    int bits = 4;
    while ((uint64_t{1} << bits) < 2 * n) ++bits;
    const uint64_t mask = (uint64_t{1} << bits) - 1;
    const int shift = std::max(0, 64 - partition.bits - bits);
    uint32_t* const heads = heads_.resize(mask + 1);  // open addressing: a group's number, or kNone
    std::fill_n(heads, mask + 1, kNone);
    SlotGroup* const groups = groups_.resize(n);
    uint32_t* group_of = group_of_.resize(n);
    uint32_t number = 0;
    partitions.for_slots(partition, [&](int64_t slot, uint32_t position) {
      uint64_t at = slot_hash(slot) >> shift & mask;
      while (heads[at] != kNone && groups[heads[at]].slot != slot) at = (at + 1) & mask;
      uint32_t index = heads[at];
      if (index == kNone) {
        index = heads[at] = number++;
        groups[index] = SlotGroup{slot, position, 0};
      }
      *group_of++ = index;
      ++groups[index].count;
    });
    return number;
  }

  // Separates groups of several positions from groups of one. Returns the number of positions of
  // the former.
  int64_t separate(int64_t n, int64_t first_slot, UniqueRows& unique) {
    SlotGroup* const groups = groups_.get();
    uint32_t* const positions = unique.positions.resize(n + 1);
    int64_t* const slots = unique.slots.resize(n + 1);
    int64_t num_unique = 0;
    uint32_t total = 0;
    repeated_.clear();
    for (int64_t g = 0; g < n; ++g) {
      SlotGroup& group = groups[g];
      positions[num_unique] = group.at;
      slots[num_unique] = group.slot - first_slot;
      if (group.count == 1) {
        ++num_unique;
        continue;
      }
      repeated_.push_back(Repeated{group.slot, total, group.count});
      group.at = total;
      total += group.count;
    }
    unique.n = num_unique;
    // Gradients of unique rows go to a place after the others, which saves a branch.
    for (int64_t g = 0; g < n; ++g) {
      if (groups[g].count == 1) groups[g].at = total;
    }
    return total;
  }

  void scatter(const Partitions& partitions, const Partition& partition, const Gradients& gradients,
               int64_t repeats) {
    const bool scaled = gradients.scaled();
    SlotGroup* const groups = groups_.get();
    int64_t* const offsets = offsets_.resize(repeats + 1);
    float* const scales = scales_.resize(scaled ? repeats + 1 : 0);
    const uint32_t* group_of = group_of_.get();
    partitions.for_gradients(partition, gradients,
                             [&](uint32_t position, int64_t bag, int64_t offset) {
                               SlotGroup& group = groups[*group_of++];
                               offsets[group.at] = offset;
                               if (scaled) scales[group.at] = gradients.scale(position, bag);
                               group.at += group.count != 1;
                             });
  }

  std::vector<Repeated> repeated_;
  ScratchBuffer<SlotGroup> groups_;
  ScratchBuffer<uint32_t> heads_;
  ScratchBuffer<uint32_t> group_of_;  // by position that has a slot
  ScratchBuffer<int64_t> offsets_;
  ScratchBuffer<float> scales_;
};

}  // namespace torchrec_hkv::hash_table::cpu
