// Access to a table's scores and last steps on the CPU, for each of their layouts.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>

#include "hash_table/table_view.h"

namespace torchrec_hkv::hash_table::cpu {

inline uint32_t step_of(const TableView& table, int64_t slot) {
  return table.counted.enabled() ? table.counted.step(slot) : table.last_steps[slot];
}

inline uint64_t score_of(const TableView& table, int64_t slot) {
  if (table.counted.enabled()) return table.counted.count(slot);
  return table.scores != nullptr ? table.scores[slot] : table.last_steps[slot];
}

// Only under policies that keep scores.
inline void set_score(const TableView& table, int64_t slot, uint64_t score) {
  if (table.counted.enabled()) return table.counted.set_count(slot, score);
  table.scores[slot] = score;
}

// score: null if it stays as it is, as under LRU.
inline void set_step_and_score(const TableView& table, int64_t slot, uint32_t step,
                               const uint64_t* score) {
  if (table.counted.enabled()) {
    return table.counted.set(slot, step, score != nullptr ? *score : table.counted.count(slot));
  }
  table.last_steps[slot] = step;
  if (score != nullptr) table.scores[slot] = *score;
}

// Calls visit(address) for what a hit of a slot changes.
template <typename Visit>
inline void for_touched(const TableView& table, int64_t slot, const Visit& visit) {
  if (table.counted.enabled()) return visit(&table.counted.words[slot]);
  visit(&table.last_steps[slot]);
  if (table.scores != nullptr) visit(&table.scores[slot]);
}

// The last steps of slots [from, from + n), in `buffer` unless they are in an array of their own.
inline const uint32_t* steps_of(const TableView& table, int64_t from, int64_t n, uint32_t* buffer) {
  const CountedSteps& counted = table.counted;
  if (!counted.enabled()) return table.last_steps + from;
  const uint32_t* const words = counted.words + from;
  const uint32_t begin = counted.begin();
  uint32_t any = 0;
  for (int64_t i = 0; i < n; ++i) {
    any |= words[i];
    buffer[i] = begin + (words[i] & CountedSteps::kDistance);
  }
  if ((any & CountedSteps::kIsFar) != 0) [[unlikely]] {
    for (int64_t i = 0; i < n; ++i) buffer[i] = counted.step(from + i);
  }
  return buffer;
}

// CountedSteps::look_up if other threads may look up the same entry. Lookups that need other
// arrays take turns, and only they read and write these.
inline void add_lookup_shared(const CountedSteps& counted, int64_t slot, uint32_t now,
                              uint64_t given) {
  std::atomic_ref<uint32_t> word(counted.words[slot]);
  const uint32_t distance = now - counted.begin();
  uint32_t old = word.load(std::memory_order_relaxed);
  while (CountedSteps::fits_word(old, given)) {
    const uint32_t next = CountedSteps::word_after_lookup(old, distance, given);
    if (word.compare_exchange_weak(old, next, std::memory_order_relaxed)) return;
  }
  static std::mutex mutex;
  const std::lock_guard<std::mutex> lock(mutex);
  for (old = word.load(std::memory_order_relaxed);;) {
    const CountedSteps::EncodedEntry next = counted.entry_after_lookup(old, slot, now, given);
    if (!word.compare_exchange_weak(old, next.word, std::memory_order_relaxed)) continue;
    counted.set_rest(slot, next);
    return;
  }
}

// Counts a lookup of the entry in a table that other threads touch, too.
inline void touch_score(const TableView& table, int64_t slot, const CallContext& context,
                        uint64_t given) {
  std::atomic_ref<uint64_t> score(table.scores[slot]);
  uint64_t old = score.load(std::memory_order_relaxed);
  const auto next = [&] {
    return next_score(table.eviction, old, context.now(), context.epoch(), given);
  };
  if (!sums_scores(table.eviction)) {  // any thread's score
    if (const uint64_t wanted = next(); wanted != old) {
      score.store(wanted, std::memory_order_relaxed);
    }
    return;
  }
  for (uint64_t wanted = next(); wanted != old; wanted = next()) {
    if (score.compare_exchange_weak(old, wanted, std::memory_order_relaxed)) return;
  }
}

}  // namespace torchrec_hkv::hash_table::cpu
