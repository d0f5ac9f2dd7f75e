// The scratch memory of an update. Each part is written (w) and read (r) by these kernels, in their
// order; the last may run much later than those before it:
//
//              prepare  sort  list  update
//   a half        w      r w    r      r
//   the other     .      r w    .      .
//   cub's         .      r w    .      .
//   lists         .       .     w      r
//   sums          .       .     .     r w
//
// Halves are the pairs of slot and bag that are sorted. A sort moves them from one half to the
// other and back, pass by pass, and may need scratch of its own beside both. So three spans follow
// each other in memory:
//
//   | first half | middle: scratch of the sort | second half |
//
// After the sort its scratch and one of the halves are free, and whichever half that is, both are
// one span: the lists and the sums of pieces lie there. So the middle is as long as the sort needs,
// or longer, where the lists need more than it and a half. A few words, and the bags of positions
// where values are positions, are alive all the time and stand apart.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "hash_table/cuda/pairs.cuh"
#include "hash_table/table_view.h"

namespace torchrec_hkv::hash_table::cuda {

constexpr int64_t kLongest = 64;     // positions of a segment that one tile adds up
constexpr int64_t kPieceSize = 128;  // of a longer one

struct LongSegment {
  uint32_t first;  // in the sorted order
  uint32_t length;
  uint32_t first_piece;
};

// Segments longer than kLongest, and their pieces.
struct LongSegments {
  uint32_t* number;       // of segments
  uint32_t* pieces;       // their number
  LongSegment* segments;  // in the order of their finding
  uint32_t* segment_of;   // by piece
  float* sums;            // [pieces][widest]
  int32_t widest;
};

// The 32 neighbouring positions that a warp takes, by the row classes of their tables; only where
// these differ.
struct Units {
  uint32_t* number;  // [kRowClasses]
  uint32_t* lists;   // [classes of the group][capacity]
  uint32_t capacity;
  uint32_t classes;  // of the group, a bit each

  HKV_HOST_DEVICE bool any() const { return (classes & (classes - 1)) != 0; }
#ifdef __CUDACC__
  __device__ __forceinline__ uint32_t* of(int32_t row_class) const {
    return lists + static_cast<size_t>(__popc(classes & ((1u << row_class) - 1))) * capacity;
  }
#endif
};

// What an update is, as far as its scratch depends on it.
struct UpdateSize {
  int64_t num_ids;
  int64_t num_bags;
  int64_t num_slots;
  int32_t widest;        // columns of the widest table
  uint32_t row_classes;  // of the tables, a bit each
  bool weighted;         // ids have weights
  size_t cub_sort_bytes;

  // Slots are sorted as unsigned numbers of as many bits as needed; kNoSlot, masked to those bits,
  // comes last.
  int key_bits() const;
  // Values are bags. With weights they are positions, and bags stand apart.
  bool positions() const { return weighted; }
  PairFormat format() const;
};

struct Scratch {
  SortedPairs pairs;
  uint32_t* bags;  // by position; null where values are bags
  void* words;     // these and those of the lists: zeros at first
  size_t word_bytes;
  int64_t* bad_bag;  // number, from 1, of one whose offsets can't be followed; 0: there is none
  uint32_t* unique;  // segments of one position
  uint32_t* longest_feature;  // positions of the feature with most
  uint32_t* hot_slots;        // 1: a slot has a large part of a feature's positions
  void* cub_sort;
  // Only the counts of segments and units are there before begin_lists.
  LongSegments long_segments;
  Units units;
  char* middle;

  // Places all but the lists in memory from `base` on, which is aligned to 256 bytes.
  // Returns how many bytes that takes; `base` may be null to ask for no more than that.
  size_t place(const UpdateSize& size, char* base);
  // When the pairs are sorted, whichever half they are in: places the lists in what is free then.
  void begin_lists(const UpdateSize& size);
};

}  // namespace torchrec_hkv::hash_table::cuda
