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
  // slot: its number in the group. way: the frame's number in its set. is_new: the row in host
  // memory is not valid, and is not loaded. victim: 1 + the number in the set of the slot whose row
  // leaves the frame; 0: no row leaves.
  __device__ __forceinline__ Move(int64_t slot, int64_t way, bool is_new, uint32_t victim)
      : bits_(static_cast<uint64_t>(slot) << kSlotShift | static_cast<uint64_t>(way) << kWayShift |
              static_cast<uint64_t>(is_new) << kNewShift | victim) {}

  __device__ __forceinline__ int64_t slot() const {
    return static_cast<int64_t>(bits_ >> kSlotShift);
  }
  __device__ __forceinline__ int way() const { return static_cast<int>(bits_ >> kWayShift) & 7; }
  __device__ __forceinline__ bool is_new() const { return bits_ >> kNewShift & 1; }
  __device__ __forceinline__ uint32_t victim() const {
    return static_cast<uint32_t>(bits_) & ((1u << kNewShift) - 1);
  }

 private:
  static constexpr int kNewShift = 14, kWayShift = kNewShift + 1, kSlotShift = kWayShift + 3;
  static_assert(max_slots_per_set(kMinFramesPerSet) < 1 << kNewShift && kMaxFramesPerSet <= 8);

  uint64_t bits_;
};

// The addresses of a move.
struct MoveAddresses {
  const TableView* table;
  int64_t slot;    // slot whose row is loaded, or kNoSlot
  int64_t victim;  // slot whose row is written back, or kNoSlot
  int64_t frame;

  __device__ __forceinline__ MoveAddresses(const TableView* tables, int32_t num_tables,
                                           const Move& move)
      : table(&tables[table_of_slot(tables, num_tables, move.slot())]) {
    const Frames& frames = table->frames;
    const int64_t of_table = move.slot() - table->first_slot;
    const Frames::SetPosition in_set = frames.set_position(of_table);
    slot = move.is_new() ? kNoSlot : of_table;
    victim = move.victim() == 0 ? kNoSlot : frames.slot_with(in_set, move.victim() - 1);
    frame = frames.frame_at(in_set.set, move.way());
  }
};

// The moves of a call, ordered by *bins*: ranges of the group's slots, which are neighbours in
// host memory.
struct Moves {
  uint32_t* bins;      // [4 * vectors] moves of each bin; later the place of its next move
  uint32_t* number;    // number of all moves
  uint32_t* taken;     // number of moves that warps with bulk copies have taken
  Move* claimed;       // [ids]
  Move* ordered;       // [ids]
  uint8_t* new_ways;   // [ids] for a new id 1 + the frame's place in its set; 0: no frame
  uint32_t vectors;    // of four bins
  int32_t shift;       // shift from a slot's number to its bin
  int32_t num_tables;  // of the group

  __device__ __forceinline__ uint32_t& bin_of(const Move& move) const {
    return bins[move.slot() >> shift];
  }
};

// Gives frames, if available, to the rows of `placed` ids and, if `others` is set, of the batch's
// other ids. Does not move rows yet. scratch: moves_scratch bytes, used until the rows have moved.
Moves claim_frames(const TableView* tables, const Batch& batch, const CallContext& context,
                   const int64_t* slots, const bool* placed, bool others, const FrameMoves& moving,
                   void* scratch, cudaStream_t stream);
size_t moves_scratch(int64_t num_ids, const FrameMoves& moving);

// Moves the rows. The moves of several calls must be made in the order of the calls.
void move_rows(const TableView* tables, const Batch& batch, const Moves& moves,
               const FrameMoves& moving, cudaStream_t stream);

// As move_rows, by bulk copies, on sm_90 and later (in moves_bulk.cu).
void move_in_bulk(const TableView* tables, const Moves& moves, int32_t bulk_bytes, unsigned blocks,
                  cudaStream_t stream);

}  // namespace torchrec_hkv::hash_table::cuda
