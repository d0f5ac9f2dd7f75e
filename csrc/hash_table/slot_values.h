// Rows and optimizer states of float32 tables, side by side in one matrix.
#pragma once

#include <cstdint>

#include "common/macros.h"

namespace torchrec_hkv::hash_table {

// Row i: the row of an entry, then its state. Further columns are others'.
struct ValueMatrix {
  float* data;
  int64_t stride;  // columns from one row to the next
  bool states;     // whether states are there

  HKV_HOST_DEVICE float* at(int64_t i) const { return data + i * stride; }
};

// What a replica says of an id: its row, its state, and two words. CPU only.
struct ReplicaRecords {
  float* data;
  int64_t columns;  // of row and state; the words follow
  bool states;      // whether states are there

  // Flags: the replica has the id, otherwise all is 0; it had it at the last sync, too.
  static constexpr uint32_t kIsHere = 1, kWasHere = 2;
  struct Words {
    uint32_t last_step;
    uint32_t flags;
  };

  int64_t stride() const { return columns + 2; }
  float* at(int64_t i) const { return data + i * stride(); }
};

// Ids that two replicas bring together, [n] each.
struct MergedEntries {
  const int64_t* slots;  // kNoSlot: the id is not here
  const int64_t* ids;
  const bool* known;       // whether a replica touched or lost the id and had it at the last sync
  const uint64_t* scores;  // what comes of the scores; null: the table has none
  int64_t n;
  // Column whose highest value counts instead of the mean; -1: none.
  int64_t highest_column;
};

}  // namespace torchrec_hkv::hash_table
