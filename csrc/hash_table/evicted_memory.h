// Which ids a table has evicted, remembered so that it can count those that come back.
//
// An id that leaves for another writes a mark of 16 bits into the one entry of an array that its
// hash tells; an id that gets a slot looks whether its mark is there. So an eviction costs one
// store, and a new id one load. A call's new ids are looked for before what it evicts is
// remembered. It is forgotten when another id writes the same entry: after as many further
// evictions as there are entries, a share 1/e is left. An id that was never evicted finds its mark
// in an entry of another's with a probability of 1/65535.
//
// A table under a frequency policy may remember half of the id's count, too, up to 65535, and gives
// it back to an id that returns.
#pragma once

#include <cstdint>

#include "common/hashing.h"
#include "common/macros.h"
#include "common/scores.h"

namespace torchrec_hkv::hash_table {

struct EvictedMemory {
  uint16_t* marks;   // [entries], 0: nobody's; null: the table remembers none
  uint64_t entries;  // 1 to 2^32
  uint16_t* halves;  // [entries] halves of counts; null: it remembers no counts

  struct Place {
    uint64_t entry;
    uint16_t mark;  // never 0
  };
  HKV_HOST_DEVICE Place place_of(int64_t id) const {
    const uint64_t hash = mix64(static_cast<uint64_t>(id) ^ 0x1f83d9abfb41bd6bull);
    return Place{(hash >> 32) * entries >> 32,
                 static_cast<uint16_t>(((hash & 0xffffffffull) * 65535 >> 32) + 1)};
  }

  // Half of the count that a score stands for.
  HKV_HOST_DEVICE static uint16_t half_of(Eviction policy, uint64_t score) {
    const uint64_t count = policy == Eviction::kEpochLfu ? score & 0xffffffffull : score;
    return static_cast<uint16_t>(count / 2 > 0xffffull ? 0xffffull : count / 2);
  }
};

}  // namespace torchrec_hkv::hash_table
