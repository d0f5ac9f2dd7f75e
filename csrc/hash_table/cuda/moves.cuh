// Rows that a batch has touched come into frames, and others leave, in the order of addresses.
#pragma once

#include <cuda_runtime.h>

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

// Where it goes by.
struct MoveAt {
  const TableView* table;
  int64_t slot, frame;
  int64_t leaver;  // or kNoSlot

  __device__ __forceinline__ MoveAt(const TableView* tables, const Move& move)
      : table(&tables[move.table]), slot(move.slot) {
    const Frames& frames = table->frames;
    const Frames::Home home = frames.home_of(slot);
    frame = frames.frame_at(home.set, move.place);
    leaver = move.leaver == 0 ? kNoSlot : frames.slot_with(home, move.leaver - 1u);
  }
};

// The moves of a call, ordered by *stretches* of the group's slots, which are neighbours in host
// memory.
struct Moves {
  uint32_t* stretches;  // [4 * vectors] moves of each; later, where the next of each belongs
  uint32_t* number;     // of all
  Move* claimed;        // [ids]
  Move* ordered;        // [ids]
  uint32_t vectors;     // of four stretches
  int32_t shift;        // of a slot that is numbered through the group, to its stretch

  __device__ __forceinline__ uint32_t& stretch_of(const TableView* tables, const Move& move) const {
    return stretches[(tables[move.table].first_slot + move.slot) >> shift];
  }
};

// Rows of a batch's ids that were there before, all but those that were `placed`, come from host
// memory where they have no frame and get one.
void fetch_rows(const TableView* tables, const Batch& batch, const Visit& visit,
                const int64_t* slots, const bool* placed, const MovingRows& moving, void* scratch,
                cudaStream_t stream);
size_t fetch_scratch(int64_t num_ids, const MovingRows& moving);

// Makes the moves by bulk copies, on sm_90 and above (in moves_bulk.cu).
void move_in_bulk(const TableView* tables, const Moves& moves, int32_t bulk_bytes, unsigned blocks,
                  cudaStream_t stream);

}  // namespace torchrec_hkv::hash_table::cuda
