// A hash table as kernels see it: raw pointers, owned by someone else.
//
// Layout. A table is an array of buckets. A bucket has up to 64 slots; its 64 digests of 16 bits
// fill one 128-byte line, so that one line tells which slots may hold an id. A slot's id, step,
// score, row and optimizer state lie in arrays of their own at the slot's number,
// bucket * bucket_slots + position. Every id has two candidate buckets; nothing moves once placed,
// so a slot number stays valid until its id is evicted. Emptiness is told by the digest, never by
// an id: every 64-bit id is legal.
//
// Slots of a group's tables are numbered through: slot + first_slot is unique in the group.
#pragma once

#include <cstdint>

#include "common/dtypes.h"
#include "common/hashing.h"
#include "common/initial_rows.h"
#include "common/macros.h"
#include "common/scores.h"

namespace torchrec_hkv::hash_table {

constexpr int64_t kNoSlot = -1;

// The last step of free slots. It is later than any other, so that nobody takes a slot that is just
// being filled for the oldest of its bucket. On a CPU, where one thread fills a table, nobody looks
// at it, and a slot that was never filled holds anything: a large table's memory is not touched.
constexpr uint32_t kFreeStep = 0xFFFFFFFFu;

// Device counters of a table, counted since it was made.
enum Counter : int32_t {
  kLookups = 0,   // ids of training lookups
  kMisses = 1,    // of these, not found at once
  kInserted = 2,  // ids placed
  kEvicted = 3,   // of these, in the place of another id
  kRefused = 4,   // ids of training lookups that found no place
  kNumCounters = 5,
};

// Vectors by slot, over two memories: slots below hbm_slots lie in the first, the others in the
// second.
struct RowStore {
  char* hbm;   // [hbm_slots][width]
  char* host;  // [num_slots - hbm_slots][width]
  int64_t hbm_slots;
  int32_t width;
  RowType type;

  HKV_HOST_DEVICE char* row(int64_t slot) const {
    const int64_t bytes = static_cast<int64_t>(width) * element_size(type);
    return slot < hbm_slots ? hbm + slot * bytes : host + (slot - hbm_slots) * bytes;
  }
};

struct TableView {
  uint16_t* digests;     // [num_buckets][64]
  int64_t* ids;          // [num_slots]
  uint32_t* last_steps;  // [num_slots] step of the last training lookup
  uint64_t* scores;      // [num_slots]; null under LRU, whose scores are the last steps
  RowStore rows;
  RowStore states;     // optimizer state, float32
  uint64_t* counters;  // [kNumCounters]
  int64_t first_slot;  // of this table among the slots of its group
  int64_t num_slots;
  uint32_t num_buckets;
  int32_t bucket_slots;
  int32_t column_offset;  // of the table's first column, where columns are sharded
  Eviction eviction;
  InitialRows initial_rows;

  HKV_HOST_DEVICE int32_t dim() const { return rows.width; }
  HKV_HOST_DEVICE float* state(int64_t slot) const {
    return reinterpret_cast<float*>(states.row(slot));
  }
};

// How low an entry ranks: the lowest leaves a full bucket.
struct Rank {
  uint64_t score;
  uint32_t last_step;

  HKV_HOST_DEVICE bool operator<(const Rank& other) const {
    return score != other.score ? score < other.score : last_step < other.last_step;
  }
};

// The ids of one call: feature-major bags of the features of a group, in CSR form.
struct Batch {
  const int64_t* ids;              // [offsets[num_features * batch_size]]
  const int64_t* offsets;          // [num_features * batch_size + 1], nondecreasing; null: one
                                   // feature, one bag
  const int32_t* feature_tables;   // [num_features] table of each feature
  const int32_t* feature_columns;  // [num_features] first column of each feature in the output
  int32_t num_features;
  int64_t batch_size;
  int64_t num_ids;

  // Position of the feature's first id.
  HKV_HOST_DEVICE int64_t feature_start(int32_t feature) const {
    if (offsets == nullptr) return feature == 0 ? 0 : num_ids;
    return offsets[feature * batch_size];
  }
  // Feature of the id at a position.
  HKV_HOST_DEVICE int32_t feature_of(int64_t position) const {
    int32_t low = 0;
    int32_t high = num_features;
    while (high - low > 1) {
      const int32_t middle = (low + high) >> 1;
      if (feature_start(middle) <= position) {
        low = middle;
      } else {
        high = middle;
      }
    }
    return low;
  }
};

// What a call that touches ids knows besides them. Rows touched at or after `pinned_from` belong to
// batches whose backward is still to come: they are never evicted.
struct Visit {
  uint32_t now;  // the step of this call
  uint32_t pinned_from;
  uint32_t epoch;          // for the epoch policies
  const uint64_t* scores;  // by position, see takes_scores; null: none given

  HKV_HOST_DEVICE uint64_t given(int64_t position) const {
    return scores != nullptr ? scores[position] : 1;
  }
};

// What leaves a table, or is refused, while others are inserted. Null pointers: not wanted.
struct Leavers {
  int64_t* ids;
  char* rows;  // of the table's type
  uint64_t* scores;
  uint64_t* number;        // device counter
  const char* given_rows;  // [positions][dim]: what a refused id came with
};

// How ids that are missing are placed.
struct Placement {
  bool initialize;    // write the initial row; otherwise the row is left for the caller to write
  bool refuse_lower;  // an id whose score is lower than all it could replace is refused
  Leavers leavers;    // groups of one table only
};

// How the ids of a bag are reduced.
struct Pooling {
  bool mean;             // divide by the bag's length
  const float* weights;  // [num_ids] or null
};

// A matrix of floats with the outputs of a batch, or their gradients: a row a sample, the features'
// columns side by side.
template <typename T>
struct Output {
  T* data;
  int64_t stride;  // columns of all features
};

// Entries with all that a table keeps of them, as a file holds them.
struct Entries {
  const int64_t* ids;
  const char* rows;            // [n][dim] of the table's type
  const uint32_t* last_steps;  // [n]
  const uint64_t* scores;      // [n]; null under LRU
  const float* states;         // [n][state width]
  int64_t n;

  HKV_HOST_DEVICE Rank rank(int64_t i) const {
    return Rank{scores != nullptr ? scores[i] : last_steps[i], last_steps[i]};
  }
};

// Room for entries that others took the place of.
struct Displaced {
  int64_t* ids;
  char* rows;
  uint32_t* last_steps;
  uint64_t* scores;  // null under LRU
  float* states;
  uint64_t* counts;  // [2], zeros before the call: the displaced, and those that found no place
};

}  // namespace torchrec_hkv::hash_table
