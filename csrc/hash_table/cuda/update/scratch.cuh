// The scratch memory of an update: what is in it, when, and where. Of an update's kernels, in their
// order (update.cu), each part is written (w) and read (r) by those that group the positions, and
// by those that then update rows, which may be much later:
//
//                      batch order                          everything sorted
//             marks  split  chains  sort  lists  rows    prepares  cub sorts  lists  rows
//   marks       w      r      .      .     .     .          .         .        .      .
//   heads       .      w     r w     .     r     .          .         .        .      .
//   nexts       .      w      r      .     .     .          .         .        .      .
//   digits      .      w      .     r w    .     .          .         .        .      .
//   cub's       .      .      .      .     .     .          .        r w       .      .
//   a half      .      w      r     r w    r     r          w        r w       r      r
//   the other   .      .      .     r w    .     .          .        r w       .      .
//   run lists   .      .      .      .     w     r          .         .        w      r
//   sums        .      .      .      .     .    r w         .         .        .     r w
//
// Halves are the pairs of slot and bag that are sorted; a sort moves them from one to the other and
// back, pass by pass, and needs its own scratch, digits or cub's, beside both. So three spans
// follow each other in memory:
//
//   | first half | middle: scratch of the sort | second half |
//
// The second half has the marks, and what follows in chains, until the sort begins; what marks say
// of the batch's positions is kept, a bit each. Digits and marks begin as zeros and are neighbours,
// so that they are cleared at once. After the sort its scratch and one of the halves are free, and
// whichever half that is, both are one span: the lists of runs and the sums of their pieces lie
// there. So the middle is as long as the sort needs, or longer, where runs need more than it and a
// half. A few words, the heads of chains, the bits, and the bags of positions where values are
// positions, are alive all the time and stand apart.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "hash_table/cuda/pairs.cuh"
#include "hash_table/cuda/small_sort.cuh"

namespace torchrec_hkv::hash_table::cuda {

constexpr int64_t kLongest = 128;    // run that one warp adds up
constexpr int64_t kPieceSize = 256;  // of a longer run

constexpr int kMostRanges = 32;  // see Scratch::before_hot

// Threads of a block that splits repeated positions off, few, so that it finds room beside other
// kernels; and positions that one looks at, few where there would be too few blocks else.
constexpr int kSplitThreads = 256;
constexpr int kSplitOfThread = 4;
inline int split_of_thread(int64_t num_ids) {
  return num_ids < 1 << 20 ? kSplitOfThread : kListedOfThread;
}
inline int64_t split_blocks(int64_t num_ids) {
  return listing_blocks(num_ids, split_of_thread(num_ids), kSplitThreads);
}

struct LongRun {
  uint32_t first;  // in the sorted order
  uint32_t length;
  uint32_t first_piece;
};

// Runs longer than kLongest, and their pieces.
struct LongRuns {
  uint32_t* number;  // of runs
  uint32_t* pieces;  // their number
  LongRun* runs;     // in the order of their finding
  uint32_t* run_of;  // by piece
  float* sums;       // [pieces][widest]
  int32_t widest;
};

// A run, or a piece of a long one: positions of the sorted order.
struct alignas(8) Part {
  uint32_t first;
  uint32_t length;
};

// Runs of the sorted order that one tile adds up. A run of one position takes four bytes, one of
// more positions eight: so both lists, one from each end, never meet in four bytes a position.
struct ShortRuns {
  uint32_t* number;   // of longer ones
  uint32_t* singles;  // number of those of one position
  Part* longer;
  uint32_t* last;  // where the first of the singles is said to begin, the next one's before it
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

// The positions split off by slot, as chains: a table of heads, by a hash of the slot, and for each
// position, by its place among those split off, the next one of its chain, in any order. There is
// room for the first `most` places; where there are more, chains say nothing.
struct Chains {
  static constexpr uint32_t kLongest = 16;        // that is followed
  static constexpr uint32_t kMostPositions = 8;   // of a slot that goes by its chain
  static constexpr uint32_t kTooLong = 1u << 31;  // in a head: the chain is not followed
  static_assert(kMostPositions <= kLongest);

  uint32_t* heads;  // [most], places counted from 1; 0: none. Zeros at first
  uint32_t* nexts;  // [most], the same
  uint32_t most;

#ifdef __CUDACC__
  __device__ __forceinline__ uint32_t* head_of(uint64_t slot) const {
    const uint64_t mixed = slot * 0x9e3779b97f4a7c15ull;
    return &heads[__umulhi(static_cast<uint32_t>(mixed >> 32), most)];
  }
  __device__ __forceinline__ void add(uint32_t place, uint64_t slot) const {
    if (place < most) nexts[place] = atomicExch(head_of(slot), place + 1);
  }
  // Whether the row of a slot that stands at so many positions has been updated by its chain: of so
  // many places at all.
  __device__ __forceinline__ bool has_updated(uint64_t slot, int64_t positions,
                                              uint32_t places) const {
    return places <= most && positions <= kMostPositions && (*head_of(slot) & kTooLong) == 0;
  }
#endif
};

// What an update is, as far as its scratch depends on it.
struct UpdateSize {
  int64_t num_ids;
  int64_t num_bags;
  int64_t num_slots;
  int32_t widest;         // columns of the widest table
  bool weighted;          // ids have weights
  bool batch_order;       // rows that stand alone are updated in the order of the batch
  size_t cub_sort_bytes;  // unless batch_order

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
  void* words;     // these, those of the lists, and heads of chains: zeros at first
  size_t word_bytes;
  int64_t* bad_bag;  // number, from 1, of one whose offsets can't be followed; 0: there is none
  // In batch order: how many positions are split off, and how many of these are sorted: all, or
  // none where all of them are in short chains. Null otherwise: all positions are sorted.
  uint32_t* split;
  uint32_t* sorted;
  uint32_t* longest_feature;  // positions of the feature with most, where all are sorted
  // Of each of the first kMostRanges features, where a slot that has a large part of its positions
  // is sorted behind all others (sort_by_table.cu): one more than the number of those others, or,
  // where its run is not a long one, of all. Zeros where it is not known.
  uint32_t* before_hot;
  uint32_t* hot_slots;  // 1: there is such a slot, with a long run
  uint32_t* ticket;     // of stream.cu: tasks that have been begun, but for the first ones
  Repeats repeats;
  Chains chains;
  uint32_t* repeated_positions;  // in batch order: a bit each, whether it was split off
  // Of the sort of the repeated positions (split.cu).
  SmallSort small_sort;
  BlockOrder split_order;
  char* zeros;  // of digits, order and marks
  size_t zero_bytes;
  void* cub_sort;
  // Only the counts of runs are there before begin_runs.
  ShortRuns runs;
  LongRuns long_runs;
  char* middle;

#ifdef __CUDACC__
  __device__ __forceinline__ bool is_repeated(int64_t position) const {
    return repeated_positions[position / 32] >> (position % 32) & 1;
  }
#endif
  // Places all but the lists of runs in memory from `base` on, which is aligned to 256 bytes.
  // Returns how many bytes that takes; `base` may be null to ask for no more than that.
  size_t place(const UpdateSize& size, char* base);
  // Where few positions are marked: fewer marks, unless there is one a slot.
  void mark_few(const UpdateSize& size);
  // When the pairs are sorted, whichever half they are in: places the lists in what is free then.
  void begin_runs(const UpdateSize& size);
};

}  // namespace torchrec_hkv::hash_table::cuda
