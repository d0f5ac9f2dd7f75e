// Iterates over the positions of neighbouring bags in chunks, for a tile of lanes.
#pragma once

#include <cstdint>

#include "hash_table/cuda/offsets.cuh"
#include "hash_table/cuda/pool/bag_tile.cuh"
#include "hash_table/cuda/tile.cuh"

namespace torchrec_hkv::hash_table::cuda {

// A chunk: consecutive positions, at most one per lane, of at most as many bags. A lane has the
// data of the position and of the bag with the lane's number.
struct BagChunk {
  uint32_t at;     // first position
  int32_t count;   // number of positions
  int32_t bag;     // first bag, counted from the tile's first
  unsigned done;   // bit i: bag i ends in the chunk, or with it
  unsigned empty;  // those of `done` without positions
  int32_t end;     // end of the lane's bag, counted from the first position; at most the number of
                   // lanes + 1
  int64_t slot;    // of the lane's position
  float mean_scale;  // of the lane's bag
  bool good;         // false: some offsets of the tile's bags from here on are invalid

  // Whether the lane's bag ends in the chunk and has a position.
  __device__ __forceinline__ bool ends_a_bag(int lane) const { return (done & ~empty) >> lane & 1; }
};

// The table of a tile's bags. Kept in registers, because copies to shared memory make the compiler
// reload all memory.
struct TileTable {
  const TableView& view;
  const int64_t first_slot;
  const uint64_t num_slots;
  const bool framed;
  const char* const backing;

  __device__ __forceinline__ explicit TileTable(const TableView& table)
      : view(table),
        first_slot(table.first_slot),
        num_slots(static_cast<uint64_t>(table.num_slots)),
        framed(table.frames.tags != nullptr),
        backing(table.rows.backing) {}
  // slot: in the table. row_bytes: of a row.
  __device__ __forceinline__ const char* row(int64_t slot, int32_t row_bytes) const {
    return framed ? view.row(slot) : backing + slot * row_bytes;
  }
};

// The bags of a tile, chunk by chunk. The data of the next chunk is loaded while the tile works on
// the present one. All lanes of a warp call the methods together, until no tile has bags left; a
// tile without bags gets chunks without positions.
template <int kLanes>
struct BagChunks : Tile<kLanes> {
  using Tile<kLanes>::lane;
  using Tile<kLanes>::of_lane;
  using Tile<kLanes>::ballot;

  // 32 bits save registers: batches have fewer than 2^31 positions and bags. After an invalid
  // offset no position is used.
  uint32_t first;  // number of the tile's first bag
  int32_t bags;
  int32_t bag;  // the first bag that is not done
  uint32_t bag_begins;
  uint32_t at;         // the next position
  int64_t ends, slot;  // being loaded: of the lane's bag and position
  // For the first bag that is not done, once its offsets have been checked: the number of its
  // positions from `at` on, and its scale.
  int32_t remaining_in_bag = 0;
  float scale_of_bag = 1.0f;

  // active: whether the tile has bags.
  __device__ __forceinline__ BagChunks(const Batch& batch, const int64_t* __restrict__ slots,
                                       const BagRange& range, bool active)
      : first(static_cast<uint32_t>(range.first)), bags(active ? range.bags : 0), bag(0) {
    at = bag_begins = 0;
    ends = 0;
    slot = kNoSlot;
    if (!more()) return;
    at = bag_begins = static_cast<uint32_t>(batch.offsets[first]);
    load(batch, slots);
  }
  __device__ __forceinline__ bool more() const { return bag < bags; }
  __device__ __forceinline__ void stop() { bag = bags; }

  // Reports bags with invalid offsets.
  template <bool kMean>
  __device__ __forceinline__ BagChunk next(const Batch& batch, const int64_t* __restrict__ slots,
                                           bool mean) {
    BagChunk chunk;
    const bool within = more() && remaining_in_bag > kLanes;  // a long bag
    if (!Tile<kLanes>::any(more() && !within)) {
      chunk = {at, within ? kLanes : 0, bag, 0, 0, kLanes + 1, slot, scale_of_bag, true};
      if (within) {
        remaining_in_bag -= kLanes;
        at += kLanes;
        load_slot(batch, slots);
      }
      return chunk;
    }
    const int32_t is_valid = min(kLanes, bags - bag);
    int64_t starts = Tile<kLanes>::of_lane_before(ends);
    if (lane() == 0 && more()) starts = bag == 0 ? batch.offsets[first] : bag_begins;
    const bool is_bag = lane() < is_valid;
    const int64_t number = int64_t{first} + bag + lane();
    const bool bad = is_bag && is_bad_bag(batch, number, starts, ends);
    chunk.good = ballot(bad) == 0;
    if (bad) refuse_bag(batch, number, starts, ends);
    chunk.at = at;
    chunk.bag = bag;
    chunk.slot = slot;
    const int64_t length = ends - at;
    chunk.end = length > kLanes ? kLanes + 1 : static_cast<int32_t>(length);
    chunk.count = min(kLanes, of_lane(chunk.end, is_valid - 1));
    if (is_valid <= 0) chunk.count = 0;
    chunk.done = ballot(is_bag && chunk.end <= chunk.count);
    chunk.empty = ballot(ends == starts) & chunk.done;
    chunk.mean_scale =
        kMean && mean && ends > starts ? 1.0f / static_cast<float>(ends - starts) : 1.0f;
    const int32_t done = __popc(chunk.done);
    const auto last_end = of_lane(static_cast<uint32_t>(ends), done - 1);
    if (done > 0) bag_begins = last_end;
    bag += done;
    at += chunk.count;
    const int32_t after = of_lane(static_cast<int32_t>(ends - at), done);
    remaining_in_bag = done < is_valid ? after : 0;
    if (kMean) scale_of_bag = of_lane(chunk.mean_scale, done);
    if (more()) load(batch, slots);
    return chunk;
  }

  // The scale of the lane's position: that of its bag, times its weight.
  __device__ __forceinline__ float scale_of(const BagChunk& chunk, const float* weights) const {
    const bool is_valid = lane() < chunk.count;
    // The position's bag: the number of bags that end at or before it.
    int lane_bag = 0;
    if (Tile<kLanes>::any(chunk.done != 0)) {
#pragma unroll
      for (int step = kLanes / 2; step; step /= 2) {
        if (of_lane(chunk.end, lane_bag + step - 1) <= lane()) lane_bag += step;
      }
    }
    float scale = of_lane(chunk.mean_scale, lane_bag);
    if (weights != nullptr && is_valid) scale *= weights[chunk.at + lane()];
    return scale;
  }

 private:
  // Reads only valid positions, for any offsets.
  __device__ __forceinline__ void load(const Batch& batch, const int64_t* __restrict__ slots) {
    ends = batch.offsets[first + min(bag + lane(), bags - 1) + 1];
    load_slot(batch, slots);
  }
  __device__ __forceinline__ void load_slot(const Batch& batch, const int64_t* __restrict__ slots) {
    const uint32_t mine = at + lane();
    slot = mine < batch.num_ids ? slots[mine] : kNoSlot;
  }
};

}  // namespace torchrec_hkv::hash_table::cuda
