// Rows that a batch has touched come into frames, and others leave, in the order of addresses.
#pragma once

#include <cstddef>
#include <cstdint>

#include "hash_table/cuda/frames.cuh"

namespace torchrec_hkv::hash_table::cuda {

// A row that comes into a frame.
struct Move {
  int64_t slot;  // in its table
  int32_t table;
  uint16_t place;   // of the frame, in its set
  uint16_t leaver;  // 1 + the number in the set of the slot whose row leaves it; 0: nothing leaves
};

// In which order: by stretches of a group's slots, which are neighbours in host memory.
struct MoveOrder {
  uint32_t stretches;  // 0: no table has frames
  int32_t shift;       // of a slot that is numbered through the group

  static MoveOrder of(int64_t group_slots);
  // The counts of stretches, four at a time.
  HKV_HOST_DEVICE uint32_t vectors() const { return (stretches + 3) / 4; }
  // These, and the number of all.
  size_t count_bytes() const { return (size_t{vectors()} + 1) * 4 * sizeof(uint32_t); }
  size_t scratch_bytes(int64_t num_ids) const;
};

// Rows of a batch's ids that were there before, all but those that were `placed`, come from host
// memory where they have no frame and get one.
void fetch_rows(const TableView* tables, const Batch& batch, const Visit& visit,
                const int64_t* slots, const bool* placed, const MoveOrder& order, void* scratch,
                cudaStream_t stream);

}  // namespace torchrec_hkv::hash_table::cuda
