// Gives frames to the rows that a batch has touched, and moves rows in and out in the order of
// addresses.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "hash_table/cuda/hbm_cache/frames.cuh"

namespace torchrec_hkv::hash_table::cuda {

// The move of a row to its new frame, in one word.
class Move {
 public:
  // slot: its number in the group. place: the frame's number in its set. is_new: the row in host
  // memory is not valid, and is not loaded. leaver: 1 + the number in the set of the slot whose row
  // leaves the frame; 0: no row leaves.
  __device__ __forceinline__ Move(int64_t slot, int64_t place, bool is_new, uint32_t leaver)
      : bits_(static_cast<uint64_t>(slot) << kLow | static_cast<uint64_t>(place) << kPlaceAt |
              static_cast<uint64_t>(is_new) << kNewAt | leaver) {}

  __device__ __forceinline__ int64_t slot() const { return static_cast<int64_t>(bits_ >> kLow); }
  __device__ __forceinline__ int place() const { return static_cast<int>(bits_ >> kPlaceAt) & 7; }
  __device__ __forceinline__ bool is_new() const { return bits_ >> kNewAt & 1; }
  __device__ __forceinline__ uint32_t leaver() const {
    return static_cast<uint32_t>(bits_) & ((1u << kNewAt) - 1);
  }

 private:
  static constexpr int kNewAt = 14, kPlaceAt = kNewAt + 1, kLow = kPlaceAt + 3;
  static_assert(most_slots_of_set(kFewestOfSet) < 1 << kNewAt && kMostOfSet <= 8);

  uint64_t bits_;
};

// The addresses of a move.
struct MoveAt {
  const TableView* table;
  int64_t slot;    // slot whose row is loaded, or kNoSlot
  int64_t leaver;  // slot whose row is written back, or kNoSlot
  int64_t frame;

  __device__ __forceinline__ MoveAt(const TableView* tables, int32_t num_tables, const Move& move)
      : table(&tables[table_of_slot(tables, num_tables, move.slot())]) {
    const Frames& frames = table->frames;
    const int64_t of_table = move.slot() - table->first_slot;
    const Frames::SetPlace in_set = frames.place_in_set(of_table);
    slot = move.is_new() ? kNoSlot : of_table;
    leaver = move.leaver() == 0 ? kNoSlot : frames.slot_with(in_set, move.leaver() - 1);
    frame = frames.frame_at(in_set.set, move.place());
  }
};

// The moves of a call, ordered by *stretches*: ranges of the group's slots, which are neighbours in
// host memory.
struct Moves {
  uint32_t* stretches;  // [4 * vectors] moves of each stretch; later the place of its next move
  uint32_t* number;     // number of all moves
  uint32_t* taken;      // number of moves that warps with bulk copies have taken
  Move* claimed;        // [ids]
  Move* ordered;        // [ids]
  uint8_t* new_places;  // [ids] for a new id 1 + the frame's place in its set; 0: no frame
  uint32_t vectors;     // of four stretches
  int32_t shift;        // shift from a slot's number to its stretch
  int32_t num_tables;   // of the group

  __device__ __forceinline__ uint32_t& stretch_of(const Move& move) const {
    return stretches[move.slot() >> shift];
  }
};

// Gives frames, if available, to the rows of `placed` ids and, if `others` is set, of the batch's
// other ids. Does not move rows yet. scratch: moves_scratch bytes, used until the rows have moved.
Moves claim_frames(const TableView* tables, const Batch& batch, const Visit& visit,
                   const int64_t* slots, const bool* placed, bool others, const MovingRows& moving,
                   void* scratch, cudaStream_t stream);
size_t moves_scratch(int64_t num_ids, const MovingRows& moving);

// Moves the rows. The moves of several calls must be made in the order of the calls.
void move_rows(const TableView* tables, const Batch& batch, const Moves& moves,
               const MovingRows& moving, cudaStream_t stream);

// As move_rows, by bulk copies, on sm_90 and later (in moves_bulk.cu).
void move_in_bulk(const TableView* tables, const Moves& moves, int32_t bulk_bytes, unsigned blocks,
                  cudaStream_t stream);

}  // namespace torchrec_hkv::hash_table::cuda
