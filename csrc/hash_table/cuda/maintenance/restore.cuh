// Functions that the restore kernels share.
#pragma once

#include <cstdint>

#include "hash_table/cuda/bucket.cuh"
#include "hash_table/cuda/entry.cuh"
#include "hash_table/cuda/hbm_cache/frames.cuh"
#include "hash_table/table_view.h"

namespace torchrec_hkv::hash_table::cuda {

// Copies in pieces to which rows of every type and dim are aligned.
__device__ __forceinline__ void copy_vector(char* to, const char* from, int32_t bytes) {
  for (int32_t b = threadIdx.x % kWarp * 2; b < bytes; b += kWarp * 2) {
    *reinterpret_cast<uint16_t*>(to + b) = *reinterpret_cast<const uint16_t*>(from + b);
  }
}

struct Widths {
  int32_t row;    // bytes
  int32_t state;  // bytes

  __device__ explicit Widths(const TableView& table)
      : row(static_cast<int32_t>(table.rows.bytes())),
        state(table.states.width * static_cast<int32_t>(sizeof(float))) {}
};

// Writes the last step of a restored entry, which may be older than any of its bucket.
__device__ __forceinline__ void restore_step(const TableView& table, int64_t slot, uint32_t step) {
  if (is_packed(table)) {
    const int64_t bucket = table.entries.bucket_of(slot);
    const int64_t group = (slot - bucket * table.bucket_slots) / (kGroupSectors * kSectorSlots);
    atomicMin(&table.oldest[bucket * kGroups + group], step);
  }
  store_l2(step_of(table, slot), step);
}

// Writes all but the digest and the last step.
__device__ inline void write_entry(const TableView& table, int64_t slot, const Entries& entries,
                                   int64_t i) {
  if (threadIdx.x % kWarp == 0) {
    write_id(table, slot, entries.ids[i]);
    if (table.scores != nullptr) table.scores[slot] = entries.scores[i];
  }
  const Widths widths(table);
  const int64_t frame = frame_to_write(table.frames, slot, threadIdx.x % kWarp == 0);
  copy_vector(table.rows.at(slot, frame), entries.rows + i * widths.row, widths.row);
  copy_vector(table.states.at(slot, frame),
              reinterpret_cast<const char*>(entries.states) + i * widths.state, widths.state);
}

}  // namespace torchrec_hkv::hash_table::cuda
