// Remembers the ids that a table has evicted, to count those that come back.
//
// An evicted id writes a mark of 16 bits into the entry of an array that its hash selects. A new id
// checks whether its mark is there. So an eviction costs one store and a new id one load. A call
// checks its new ids before it remembers those that it evicts. A mark is lost when another id
// writes the same entry: after as many further evictions as there are entries, a share of 1/e
// remains. An id that was never evicted finds its mark with a probability of 1/65535.
//
// A table under a frequency policy may also remember half of the id's count, up to 65535, and
// restores it to an id that comes back.
#pragma once

#include <cstdint>

#include "common/global_pointer.h"
#include "common/hashing.h"
#include "common/macros.h"
#include "common/scores.h"

namespace torchrec_hkv::hash_table {

struct EvictedMemory {
  GlobalPointer<uint16_t> marks;  // [entries], 0: free; null: the table remembers no ids
  uint64_t entries;               // 1 to 2^32
  GlobalPointer<uint16_t>
      half_counts;  // [entries] halves of counts; null: no counts are remembered

  struct MarkPosition {
    uint64_t entry;
    uint16_t mark;  // never 0
  };
  HKV_HOST_DEVICE MarkPosition mark_position(int64_t id) const {
    const uint64_t hash = mix64(static_cast<uint64_t>(id) ^ 0x1f83d9abfb41bd6bull);
    return MarkPosition{(hash >> 32) * entries >> 32,
                        static_cast<uint16_t>(((hash & 0xffffffffull) * 65535 >> 32) + 1)};
  }

  // Half of the count in a score.
  HKV_HOST_DEVICE static uint16_t half_count_of(Eviction policy, uint64_t score) {
    const uint64_t count = policy == Eviction::kEpochLfu ? score & 0xffffffffull : score;
    return static_cast<uint16_t>(count / 2 > 0xffffull ? 0xffffull : count / 2);
  }
};

}  // namespace torchrec_hkv::hash_table
