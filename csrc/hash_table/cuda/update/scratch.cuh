// The scratch memory of an update. Each part is written (w) and read (r) by these kernels, in their
// order; those that update rows may run much later than those that group the positions:
//
//                      some positions sorted                all positions sorted
//              marks  prepares  sorts  lists  rows     prepares  sorts  lists  rows
//   marks        w       r        .      .     .           .       .      .     .
//   digits       .       w       r w     .     .           .       .      .     .
//   cub's        .       .        .      .     .           .      r w     .     .
//   a half       .       w       r w     r     r           w      r w     r     r
//   the other    .       .       r w     .     .           .      r w     .     .
//   lists        .       .        .      w     r           .       .      w     r
//   sums         .       .        .      .    r w          .       .      .    r w
//
// Halves are the pairs of slot and bag that are sorted. A sort moves them from one half to the other
// and back, pass by pass, and needs its own scratch, digits or cub's, beside both. So three spans
// follow each other in memory:
//
//   | first half | middle: scratch of the sort | second half |
//
// The second half has the marks until the sort begins. Digits and marks begin as zeros and are
// neighbours, so that they are cleared at once. After the sort its scratch and one of the halves are
// free, and whichever half that is, both are one span: the lists and the sums of pieces lie there.
// So the middle is as long as the sort needs, or longer, where the lists need more than it and a
// half. A few words, and the bags of positions where values are positions, are alive all the time
// and stand apart.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "hash_table/cuda/pairs.cuh"
#include "hash_table/cuda/bucket.cuh"
#include "hash_table/cuda/small_sort.cuh"
#include "hash_table/table_view.h"

namespace torchrec_hkv::hash_table::cuda {

constexpr int64_t kLongest = 64;      // positions of a segment that one tile adds up
constexpr int64_t kPieceSize = 128;  // of a longer one

// Positions of a block that prepares the pairs.
constexpr int kPreparedOfThread = 8;
constexpr int kPrepared = kThreads * kPreparedOfThread;
inline int64_t prepare_blocks(int64_t num_ids) { return (num_ids + kPrepared - 1) / kPrepared; }

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
  uint32_t* number;   // [kRowClasses]
  uint32_t* lists;    // [classes of the group][capacity]
  uint32_t capacity;
  uint32_t classes;   // of the group, a bit each

  HKV_HOST_DEVICE bool any() const { return (classes & (classes - 1)) != 0; }
#ifdef __CUDACC__
  __device__ __forceinline__ uint32_t* of(int32_t row_class) const {
    return lists + static_cast<size_t>(__popc(classes & ((1u << row_class) - 1))) * capacity;
  }
#endif
};

// Which slots of a batch stand at several positions: a mark a slot, or a mark for several slots
// where there are too many, which then look as if they were repeated. Both bits of a mark are in
// one word, so that setting the first one, and knowing whether it was set, is one access.
struct Repeats {
  static constexpr uint32_t kOfWord = 16;
  static constexpr uint32_t kSeen = 1;   // at one position
  static constexpr uint32_t kTwice = 2;  // at another, too

  uint32_t* marks;  // [words()], kOfWord marks each
  uint32_t number;  // of marks
  bool exact;       // a mark a slot

  size_t words() const { return (static_cast<size_t>(number) + kOfWord - 1) / kOfWord; }
#ifdef __CUDACC__
  __device__ __forceinline__ uint32_t mark_of(int64_t slot) const {
    if (exact) return static_cast<uint32_t>(slot);
    const uint64_t mixed = static_cast<uint64_t>(slot) * 0x9e3779b97f4a7c15ull;
    return __umulhi(static_cast<uint32_t>(mixed >> 32), number);
  }
  __device__ __forceinline__ bool repeated(int64_t slot) const {
    const uint32_t mark = mark_of(slot);
    return marks[mark / kOfWord] >> (mark % kOfWord * 2) & kTwice;
  }
#endif
};

// What an update is, as far as its scratch depends on it.
struct UpdateSize {
  int64_t num_ids;
  int64_t num_bags;
  int64_t num_slots;
  int32_t widest;         // columns of the widest table
  uint32_t row_classes;   // of the tables, a bit each
  bool weighted;          // ids have weights
  bool sorts_some;        // unique slots keep the order of the batch
  size_t cub_sort_bytes;  // unless sorts_some

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
  uint32_t* repeated;         // where some positions are sorted: their number
  uint32_t* unique;           // segments of one position
  uint32_t* longest_feature;  // positions of the feature with most, where all are sorted
  uint32_t* hot_slots;        // 1: a slot has a large part of a feature's positions
  Repeats repeats;
  // Of the sort of the repeated positions (prepare.cu).
  SmallSort small_sort;
  BlockOrder block_order;
  char* zeros;  // of digits, order and marks
  size_t zero_bytes;
  void* cub_sort;
  // Only the counts of segments and units are there before begin_lists.
  LongSegments long_segments;
  Units units;
  char* middle;

  // Places all but the lists in memory from `base` on, which is aligned to 256 bytes.
  // Returns how many bytes that takes; `base` may be null to ask for no more than that.
  size_t place(const UpdateSize& size, char* base);
  // Where few positions are marked: fewer marks, unless there is one a slot.
  void mark_few(const UpdateSize& size);
  // When the pairs are sorted, whichever half they are in: places the lists in what is free then.
  void begin_lists(const UpdateSize& size);
};

}  // namespace torchrec_hkv::hash_table::cuda
