// Writing entries of a file into slots of a table, on the CPU.
#pragma once

#include <cstdint>
#include <cstring>

#include "common/stream.h"
#include "hash_table/cpu/bucket.h"
#include "hash_table/table_view.h"

namespace torchrec_hkv::hash_table::cpu {

constexpr int64_t kAhead = 12;  // entries that are prefetched before they are written

struct Widths {
  int64_t row;    // bytes
  int64_t state;  // bytes
};

inline Widths widths_of(const TableView& table) {
  return Widths{table.rows.bytes(), table.states.bytes()};
}

inline uint16_t& digest_at(const TableView& table, int64_t slot) {
  const int64_t bucket = bucket_of_slot(slot, table.bucket_slots);
  return table.digests[bucket * kBucketDigests + (slot - bucket * table.bucket_slots)];
}

// Writes all but the digest. kStreams: writes the row past the caches; finish_streams() must
// follow.
template <bool kStreams = false>
inline void write_entry(const TableView& table, const Widths& widths, int64_t slot,
                        const Entries& entries, int64_t i) {
  table.ids[slot] = entries.ids[i];
  set_step_and_score(table, slot, entries.last_steps[i],
                     entries.scores != nullptr ? &entries.scores[i] : nullptr);
  const char* const row = entries.rows + i * widths.row;
  if constexpr (kStreams) {
    stream_copy(table.row(slot), row, widths.row);
  } else {
    std::memcpy(table.row(slot), row, widths.row);
  }
  if (widths.state == 0) return;
  std::memcpy(table.state(slot), entries.states + i * table.states.width, widths.state);
}

// Prefetches what write_entry and a change of the digest touch.
class SlotPrefetch {
 public:
  // rows: whether to prefetch rows.
  explicit SlotPrefetch(const TableView& table, bool rows = true)
      : table_(table), rows_(table.rows), states_(table.states), with_rows_(rows) {}

  void operator()(int64_t slot) const {
    if (slot < 0 || slot >= table_.num_slots) return;
    prefetch_to_write(&digest_at(table_, slot));
    prefetch_to_write(&table_.ids[slot]);
    for_touched(table_, slot, [](const void* place) { prefetch_to_write(place); });
    if (with_rows_) rows_.prefetch_to_write(slot);
    states_.prefetch_to_write(slot);
  }

 private:
  const TableView& table_;
  const SlotVectors rows_, states_;
  const bool with_rows_;
};

}  // namespace torchrec_hkv::hash_table::cpu
