// The scratch memory of an update. These kernels write (w) and read (r) its parts, in this order.
// The last kernel may run much later than those before it:
//
//              prepare  sort  list  update
//   a half        w      r w    r      r
//   the other     .      r w    .      .
//   cub's         .      r w    .      .
//   lists         .       .     w      r
//   sums          .       .     .     r w
//
// Halves are two buffers of the pairs of slot and bag. Each pass of a sort moves the pairs to the
// other half, and a sort may need scratch of its own. So there are three consecutive spans in
// memory:
//
//   | first half | middle: scratch of the sort | second half |
//
// After the sort, the middle and one half are free. They are adjacent, and hold the lists and the
// sums of pieces. The middle is as long as the sort needs, or longer if the lists need more than it
// and one half. A few words, and the bags of positions if values are positions, are used all the
// time and are stored apart.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "hash_table/cuda/pairs.cuh"
#include "hash_table/table_view.h"

namespace torchrec_hkv::hash_table::cuda {

constexpr int64_t kLongest = 64;     // maximum positions of a segment that one tile sums
constexpr int64_t kPieceSize = 128;  // positions of a piece of a longer segment

struct LongSegment {
  uint32_t first;  // in the sorted order
  uint32_t length;
  uint32_t first_piece;
  uint32_t summed;  // groups of columns whose sum is complete; only with many pieces

  HKV_HOST_DEVICE uint32_t pieces() const {
    return (length + static_cast<uint32_t>(kPieceSize) - 1) / static_cast<uint32_t>(kPieceSize);
  }
};

// The pieces of a segment are divided into this number of shares, whose sums are added in a fixed
// order.
constexpr uint32_t kPieceWarps = 8;

// Segments longer than kLongest, and their pieces. Those with more than kPieceWarps pieces are
// listed backwards from the end of the array.
struct LongSegments {
  uint32_t* number;       // of segments with few pieces
  uint32_t* number_many;  // of those with many
  uint32_t* pieces;       // number of pieces
  LongSegment* segments;  // [capacity]
  uint32_t capacity;
  uint32_t* segment_of;  // [pieces] the piece's segment
  float* sums;           // [pieces][widest]
  int32_t widest;
};

// Lists the units of each row class, if the group has several. A unit: 32 neighbouring positions
// for a warp.
struct UnitLists {
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

// Properties of an update on which its scratch depends.
struct UpdateSize {
  int64_t num_ids;
  int64_t num_bags;
  int64_t num_slots;
  int32_t widest;        // columns of the widest table
  uint32_t row_classes;  // of the tables, one bit each
  bool weighted;         // ids have weights
  size_t cub_sort_bytes;
  bool orders;  // whether short segments are ordered by their bags (order_by_bag.cu)

  // Slots are sorted as unsigned numbers of as many bits as needed; kNoSlot, masked to those bits,
  // comes last.
  int key_bits() const;
  // Values are bags. With weights they are positions, and bags are stored apart.
  bool positions() const { return weighted; }
  PairFormat format() const;
};

constexpr int kBagBins = 256;  // ranges of bags by which short segments are ordered

struct UpdateScratch {
  SortedPairs pairs;
  // The pairs of the segments that are not long. If `orders`: a copy in the order of bags;
  // otherwise all of `pairs`, including the long ones.
  Pairs short_pairs;
  bool orders;
  uint32_t* number_short;  // if `orders`: number of short_pairs
  uint32_t* bag_bins;      // if `orders`, [2][kBagBins]: number of positions, and of those written
  uint32_t* bags;          // by position; null if values are bags
  void* words;             // words that are initially zero, including those of the lists
  size_t word_bytes;
  int64_t* bad_bag;           // number, from 1, of a bag with invalid offsets; 0: none
  uint32_t* unique;           // segments of one position
  uint32_t* longest_feature;  // positions of the feature with the most positions
  uint32_t* hot_slots;        // 1: a slot has a large part of a feature's positions
  void* cub_sort;
  // Before begin_lists only the counts of segments and units are valid.
  LongSegments long_segments;
  UnitLists units;
  char* middle;

#ifdef __CUDACC__
  // The bag of a pair.
  __device__ __forceinline__ uint32_t bag_of(uint32_t value) const {
    return bags != nullptr ? bags[value] : value;
  }
  // Number of short_pairs.
  __device__ __forceinline__ uint32_t short_positions(int64_t num_ids) const {
    return orders ? *number_short : static_cast<uint32_t>(num_ids);
  }
#endif
  // Places all but the lists from `base` on, which is aligned to 256 bytes. Returns the number of
  // bytes. If `base` is null, does nothing else.
  size_t lay_out(const UpdateSize& size, char* base);
  // Places the lists in free memory, after the sort has chosen the half of the pairs.
  void begin_lists(const UpdateSize& size);
};

}  // namespace torchrec_hkv::hash_table::cuda
