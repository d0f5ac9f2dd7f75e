// Rows that a batch has touched get frames and come there, and others leave, in the order of
// addresses.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "hash_table/cuda/frames.cuh"

namespace torchrec_hkv::hash_table::cuda {

// A row that has got a frame.
struct Move {
  int64_t slot;  // in its table
  int32_t table;
  uint8_t place;    // of the frame, in its set
  bool is_new;      // what is at home means nothing, and does not come
  uint16_t leaver;  // 1 + the number in the set of the slot whose row leaves it; 0: nothing leaves
};

// Where it goes by.
struct MoveAt {
  const TableView* table;
  int64_t slot;    // whose row comes, or kNoSlot
  int64_t leaver;  // whose row goes home, or kNoSlot
  int64_t frame;

  __device__ __forceinline__ MoveAt(const TableView* tables, const Move& move)
      : table(&tables[move.table]), slot(move.is_new ? kNoSlot : move.slot) {
    const Frames& frames = table->frames;
    const Frames::Home home = frames.home_of(move.slot);
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
  uint8_t* new_places;  // [ids] of a new id 1 + the frame's place in its set; 0: it has none
  uint32_t vectors;     // of four stretches
  int32_t shift;        // of a slot that is numbered through the group, to its stretch

  __device__ __forceinline__ uint32_t& stretch_of(const TableView* tables, const Move& move) const {
    return stretches[(tables[move.table].first_slot + move.slot) >> shift];
  }
};

// Rows of ids that were `placed` get frames, and, where `others` is set, those of the batch's other
// ids, if they can be had. Nothing has moved yet. scratch: moves_scratch bytes, until it has.
Moves claim_frames(const TableView* tables, const Batch& batch, const Visit& visit,
                   const int64_t* slots, const bool* placed, bool others, const MovingRows& moving,
                   void* scratch, cudaStream_t stream);
size_t moves_scratch(int64_t num_ids, const MovingRows& moving);

// Makes the moves. Those of calls must be made in the calls' order.
void move_rows(const TableView* tables, const Batch& batch, const Moves& moves,
               const MovingRows& moving, cudaStream_t stream);

// The same by bulk copies, on sm_90 and above (in moves_bulk.cu).
void move_in_bulk(const TableView* tables, const Moves& moves, int32_t bulk_bytes, unsigned blocks,
                  cudaStream_t stream);

}  // namespace torchrec_hkv::hash_table::cuda
