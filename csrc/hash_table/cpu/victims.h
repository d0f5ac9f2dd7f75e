// Selects the victims in full buckets while a call places ids, on the CPU.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <vector>

#include "hash_table/cpu/bucket.h"
#include "hash_table/cpu/lowest_rank.h"
#include "hash_table/table_view.h"

namespace torchrec_hkv::hash_table::cpu {

// While the missing ids of a call are placed, the set of possible victims only shrinks, because
// placed ids are pinned. So the slots of a bucket's lowest rank are evicted one after the other,
// and the list of these is cached: two buckets are compared without reading their ranks, which take
// four lines or more each, until all slots of the list are evicted. Nothing is cached if there are
// more buckets than missing ids, because few buckets are used twice then.
//
// One thread at a time may query or update a bucket; any thread may prefetch.
class Victims {
 public:
  Victims(const TableView* tables, const Batch& batch, int64_t missing, uint32_t pinned_from)
      : tables_(tables) {
    int32_t last = -1;
    for (int32_t f = 0; f < batch.num_features; ++f) {
      last = std::max(last, batch.feature_tables[f]);
    }
    int64_t buckets = 0;
    for (int32_t t = 0; t <= last; ++t) {
      starts_.push_back(buckets);
      ranks_.emplace_back(tables[t], pinned_from);
      buckets += tables[t].num_buckets;
    }
    if (buckets <= missing) cache_.resize(buckets);
  }

  // The victim in two full buckets, or no slot.
  Victim lowest(int32_t t, const BucketChoice& choice) {
    if (cache_.empty()) return lowest_rank(tables_[t], ranks_[t], choice);
    return lower_rank(lowest_in(t, choice.first), lowest_in(t, choice.second));
  }

  // Removes the victim from the list: another id is placed in its slot.
  void remove(int32_t t, int64_t slot) {
    if (cache_.empty()) return;
    const auto slots = static_cast<uint64_t>(tables_[t].bucket_slots);
    const auto bucket = static_cast<uint32_t>(static_cast<uint64_t>(slot) / slots);
    const auto position = static_cast<int32_t>(static_cast<uint64_t>(slot) % slots);
    const BucketVictims cached = load(t, bucket);
    const uint64_t others = cached.positions & ~(uint64_t{1} << position);
    store(t, bucket, BucketVictims{others, cached.rank, others != 0});
  }

  // Prefetches what lowest() will read.
  void prefetch(int32_t t, const BucketChoice& choice) const {
    const TableView& table = tables_[t];
    if (cache_.empty()) {
      prefetch_ranks(table, ranks_[t], choice.first);
      prefetch_ranks(table, ranks_[t], choice.second);
      return;
    }
    for (const uint32_t bucket : {choice.first, choice.second}) {
      const BucketVictims cached = load(t, bucket);
      // With several positions, the list stays valid after one is used.
      if ((cached.positions & (cached.positions - 1)) == 0)
        prefetch_ranks(table, ranks_[t], bucket);
    }
  }

 private:
  struct BucketVictims {
    uint64_t positions;
    Rank rank;
    bool known;
  };

  Victim lowest_in(int32_t t, uint32_t bucket) {
    BucketVictims cached = load(t, bucket);
    if (!cached.known) {
      const LowestRank lowest = lowest_rank_in(tables_[t], ranks_[t], bucket);
      cached = BucketVictims{lowest.positions, lowest.rank, true};
      store(t, bucket, cached);
    }
    return LowestRank{cached.positions, cached.rank}.first(first_slot_of(tables_[t], bucket));
  }

  // Atomic, because a prefetch may read it while another thread writes it.
  BucketVictims load(int32_t t, uint32_t bucket) const {
    const PackedVictims& packed = cache_[starts_[t] + bucket];
    const uint64_t positions = std::atomic_ref(packed.positions).load(std::memory_order_relaxed);
    const uint64_t rank = std::atomic_ref(packed.rank).load(std::memory_order_relaxed);
    const uint64_t step = std::atomic_ref(packed.step).load(std::memory_order_relaxed);
    return BucketVictims{positions, {rank, static_cast<uint32_t>(step)}, step >> 32 != 0};
  }

  void store(int32_t t, uint32_t bucket, const BucketVictims& cached) {
    PackedVictims& packed = cache_[starts_[t] + bucket];
    const uint64_t step = cached.rank.last_step | static_cast<uint64_t>(cached.known) << 32;
    std::atomic_ref(packed.positions).store(cached.positions, std::memory_order_relaxed);
    std::atomic_ref(packed.rank).store(cached.rank.score, std::memory_order_relaxed);
    std::atomic_ref(packed.step).store(step, std::memory_order_relaxed);
  }

  struct PackedVictims {
    mutable uint64_t positions = 0;
    mutable uint64_t rank = 0;
    mutable uint64_t step = 0;  // and above it whether the entry is valid
  };

  const TableView* tables_;
  std::vector<int64_t> starts_;       // of each table's buckets
  std::vector<TableRanks> ranks_;     // of each table
  std::vector<PackedVictims> cache_;  // of each bucket; empty: nothing is cached
};

}  // namespace torchrec_hkv::hash_table::cpu
