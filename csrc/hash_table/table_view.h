// A hash table as kernels see it: raw pointers, which it does not own.
//
// Layout. A table is an array of buckets. A bucket has up to 64 slots; its 64 digests of 16 bits
// fill one 128-byte line, so that one line tells which slots may hold an id. A slot's id, step,
// score, row and optimizer state are in separate arrays, at the slot's number bucket * bucket_slots
// + position; on a GPU ids and steps may be packed (packed_entries.h). Every id has two candidate
// buckets. Unless the table grows, an entry's slot number stays valid until its id is evicted. The
// digest marks a free slot, because every 64-bit id is legal.
//
// Slots are also numbered across the tables of a group: slot + first_slot is unique in it.
#pragma once

#include <cstdint>

#include "common/dtypes.h"
#include "common/global_pointer.h"
#include "common/hashing.h"
#include "common/initial_rows.h"
#include "common/macros.h"
#include "common/scores.h"
#include "hash_table/aged_lfu.h"
#include "hash_table/batch.h"
#include "hash_table/clock.h"
#include "hash_table/counted_steps.h"
#include "hash_table/entries.h"
#include "hash_table/evicted_memory.h"
#include "hash_table/frames.h"
#include "hash_table/group_shape.h"
#include "hash_table/miniatures.h"
#include "hash_table/packed_entries.h"
#include "hash_table/placement.h"
#include "hash_table/row_matrix.h"

namespace torchrec_hkv::hash_table {

constexpr int64_t kNoSlot = -1;

// Device counters of a table, counted since it was created.
enum Counter : int32_t {
  kLookups = 0,      // ids of training lookups
  kMisses = 1,       // of these, missing
  kInserted = 2,     // ids placed
  kEvicted = 3,      // of these, those that replaced another id
  kRefused = 4,      // ids of training lookups without a slot
  kUnadmitted = 5,   // ids of training lookups that were not admitted (admission.h)
  kExpired = 6,      // entries that expired (expiry.h)
  kFetched = 7,      // rows that came from host memory into a frame (frames.h)
  kWrittenBack = 8,  // rows that were written to host memory because others took their frames
  // Of kRefused, those whose buckets are full of pinned entries. Repeated ids of a call may count
  // once or several times.
  kCrowded = 9,
  // In tables with frames: ids of training lookups whose row was read in host memory.
  kHostHits = 10,
  kReturned = 11,  // of kInserted, ids that the table remembers as evicted (evicted_memory.h)
  kNumCounters = 12,
};

// Rows or states: a vector for each slot and, if the table has frames, for each frame.
struct RowStore {
  GlobalPointer<char> backing;  // [num_slots][width]; in host memory if there are frames
  GlobalPointer<char> frames;   // [num frames][width]; null: no vector has a frame
  int32_t width;
  RowType type;

  HKV_HOST_DEVICE int64_t bytes() const { return row_size(type, width); }
  // Number of elements of a tensor that holds a stored vector.
  int64_t stored_width() const { return bytes() / element_size(type); }
  // frame: that of the slot, or kNoFrame.
  HKV_HOST_DEVICE char* at(int64_t slot, int64_t frame) const {
    return frame == kNoFrame || frames == nullptr ? backing + slot * bytes()
                                                  : frames + frame * bytes();
  }
  // Whether vectors move between host memory and frames.
  HKV_HOST_DEVICE bool moves() const { return width > 0 && frames != nullptr; }
};

struct TableView {
  GlobalPointer<uint16_t> digests;     // [num_buckets][64]
  GlobalPointer<int64_t> ids;          // [num_slots]; null: packed
  GlobalPointer<uint32_t> last_steps;  // [num_slots] step of the last training lookup; null:
                                       // packed, or with the counts
  // Ids and last steps of a packed table: on a GPU, under LRU, the only table of its group.
  PackedEntries entries;
  GlobalPointer<uint32_t> oldest;  // [num_buckets][kGroups] lower bound of the last steps of the
                                   // group's entries; packed tables only
  GlobalPointer<uint64_t> scores;  // [num_slots]; null under LRU, whose scores are the last steps,
                                   // and if there are counts
  CountedSteps counted;            // under kLfu and kAgedLfu on a CPU: counts and last steps
  GlobalPointer<AgedLfu> aged;     // on the table's device; null unless the policy is kAgedLfu
  Miniatures miniatures;           // under kAgedLfu, if they choose AgedLfu::c
  RowStore rows;
  RowStore states;  // optimizer state, float32
  Frames frames;
  EvictedMemory evicted;
  GlobalPointer<uint64_t> counters;       // [kNumCounters]
  GlobalPointer<int64_t> optimizer_step;  // updates of the table so far
  int64_t first_slot;                     // of this table among the slots of its group
  int64_t num_slots;
  uint32_t num_buckets;
  // Buckets of the table before it doubled that are yet to be split (grow.h). CPU only.
  uint32_t unsplit;
  int32_t bucket_slots;
  int32_t column_offset;  // of the table's first column, if columns are sharded
  bool backing_on_host;   // on a GPU: whether the rows of slots are in host memory, which the GPU
                          // never caches; states too, unless all states are in HBM
  Eviction eviction;
  InitialRows initial_rows;

  HKV_HOST_DEVICE int32_t dim() const { return rows.width; }
  // Called under kAgedLfu at the start of a call with this step, before its lookups are counted.
  HKV_HOST_DEVICE void begin_aged_call(uint32_t now) const {
    const uint64_t counted = counters[kLookups];
    AgedLfu renewed = *aged;  // loaded at once
    if (miniatures.entries != nullptr) miniatures.choose(counted, num_slots, &renewed.c);
    renewed.begin_call(now, counted, num_slots);
    *aged = renewed;
  }
  // The ranking of the table's entries in the present call.
  HKV_HOST_DEVICE Ranking ranking() const {
    return aged == nullptr ? Ranking{false, 0} : aged->ranking();
  }
  // Whether a slot, numbered across the group, belongs to this table; false for kNoSlot.
  HKV_HOST_DEVICE bool has(int64_t slot) const {
    return static_cast<uint64_t>(slot - first_slot) < static_cast<uint64_t>(num_slots);
  }
  // Whether the vectors of a slot with this frame (kNoFrame: without a frame) are in HBM, so that a
  // GPU may prefetch them.
  HKV_HOST_DEVICE bool in_hbm(int64_t frame) const { return frame != kNoFrame || !backing_on_host; }
  // The present address, for reading. A writer must mark the frame (cuda/hbm_cache/frames.cuh).
  HKV_HOST_DEVICE char* row(int64_t slot) const { return rows.at(slot, frames.frame_of(slot)); }
  HKV_HOST_DEVICE float* state(int64_t slot) const {
    return reinterpret_cast<float*>(states.at(slot, frames.frame_of(slot)));
  }
};

// The table of a slot that is numbered across the group.
HKV_HOST_DEVICE int32_t table_of_slot(const TableView* tables, int32_t num_tables, int64_t slot) {
  int32_t low = 0;
  int32_t high = num_tables;
  while (high - low > 1) {
    const int32_t middle = (low + high) >> 1;
    if (tables[middle].first_slot <= slot) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

// Whether a new id with this score is refused if the lowest rank is `lowest`.
HKV_HOST_DEVICE bool is_outranked(const TableView& table, RefuseLower refuse, uint64_t score,
                                  uint32_t now, uint64_t lowest) {
  const Ranking ranking = table.ranking();
  if (refuse == RefuseLower::kAll) return ranking.of(score, now) < lowest;
  return ranking.aged && ranking.replaced_by_new(score, now) < lowest;
}

}  // namespace torchrec_hkv::hash_table
