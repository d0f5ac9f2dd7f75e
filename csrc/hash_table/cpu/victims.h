// Who leaves full buckets while a call places ids, on the CPU.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <vector>

#include "hash_table/cpu/bucket.h"
#include "hash_table/cpu/lowest_rank.h"
#include "hash_table/table_view.h"

namespace torchrec_hkv::hash_table::cpu {

// While the missing ids of a call are placed, slots only leave the list of those that may go: what
// is placed is pinned. So the slots of a bucket's lowest rank go one after the other, and are kept:
// two buckets are compared without their ranks, of which each has four lines or more, and these are
// read anew only when all slots of the lowest rank have gone. Where there are more buckets than
// missing ids nothing is kept, as few are come by twice.
//
// Of one bucket, one thread at a time may ask who leaves, or say that it has; any may prefetch.
class Victims {
 public:
  Victims(const TableView* tables, const Batch& batch, int64_t missing, uint32_t pinned_from)
      : tables_(tables), pinned_from_(pinned_from) {
    int32_t last = -1;
    for (int32_t f = 0; f < batch.num_features; ++f) {
      last = std::max(last, batch.feature_tables[f]);
    }
    int64_t buckets = 0;
    for (int32_t t = 0; t <= last; ++t) {
      starts_.push_back(buckets);
      buckets += tables[t].num_buckets;
    }
    if (buckets <= missing) kept_.resize(buckets);
  }

  // The slot of who leaves two full buckets, or kNoSlot.
  int64_t lowest(int32_t t, const BucketChoice& choice) {
    if (kept_.empty()) return lowest_rank(tables_[t], choice, pinned_from_).slot;
    return lower_rank(lowest_in(t, choice.first), lowest_in(t, choice.second)).slot;
  }

  // Who was to leave this slot does, and another id is placed there.
  void leaves(int32_t t, int64_t slot) {
    if (kept_.empty()) return;
    const auto slots = static_cast<uint64_t>(tables_[t].bucket_slots);
    const auto bucket = static_cast<uint32_t>(static_cast<uint64_t>(slot) / slots);
    const auto position = static_cast<int32_t>(static_cast<uint64_t>(slot) % slots);
    const Kept kept = load(t, bucket);
    const uint64_t others = kept.positions & ~(uint64_t{1} << position);
    store(t, bucket, Kept{others, kept.rank, others != 0});
  }

  // What lowest() will read.
  void prefetch(int32_t t, const BucketChoice& choice) const {
    const TableView& table = tables_[t];
    if (kept_.empty()) {
      prefetch_ranks(table, choice.first);
      prefetch_ranks(table, choice.second);
      return;
    }
    for (const uint32_t bucket : {choice.first, choice.second}) {
      const Kept kept = load(t, bucket);
      // Of several positions one goes, and the rank of the next is known.
      if ((kept.positions & (kept.positions - 1)) == 0) prefetch_ranks(table, bucket);
    }
  }

 private:
  struct Kept {
    uint64_t positions;
    Rank rank;
    bool known;
  };

  Victim lowest_in(int32_t t, uint32_t bucket) {
    Kept kept = load(t, bucket);
    if (!kept.known) {
      const Lowest lowest = lowest_rank_in(tables_[t], bucket, pinned_from_);
      kept = Kept{lowest.positions, lowest.rank, true};
      store(t, bucket, kept);
    }
    return Lowest{kept.positions, kept.rank}.first(first_slot_of(tables_[t], bucket));
  }

  // Atomic, since a prefetch reads what another thread may be writing.
  Kept load(int32_t t, uint32_t bucket) const {
    const Words& words = kept_[starts_[t] + bucket];
    const uint64_t positions = std::atomic_ref(words.positions).load(std::memory_order_relaxed);
    const uint64_t rank = std::atomic_ref(words.rank).load(std::memory_order_relaxed);
    const uint64_t step = std::atomic_ref(words.step).load(std::memory_order_relaxed);
    return Kept{positions, {rank, static_cast<uint32_t>(step)}, step >> 32 != 0};
  }

  void store(int32_t t, uint32_t bucket, const Kept& kept) {
    Words& words = kept_[starts_[t] + bucket];
    const uint64_t step = kept.rank.last_step | static_cast<uint64_t>(kept.known) << 32;
    std::atomic_ref(words.positions).store(kept.positions, std::memory_order_relaxed);
    std::atomic_ref(words.rank).store(kept.rank.score, std::memory_order_relaxed);
    std::atomic_ref(words.step).store(step, std::memory_order_relaxed);
  }

  struct Words {
    mutable uint64_t positions = 0;
    mutable uint64_t rank = 0;
    mutable uint64_t step = 0;  // and above it whether anything is known
  };

  const TableView* tables_;
  uint32_t pinned_from_;
  std::vector<int64_t> starts_;  // of each table's buckets
  std::vector<Words> kept_;      // of each bucket; empty: nothing is kept
};

}  // namespace torchrec_hkv::hash_table::cpu
