// A hash table as kernels see it: raw pointers, owned by someone else.
//
// Layout. A table is an array of buckets. A bucket has up to 64 slots; its 64 digests of 16 bits
// fill one 128-byte line, so that one line tells which slots may hold an id. A slot's id, step,
// frequency, row and optimizer state lie in arrays of their own at the slot's number,
// bucket * bucket_slots + position. Every id has two candidate buckets; nothing moves once placed,
// so a slot number stays valid until its id is evicted. Emptiness is told by the digest, never by
// an id: every 64-bit id is legal.
//
// Slots of a group's tables are numbered through: slot + first_slot is unique in the group.
#pragma once

#include <cstdint>

#include "common/hashing.h"
#include "common/initial_rows.h"
#include "common/macros.h"
#include "common/scores.h"

namespace torchrec_hkv::hash_table {

constexpr int64_t kNoSlot = -1;

enum class Eviction : int32_t {
  kLru = 0,  // the id looked up longest ago goes
  kLfu = 1,  // the id looked up least often goes; among equals, the one looked up longest ago
};

// Device counters of a table, counted since it was made.
enum Counter : int32_t {
  kLookups = 0,   // ids of training lookups
  kHits = 1,      // of these, found at once
  kInserted = 2,  // ids placed
  kEvicted = 3,   // of these, in the place of another id
  kRefused = 4,   // ids of training lookups that found no place
  kNumCounters = 5,
};

struct TableView {
  uint16_t* digests;      // [num_buckets][64]
  int64_t* ids;           // [num_slots]
  uint32_t* last_steps;   // [num_slots] step of the last training lookup
  uint32_t* frequencies;  // [num_slots] training lookups; null under LRU
  uint32_t* locks;        // one bit a bucket; CUDA only
  // Rows and states of slots below hbm_slots lie in the first pair, the others in the second.
  float* rows;         // [hbm_slots][dim]
  float* states;       // [hbm_slots][state_width]
  float* rows_host;    // [num_slots - hbm_slots][dim]
  float* states_host;  // [num_slots - hbm_slots][state_width]
  int64_t hbm_slots;
  uint64_t* counters;  // [kNumCounters]
  int64_t first_slot;  // of this table among the slots of its group
  int64_t num_slots;
  uint32_t num_buckets;
  int32_t bucket_slots;
  int32_t dim;
  int32_t state_width;
  int32_t column_offset;  // of the table's first column, where columns are sharded
  Eviction eviction;
  InitialRows initial_rows;

  HKV_HOST_DEVICE float* row(int64_t slot) const {
    return slot < hbm_slots ? rows + slot * dim : rows_host + (slot - hbm_slots) * dim;
  }
  HKV_HOST_DEVICE float* state(int64_t slot) const {
    return slot < hbm_slots ? states + slot * state_width
                            : states_host + (slot - hbm_slots) * state_width;
  }
};

// Score of an occupied slot, given its last step.
HKV_HOST_DEVICE uint64_t eviction_score(const TableView& table, int64_t slot, uint32_t last_step) {
  return table.eviction == Eviction::kLfu ? lfu_score(table.frequencies[slot], last_step)
                                          : lru_score(last_step);
}

// The ids of one call: feature-major bags of the features of a group, in CSR form.
struct Batch {
  const int64_t* ids;              // [offsets[num_features * batch_size]]
  const int64_t* offsets;          // [num_features * batch_size + 1], nondecreasing
  const int32_t* feature_tables;   // [num_features] table of each feature
  const int32_t* feature_columns;  // [num_features] first column of each feature in the output
  int32_t num_features;
  int64_t batch_size;
  int64_t num_ids;

  // Position of the feature's first id.
  HKV_HOST_DEVICE int64_t feature_start(int32_t feature) const {
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

// Steps of training lookups. Rows touched at or after `pinned_from` belong to batches whose
// backward is still to come: they are never evicted.
struct Steps {
  uint32_t now;
  uint32_t pinned_from;
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

}  // namespace torchrec_hkv::hash_table
