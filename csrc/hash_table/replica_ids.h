// The ids that replicas of a table exchange in a sync. CPU only.
#pragma once

#include <cstdint>

#include "hash_table/table_view.h"

namespace torchrec_hkv::hash_table {

// The ids of one replica, in this order: touched ids that are new to it, other touched ids, and ids
// that left it. All are distinct.
struct ReplicaIds {
  const int64_t* ids;
  int64_t num_new, num_old, num_removed;

  int64_t touched() const { return num_new + num_old; }
  int64_t all() const { return touched() + num_removed; }
};

// How the ids of all replicas relate to this one. Arrays have room for all touched ids of all
// replicas, unless said otherwise.
struct MergedIds {
  int64_t* ids;      // those that some replica touched, in the order of first occurrence
  bool* known;       // whether a replica that touched or lost the id had it at the last sync
  bool* touched;     // whether this replica touched it
  bool* is_new;      // whether it was also new to this replica
  int64_t* slots;    // its slot here, or kNoSlot
  int64_t* absent;   // indices of ids without a slot here; room for the ids that others touched
  int64_t* removed;  // ids that left a replica and that none touched; room for those that left any
  int64_t* touched_indices;  // of each id that this replica touched, its index in `ids`
};

// Numbers of elements of MergedIds.
struct MergedCounts {
  int64_t ids;
  int64_t removed;
  int64_t absent;
};

namespace cpu {

// replicas: [number]; own_index: which of them is this one; slots: of the ids that this one
// touched. All replicas together have less than 2^32 - 1 ids.
MergedCounts merge_ids(const TableView& table, const ReplicaIds* replicas, int64_t number,
                       int64_t own_index, const int64_t* slots, const MergedIds& out, int threads);

}  // namespace cpu
}  // namespace torchrec_hkv::hash_table
