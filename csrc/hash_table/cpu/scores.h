// Scores of a table on the CPU, wherever it keeps them.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>

#include "hash_table/table_view.h"

namespace torchrec_hkv::hash_table::cpu {

inline uint64_t score_of(const TableView& table, int64_t slot) {
  if (table.counts.kept()) return table.counts.of(slot);
  return table.scores != nullptr ? table.scores[slot] : table.last_steps[slot];
}

// Under a policy that keeps scores.
inline void set_score(const TableView& table, int64_t slot, uint64_t score) {
  if (table.counts.kept()) return table.counts.set(slot, score);
  table.scores[slot] = score;
}

// The part of a slot's score that a hit changes; null under LRU.
inline const void* place_of_score(const TableView& table, int64_t slot) {
  if (table.counts.kept()) return &table.counts.low[slot];
  return table.scores != nullptr ? &table.scores[slot] : nullptr;
}

// CountArrays::add if other threads may add to the same count. Those that carry take turns, and
// only they read and write high bits.
inline void add_shared(const CountArrays& counts, int64_t slot, uint64_t given) {
  std::atomic_ref<uint16_t> low(counts.low[slot]);
  uint16_t old = low.load(std::memory_order_relaxed);
  while (!CountArrays::carries(old, given)) {
    const auto next = static_cast<uint16_t>(old + given);
    if (low.compare_exchange_weak(old, next, std::memory_order_relaxed)) return;
  }
  static std::mutex carrying;
  const std::lock_guard<std::mutex> lock(carrying);
  for (old = low.load(std::memory_order_relaxed);;) {
    const uint64_t sum = CountArrays::sum(counts.with_high(old, slot), given);
    const uint16_t next = CountArrays::low_of(sum);
    if (!low.compare_exchange_weak(old, next, std::memory_order_relaxed)) continue;
    return counts.set_high(slot, sum);
  }
}

// Counts a lookup of the entry in a table that other threads touch, too.
inline void touch_score(const TableView& table, int64_t slot, const Visit& visit, uint64_t given) {
  if (table.counts.kept()) return add_shared(table.counts, slot, given);
  std::atomic_ref<uint64_t> score(table.scores[slot]);
  uint64_t old = score.load(std::memory_order_relaxed);
  const auto next = [&] {
    return next_score(table.eviction, old, visit.now(), visit.epoch(), given);
  };
  for (uint64_t wanted = next(); wanted != old; wanted = next()) {
    if (score.compare_exchange_weak(old, wanted, std::memory_order_relaxed)) return;
  }
}

}  // namespace torchrec_hkv::hash_table::cpu
