// Who leaves full buckets while a call places ids, on the CPU.
#pragma once

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstdint>
#include <vector>

#include "common/select.h"
#include "hash_table/bucket_cpu.h"
#include "hash_table/lowest_rank_cpu.h"
#include "hash_table/table_view.h"

namespace torchrec_hkv::hash_table::cpu {

// While the missing ids of a call are placed, slots only leave the list of those that may go: what
// is placed is pinned. So who is next in a bucket stays that until it goes, and is kept: two
// buckets are compared without their ranks, of which each has four lines or more. Where there are
// more buckets than missing ids nothing is kept, as few are come by twice.
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

  // Who was to leave this slot does. To be called before another id is written there: a processor
  // does not find what it has just written in a wider read.
  void leaves(int32_t t, int64_t slot) {
    if (kept_.empty()) return;
    const auto slots = static_cast<uint64_t>(tables_[t].bucket_slots);
    const auto at = static_cast<uint64_t>(slot);
    look(t, static_cast<uint32_t>(at / slots), static_cast<int32_t>(at % slots));
  }

  // What lowest() and leaves() will read.
  void prefetch(int32_t t, const BucketChoice& choice) const {
    const TableView& table = tables_[t];
    Next first, second;
    if (!kept_.empty()) {
      first = kept(t, choice.first);
      second = kept(t, choice.second);
    }
    if (first.known & second.known) {
      const bool other =
          victim(table, choice.second, second).rank < victim(table, choice.first, first).rank;
      prefetch_ranks(table, static_cast<uint32_t>(select(other, choice.second, choice.first)));
      return;
    }
    if (!first.known) prefetch_ranks(table, choice.first);
    if (!second.known) prefetch_ranks(table, choice.second);
  }

 private:
  struct alignas(8) Next {
    uint32_t last_step = 0;
    uint8_t position = 0;
    bool known = false;
    bool none = false;  // all are pinned
    uint8_t unused = 0;
  };

  static Victim victim(const TableView& table, uint32_t bucket, const Next& next) {
    if (next.none) return kNoVictim;
    const int64_t slot = first_slot_of(table, bucket) + next.position;
    const uint64_t score = table.scores != nullptr ? table.scores[slot] : next.last_step;
    return Victim{slot, {score, next.last_step}};
  }

  Victim lowest_in(int32_t t, uint32_t bucket) {
    const Next next = kept(t, bucket);
    return next.known ? victim(tables_[t], bucket, next) : look(t, bucket);
  }

  Victim look(int32_t t, uint32_t bucket, int32_t but = -1) {
    const TableView& table = tables_[t];
    const Victim next = lowest_rank_in(table, bucket, pinned_from_, but);
    const bool none = next.slot == kNoSlot;
    const auto position = none ? 0 : static_cast<uint8_t>(next.slot - first_slot_of(table, bucket));
    keep(t, bucket, Next{next.rank.last_step, static_cast<uint8_t>(position), true, none});
    return next;
  }

  // Atomic, since a prefetch reads what another thread may be writing.
  Next kept(int32_t t, uint32_t bucket) const {
    const std::atomic_ref<uint64_t> at(kept_[starts_[t] + bucket]);
    return std::bit_cast<Next>(at.load(std::memory_order_relaxed));
  }

  void keep(int32_t t, uint32_t bucket, const Next& next) {
    const std::atomic_ref<uint64_t> at(kept_[starts_[t] + bucket]);
    at.store(std::bit_cast<uint64_t>(next), std::memory_order_relaxed);
  }

  const TableView* tables_;
  uint32_t pinned_from_;
  std::vector<int64_t> starts_;         // of each table's buckets
  mutable std::vector<uint64_t> kept_;  // Next of each bucket; empty: not kept
};

}  // namespace torchrec_hkv::hash_table::cpu
