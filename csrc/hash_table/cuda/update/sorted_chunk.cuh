// Neighbouring positions of the sorted order, one for each lane of a tile.
#pragma once

#include <cstdint>

#include "hash_table/cuda/hbm_cache/frames.cuh"
#include "hash_table/cuda/tile.cuh"
#include "hash_table/cuda/update/update.cuh"

namespace torchrec_hkv::hash_table::cuda {

// Whether a kernel for this row class (or for all) updates the rows of a table.
__device__ __forceinline__ bool is_of_class(const TableView& table, int32_t row_class) {
  return row_class == kAllRowClasses || row_class_of(table.dim(), table.rows.type) == row_class;
}

// A chunk of a tile's positions. The tile updates the segments that begin before `tile_end` and are
// not long. The last one may continue for several chunks.
template <int kLanes>
struct SortedChunk {
  using Lanes = Tile<kLanes>;

  uint64_t key;     // of the lane's position
  GradientRef ref;  // of the lane's position, if that belongs to the tile
  const TableView* table;
  bool ends;       // a segment of the tile ends at the position
  unsigned mask;   // lanes whose positions belong to the tile
  bool continues;  // the last segment continues in the next chunk

  // All tiles of a warp call it together. at: the chunk's first position. tile_end: the tile takes
  // segments that begin before it. n: number of positions. is_continued: the last segment of the
  // previous chunk continues.
  __device__ __forceinline__ SortedChunk(const TableView* __restrict__ tables,
                                         const UpdateArguments& update,
                                         const UpdateScratch& scratch,
                                         const SortedPosition& position, uint32_t at,
                                         uint32_t tile_end, uint32_t n, bool is_continued,
                                         int32_t row_class)
      : key(scratch.pairs.pairs.key_of(position.pair)), ref{}, table(tables) {
    const int lane = Lanes::lane();
    const bool begins = position.before != key;
    const unsigned begin_mask = Lanes::ballot(begins);
    const unsigned long_mask = Lanes::ballot(begins && position.far == key);
    const unsigned begun = begin_mask & ((2u << lane) - 1);
    const int from = 31 - __clz(static_cast<int>(begun));  // begin of the position's segment
    bool belongs = at + lane < n && key != update.no_slot &&
                   (begun == 0 ? is_continued : !(long_mask >> from & 1) && at + from < tile_end);
    if (belongs) {
      ref = gradient_ref_of(update, scratch, scratch.pairs.pairs.value_of(position.pair));
      table = &tables[ref.table];
      belongs = is_of_class(*table, row_class);
    }
    ends = belongs && position.after != key;
    mask = Lanes::ballot(belongs);
    const unsigned end_mask = Lanes::ballot(ends);
    continues = ((mask & ~end_mask) >> (kLanes - 1) & 1) != 0;
  }
};

// The row and states of the segment that ends at a position. Marks the frame as written.
struct RowAddress {
  int64_t slot;  // in the table
  char* row;
  float* state;

  __device__ __forceinline__ RowAddress(const TableView& table, uint64_t key)
      : slot(static_cast<int64_t>(key) - table.first_slot) {
    const int64_t frame = frame_to_write(table.frames, slot, true);
    row = table.rows.at(slot, frame);
    state = reinterpret_cast<float*>(table.states.at(slot, frame));
  }
};

}  // namespace torchrec_hkv::hash_table::cuda
