// Changes of a table's slots since a step.
#pragma once

#include <cstdint>
#include <vector>

#include "common/hashing.h"
#include "common/macros.h"

namespace torchrec_hkv::hash_table {

// Bits of a slot's result. It is 0 if nothing changed: an entry that was not looked up keeps its
// slot, unless entries move.
enum SlotChange : uint8_t {
  kIsThere = 1,  // the slot has an entry
  kWasThere = 2,
  kIsTouched = 4,  // its entry was looked up or is marked
};

struct SlotChanges {
  int64_t first;          // slot of position 0
  int64_t n;              // positions
  const bool* had_entry;  // [n] whether the slots had entries
  const bool* marked;     // [n] or null: entries that changed without a lookup
  uint32_t since;         // entries with this last step or a later one were looked up
  bool moved;        // entries may have moved: the entry of each occupied slot may be another one
  uint8_t* changes;  // [n]

  HKV_HOST_DEVICE uint8_t of(uint16_t digest, uint32_t last_step, bool had, bool is_marked) const {
    const uint8_t is_occupied = digest != kEmptyDigest ? kIsThere : 0;
    const uint8_t was_occupied = had ? kWasThere : 0;
    const uint8_t touched = (last_step >= since || is_marked) && is_occupied != 0 ? kIsTouched : 0;
    const bool differs = is_occupied != 0 ? !had || touched != 0 || moved : had;
    return differs ? is_occupied | was_occupied | touched : 0;
  }
};

// What all slots held at an earlier time, in host memory that the kernel's device can access.
struct SlotContents {
  int64_t* ids;
  bool* occupied;
};

// The contents of some consecutive slots at an earlier time, for comparison with the present ones.
// CPU only.
struct SlotComparison {
  int64_t first;       // slot of position 0
  int64_t n;           // positions
  int64_t* ids;        // [n] previous ids, replaced by the present ones; undefined for free slots
  bool* occupied;      // [n] whether the slots had an entry, replaced by whether they have one
  const bool* marked;  // [n] or null, as SlotChanges
  uint32_t since;
  bool moved;
  bool freed;  // slots may have been freed without getting another entry
};

// The result of such a comparison; slots ascend.
struct SlotDifferences {
  // Entries that were looked up, are marked or are new; whether they are touched (kIsTouched), and
  // whether the slot held the same id before.
  std::vector<int64_t> slots;
  std::vector<int64_t> ids;
  std::vector<uint8_t> touched;
  std::vector<uint8_t> unchanged;
  // Ids that have left their slots.
  std::vector<int64_t> removed_slots;
  std::vector<int64_t> removed_ids;
};

}  // namespace torchrec_hkv::hash_table
