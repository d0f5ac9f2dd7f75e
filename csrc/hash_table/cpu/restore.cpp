// Restores entries of a file to a table, on the CPU.
#include <algorithm>
#include <atomic>
#include <cstring>

#include "common/parallel.h"
#include "hash_table/cpu/bucket.h"
#include "hash_table/cpu/lowest_rank.h"
#include "hash_table/cpu/place.h"
#include "hash_table/cpu/restored_entry.h"
#include "hash_table/kernels.h"

namespace torchrec_hkv::hash_table::cpu {
namespace {

void append_displaced(const TableView& table, const Widths& widths, int64_t slot,
                      const DisplacedEntries& displaced) {
  const uint64_t at = displaced.counts[0]++;
  displaced.ids[at] = table.ids[slot];
  displaced.last_steps[at] = step_of(table, slot);
  if (displaced.scores != nullptr) displaced.scores[at] = score_of(table, slot);
  std::memcpy(displaced.rows + at * widths.row, table.row(slot), widths.row);
  if (widths.state == 0) return;
  std::memcpy(displaced.states + at * table.states.width, table.state(slot), widths.state);
}

}  // namespace

void slot_owners(const TableView& table, int64_t first, int64_t n, int32_t* owners, int threads) {
  parallel_for(n, 4096, threads, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t slot = first + i;
      owners[i] = digest_at(table, slot) == kEmptyDigest
                      ? -1
                      : static_cast<int32_t>(owner_bucket(table.ids[slot]));
    }
  });
}

void restore_slots(const TableView& table, const Entries& entries, const int64_t* slots,
                   bool* placed, int threads) {
  const Widths widths = widths_of(table);
  const SlotPrefetch prefetch(table);
  parallel_for(entries.n, 1024, threads, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < std::min(end, begin + kAhead); ++i) prefetch(slots[i]);
    for (int64_t i = begin; i < end; ++i) {
      if (i + kAhead < end) prefetch(slots[i + kAhead]);
      const int64_t slot = slots[i];
      const BucketChoice choice = buckets_of(table, entries.ids[i]);
      const int64_t bucket = slot < 0 ? -1 : bucket_of_slot(slot, table.bucket_slots);
      placed[i] = false;
      if (bucket != choice.first && bucket != choice.second) continue;
      // Two entries may have one slot: the first to claim it gets it.
      uint16_t expected = kEmptyDigest;
      placed[i] = std::atomic_ref<uint16_t>(digest_at(table, slot))
                      .compare_exchange_strong(expected, choice.digest, std::memory_order_relaxed);
      if (placed[i]) write_entry(table, widths, slot, entries, i);
    }
  });
}

void overwrite_slots(const TableView& table, const Entries& entries, const int64_t* slots,
                     int threads) {
  const Widths widths = widths_of(table);
  parallel_for(entries.n, 1024, threads, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t slot = slots[i];
      if (slot < 0 || slot >= table.num_slots || table.ids[slot] != entries.ids[i]) continue;
      if (digest_at(table, slot) != kEmptyDigest) write_entry(table, widths, slot, entries, i);
    }
  });
}

void restore_entries(const TableView& table, const Entries& entries,
                     const DisplacedEntries& displaced) {
  const Widths widths = widths_of(table);
  const TableRanks ranks(table, UINT32_MAX);
  const auto prefetch = [&](int64_t i) {
    const BucketChoice choice = buckets_of(table, entries.ids[i]);
    prefetch_line(table, choice.first);
    prefetch_line(table, choice.second);
  };
  for (int64_t i = 0; i < std::min(entries.n, kAhead); ++i) prefetch(i);
  for (int64_t i = 0; i < entries.n; ++i) {
    if (i + kAhead < entries.n) prefetch(i + kAhead);
    const BucketChoice choice = buckets_of(table, entries.ids[i]);
    int64_t slot = free_slot(table, choice);
    if (slot == kNoSlot) {
      const Victim victim = lowest_rank(table, ranks, choice);
      if (victim.slot == kNoSlot || !(victim.rank < entries.rank(table.ranking(), i))) {
        ++displaced.counts[1];
        continue;
      }
      slot = victim.slot;
      append_displaced(table, widths, slot, displaced);
    }
    write_entry(table, widths, slot, entries, i);
    digest_at(table, slot) = choice.digest;
  }
}

}  // namespace torchrec_hkv::hash_table::cpu
