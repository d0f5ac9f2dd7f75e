// CPU kernels that load saved tables. They run beside threads that read files.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "hash_table/table_view.h"

namespace torchrec_hkv::hash_table::cpu {

// One of several batches of entries, each with its slot.
struct RestoreBatch {
  Entries entries;
  const int64_t* slots;  // [entries.n]
};

// As restore_slots for all batches, whose slots ascend in each. Fills one region of the table
// after the other, so that the region stays in a cache for the entries of all batches. Returns how
// many entries were not placed. Runs on threads that do not spin, because others read files
// meanwhile.
int64_t restore_batches(const TableView& table, const std::vector<RestoreBatch>& batches,
                        int threads);

// Returns a slot whose id is in another slot, too, or kNoSlot. Runs on threads as above.
int64_t find_repeated(const TableView& table, int threads);

// Whether find_misplaced finds none, and slots ascend. Runs on the caller's thread alone.
bool are_placed(const int64_t* ids, const int64_t* slots, int64_t n, uint32_t num_buckets,
                int32_t bucket_slots, int64_t owner_begin, int64_t owner_end);

// A set of ids. Linear probing; 0 marks a free place, and id 0 has a place behind the others.
struct IdSet {
  int64_t* ids;      // [capacity + 1]
  int64_t capacity;  // a power of two
  int64_t size;

  int64_t max_size() const { return capacity - capacity / 4; }
};

// Adds the ids whose hash begins with the `bits` bits of `part`, until the set holds more than
// max_size(). If an id is in the set already, stops and returns it. Runs on the caller's thread
// alone.
std::optional<int64_t> add_ids(IdSet& set, const int64_t* ids, int64_t n, int bits, uint64_t part);

}  // namespace torchrec_hkv::hash_table::cpu
