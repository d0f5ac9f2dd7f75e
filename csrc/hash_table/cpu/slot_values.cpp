// Copies rows and states of entries to a matrix and back, on the CPU.
#include "hash_table/slot_values.h"

#include <cstring>

#include "common/parallel.h"
#include "hash_table/cpu/bucket.h"
#include "hash_table/sync_kernels.h"

namespace torchrec_hkv::hash_table::cpu {
namespace {

constexpr int64_t kAhead = 16;

// Addresses and bytes of rows and states; no states if they are not wanted.
struct SlotAddresses {
  const TableView& table;
  SlotVectors rows;
  SlotVectors states;
  int64_t row_bytes;
  int64_t state_bytes;

  SlotAddresses(const TableView& table, bool with_states)
      : table(table),
        rows(table.rows),
        states(table.states),
        row_bytes(table.rows.bytes()),
        state_bytes(with_states ? table.states.bytes() : 0) {}

  void prefetch(int64_t slot) const {
    if (slot == kNoSlot) return;
    rows.prefetch(slot);
    if (state_bytes > 0) states.prefetch(slot);
    for_touched(table, slot, [](const void* place) { prefetch_lines(place, 1); });
  }
};

}  // namespace

void read_values(const TableView& table, const int64_t* slots, int64_t n, const ValueMatrix& out,
                 uint32_t* last_steps, uint64_t* scores, int threads) {
  const SlotAddresses addresses(table, out.states);
  parallel_for(n, 1024, threads, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      if (i + kAhead < end) addresses.prefetch(slots[i + kAhead]);
      const int64_t slot = slots[i];
      char* const to = reinterpret_cast<char*>(out.at(i));
      const bool present = slot != kNoSlot;
      last_steps[i] = present ? step_of(table, slot) : 0;
      if (scores != nullptr) scores[i] = present ? score_of(table, slot) : 0;
      if (present) {
        std::memcpy(to, addresses.rows.at(slot), addresses.row_bytes);
        if (addresses.state_bytes > 0) {
          std::memcpy(to + addresses.row_bytes, addresses.states.at(slot), addresses.state_bytes);
        }
      } else {
        std::memset(to, 0, addresses.row_bytes + addresses.state_bytes);
      }
    }
  });
}

void write_values(const TableView& table, const int64_t* slots, int64_t n, const int64_t* ids,
                  const ValueMatrix& from, const uint32_t* last_steps, const uint64_t* scores,
                  int threads) {
  const SlotAddresses addresses(table, from.states);
  parallel_for(n, 1024, threads, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      if (i + kAhead < end) {
        const int64_t ahead = slots[i + kAhead];
        addresses.prefetch(ahead);
        if (ahead != kNoSlot) prefetch_lines(&table.ids[ahead], 1);
      }
      const int64_t slot = slots[i];
      if (slot < 0 || slot >= table.num_slots || table.ids[slot] != ids[i]) continue;
      const int64_t bucket = slot / table.bucket_slots;
      const int64_t position = slot - bucket * table.bucket_slots;
      if (table.digests[bucket * kBucketDigests + position] == kEmptyDigest) continue;
      const char* const values = reinterpret_cast<const char*>(from.at(i));
      set_step_and_score(table, slot, last_steps[i], scores != nullptr ? &scores[i] : nullptr);
      std::memcpy(addresses.rows.at(slot), values, addresses.row_bytes);
      if (addresses.state_bytes > 0) {
        std::memcpy(addresses.states.at(slot), values + addresses.row_bytes, addresses.state_bytes);
      }
    }
  });
}

}  // namespace torchrec_hkv::hash_table::cpu
