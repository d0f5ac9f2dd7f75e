// The missing ids of a call, in an order that several threads can keep.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

#include "common/parallel.h"
#include "hash_table/cpu/bucket.h"
#include "hash_table/table_view.h"

namespace torchrec_hkv::hash_table::cpu {

constexpr uint32_t kNone = UINT32_MAX;

struct MissingId {
  uint32_t position;  // in the batch
  int32_t table;
  BucketChoice choice;
  uint32_t after_first;   // last missing id of earlier groups that may change its first bucket,
  uint32_t after_second;  // and its second bucket; kNone: there is none
  bool placed;            // whether this entry got the slot; an id may occur several times
  bool done;              // whether it has been processed; atomic while ids are placed
};

// Missing ids in the order of the batch, in groups. One thread processes a group.
class MissingIds {
 public:
  static constexpr uint32_t kGroup = 32;

  MissingIds(const TableView* tables, const Batch& batch, const int64_t* slots, int threads) {
    constexpr int64_t kPart = 4096;
    const int64_t parts = (batch.num_ids + kPart - 1) / kPart;
    const auto stop_of = [&](int64_t part) { return std::min(batch.num_ids, (part + 1) * kPart); };
    std::vector<int64_t> starts(parts + 1, 0);
    parallel_for(parts, 4, threads, [&](int64_t begin, int64_t end) {
      for (int64_t part = begin; part < end; ++part) {
        starts[part + 1] = std::count(slots + part * kPart, slots + stop_of(part), kNoSlot);
      }
    });
    for (int64_t part = 0; part < parts; ++part) starts[part + 1] += starts[part];
    size_ = starts[parts];
    ids_ = std::make_unique_for_overwrite<MissingId[]>(size_);
    parallel_for(parts, 4, threads, [&](int64_t begin, int64_t end) {
      for (int64_t part = begin; part < end; ++part) {
        if (starts[part] == starts[part + 1]) continue;
        collect(tables, batch, slots, part * kPart, stop_of(part), ids_.get() + starts[part]);
      }
    });
    order();
  }

  int64_t size() const { return size_; }
  int64_t groups() const { return (size_ + kGroup - 1) / kGroup; }
  MissingId* begin() const { return ids_.get(); }
  MissingId* begin(int64_t group) const { return ids_.get() + group * kGroup; }
  MissingId* end(int64_t group) const { return ids_.get() + std::min(size_, (group + 1) * kGroup); }

 private:
  static void collect(const TableView* tables, const Batch& batch, const int64_t* slots,
                      int64_t begin, int64_t end, MissingId* to) {
    for (int32_t feature = batch.feature_of(begin); begin < end; ++feature) {
      const int32_t table = batch.feature_tables[feature];
      const int64_t stop = std::min(end, batch.feature_start(feature + 1));
      while (begin < stop) {
        // Lists their positions first, without a branch, because misses are unpredictable.
        constexpr int64_t kPositions = 256;
        uint32_t positions[kPositions];
        const int64_t until = std::min(stop, begin + kPositions);
        int64_t n = 0;
        for (; begin < until; ++begin) {
          positions[n] = static_cast<uint32_t>(begin);
          n += slots[begin] == kNoSlot;
        }
        for (int64_t i = 0; i < n; ++i) {
          const int64_t id = batch.ids[positions[i]];
          const BucketChoice choice = buckets_of(tables[table], id);
          *to++ = MissingId{positions[i], table, choice, kNone, kNone, false, false};
        }
      }
    }
  }

  // Buckets share the entries of an array that fits the L2 cache. So an id may wait for one of
  // another bucket, but never for a later one.
  void order() {
    const uint32_t entries = size_ < (1 << 12) ? 1 << 12 : 1 << 17;
    std::vector<uint32_t> last(entries, kNone);
    const auto visit = [&](int32_t table, uint32_t bucket, uint32_t index) {
      uint32_t& entry = last[(bucket + static_cast<uint32_t>(table) * 0x9e3779b9u) & (entries - 1)];
      const uint32_t before = entry;
      entry = index;
      return before == kNone || before / kGroup == index / kGroup ? kNone : before;
    };
    for (int64_t i = 0; i < size_; ++i) {
      MissingId& it = ids_[i];
      const auto index = static_cast<uint32_t>(i);
      it.after_first = visit(it.table, it.choice.first, index);
      it.after_second = visit(it.table, it.choice.second, index);
    }
  }

  std::unique_ptr<MissingId[]> ids_;
  int64_t size_ = 0;
};

}  // namespace torchrec_hkv::hash_table::cpu
