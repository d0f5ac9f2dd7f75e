// Rows and optimizer states of float32 tables, side by side in one matrix.
#pragma once

#include <cstdint>

#include "common/macros.h"

namespace torchrec_hkv::hash_table {

// Row i: the row of an entry, then its state. Further columns are not accessed.
struct ValueMatrix {
  float* data;
  int64_t stride;  // columns from one row to the next
  bool states;     // whether states are there

  HKV_HOST_DEVICE float* at(int64_t i) const { return data + i * stride; }
};

// A replica's record of an id: row, state, and two words. CPU only.
struct ReplicaRecords {
  float* data;
  int64_t columns;  // of row and state; the words follow
  bool states;      // whether states are there

  // Flags: the replica has the id (otherwise the record is 0); it also had it at the last sync.
  static constexpr uint32_t kIsPresent = 1, kWasPresent = 2;
  struct Metadata {
    uint32_t last_step;
    uint32_t flags;
  };

  int64_t stride() const { return columns + 2; }
  float* at(int64_t i) const { return data + i * stride(); }
};

// Ids that two replicas merge, [n] each.
struct MergedEntries {
  const int64_t* slots;  // kNoSlot: this replica does not have the id
  const int64_t* ids;
  const bool* known;       // whether a replica touched or lost the id and had it at the last sync
  const uint64_t* scores;  // merged scores; null: the table has no scores
  int64_t n;
  // Column that takes the highest value instead of the mean; -1: no column.
  int64_t highest_column;
};

}  // namespace torchrec_hkv::hash_table
