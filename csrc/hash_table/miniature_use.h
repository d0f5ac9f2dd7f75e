// Decides when a table's miniatures see its ids, on both devices.
#pragma once

#include <cstdint>

#include "common/macros.h"
#include "hash_table/table_view.h"

namespace torchrec_hkv::hash_table {

// Up to this number of lookups per slot of the table in a call, miniatures see its ids. Beyond that
// the table is much too small for its batches, and a set would process hundreds of ids in turn.
constexpr double kMaxSeenPerSlot = 8;

// Whether a table's miniatures see the ids of a call, at its end. Before the first eviction there
// is nothing to choose.
HKV_HOST_DEVICE bool miniatures_enabled(const TableView& table) {
  return table.miniatures.entries != nullptr && table.counters[kEvicted] != 0 &&
         table.aged->lookups <=
             kMaxSeenPerSlot * static_cast<double>(table.num_slots) * table.aged->steps;
}

}  // namespace torchrec_hkv::hash_table
