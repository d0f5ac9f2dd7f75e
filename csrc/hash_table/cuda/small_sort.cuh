// Lists and sorts elements whose number only the device knows. A pass over a batch lists elements
// in the order of the batch, and a stable radix sort, one kernel for each digit, sorts them. Blocks
// without elements return at once.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "common/scan.cuh"
#include "hash_table/cuda/bucket.cuh"
#include "hash_table/cuda/pairs.cuh"

namespace torchrec_hkv::hash_table::cuda {

// Memory and shape of a sort.
struct SmallSort {
  static constexpr int kDigitBits = 9;
  static constexpr int kDigits = 1 << kDigitBits;
  static constexpr uint32_t kChunk = 1024;  // keys that a block ranks at once

  // [passes][tiles][kDigits] number of a tile's keys with a digit: 16-bit counts, two in a word.
  // Initially zeros.
  uint32_t* digits;
  int32_t passes;
  uint32_t tile;   // keys of a tile, whole chunks
  uint32_t tiles;  // at most

  // For at most `most` keys of this number of bits. The caller sets `digits`.
  static SmallSort of(int64_t most, int bits);
  size_t digit_bytes() const { return sizeof(uint16_t) * passes * tiles * kDigits; }

  __device__ static __forceinline__ uint32_t digit_of(uint64_t key, int pass) {
    return static_cast<uint32_t>(key >> (pass * kDigitBits)) & (kDigits - 1);
  }
  // The counts of a tile's digits.
  __device__ __forceinline__ const uint16_t* counts(int pass, uint32_t of_tile) const {
    return reinterpret_cast<const uint16_t*>(digits) + first_count(pass, of_tile);
  }
  // Counts a key for a pass. Called by the thread that writes the key to the order that the pass
  // reads.
  __device__ __forceinline__ void count(int pass, uint32_t place, uint64_t key) const {
    const size_t at = first_count(pass, place / tile) + digit_of(key, pass);
    atomicAdd(&digits[at / 2], 1u << (at % 2 * 16));
  }

 private:
  __device__ __forceinline__ size_t first_count(int pass, uint32_t of_tile) const {
    return (static_cast<size_t>(pass) * tiles + of_tile) * kDigits;
  }
};

// Sorts the first *number pairs, whose keys the caller has counted for the first pass. The number
// of passes determines the half that holds the result. max_blocks: of a pass; fewer if few pairs
// are expected, because idle blocks delay concurrent kernels.
void sort_small(SortedPairs* pairs, const uint32_t* number, const SmallSort& sort,
                cudaStream_t stream, unsigned max_blocks = ~0u);

// State of a listing, through which a block learns what earlier blocks have listed. Initially
// zeros.
struct LookbackState {
  unsigned long long* states;  // [blocks]
  uint32_t* ticket;
};

constexpr int kListThreads = 512;
constexpr int kListedOfThread = 16;  // positions, unless a kernel has fewer

inline int64_t listing_blocks(int64_t n, int of_thread = kListedOfThread,
                              int threads = kListThreads) {
  const int64_t listed = int64_t{threads} * of_thread;
  return (n + listed - 1) / listed;
}

// A block publishes the number of its elements, then that of all blocks up to itself.
constexpr unsigned long long kAggregate = 1ull << 32;        // its own
constexpr unsigned long long kInclusivePrefix = 1ull << 33;  // of the block and all earlier blocks
constexpr unsigned long long kValueMask = kAggregate - 1;

// The number of elements that all earlier blocks have listed. Called by all lanes of one warp.
__device__ __forceinline__ uint32_t look_back(unsigned long long* states, int64_t block,
                                              uint32_t aggregate) {
  const int lane = threadIdx.x % kWarp;
  uint32_t before = 0;
  if (block > 0) {
    if (lane == 0) atomicExch(&states[block], kAggregate | aggregate);
    for (int64_t first = block - 1;; first -= kWarp) {
      const int64_t at = first - lane;
      unsigned long long state = kInclusivePrefix;  // before the first block there is nothing
      while (at >= 0 && (state = load_l2(&states[at])) == 0) {
      }
      const unsigned ends = __ballot_sync(kAllLanes, (state & kInclusivePrefix) != 0);
      const int last = ends != 0 ? __ffs(static_cast<int>(ends)) - 1 : kWarp - 1;
      before += __reduce_add_sync(kAllLanes,
                                  lane <= last ? static_cast<uint32_t>(state & kValueMask) : 0u);
      if (ends != 0) break;
    }
  }
  if (lane == 0) atomicExch(&states[block], kInclusivePrefix | (before + aggregate));
  return before;
}

// The number of a block in the listing. Blocks are numbered in the order in which they begin, so
// that earlier blocks are running. Called by all threads of a block.
__device__ __forceinline__ int64_t take_block(const LookbackState& order) {
  __shared__ uint32_t number;
  if (threadIdx.x == 0) number = atomicAdd(order.ticket, 1u);
  __syncthreads();
  return number;
}

// list_in_order's default `note`.
struct NoOpNote {
  __device__ __forceinline__ void operator()(int64_t, unsigned) const {}
};

// Lists the positions below n for which wanted(position) is true, in ascending order. Any of the
// block's kListers threads calls emit(place, position) for each; one thread of the last block calls
// finish(total number). wanted is called once for each position. One thread calls note(position,
// bits) for each 32 positions that begin at `position`: bit i says whether position + i is listed.
template <int kOfThread = kListedOfThread, int kListers = kListThreads, typename Wanted,
          typename Emit, typename Finish, typename Note = NoOpNote>
__device__ __forceinline__ void list_in_order(int64_t n, int64_t block, const LookbackState& order,
                                              const Wanted& wanted, const Emit& emit,
                                              const Finish& finish, const Note& note = Note()) {
  constexpr int kWarps = kListers / kWarp;
  constexpr int kListed = kListers * kOfThread;    // positions of a block
  __shared__ uint32_t firsts[kOfThread * kWarps];  // by round and warp
  __shared__ uint16_t chosen[kListed];             // relative to the block's first
  __shared__ uint32_t block_first;
  using Scan = BlockScan<uint32_t, kListers>;
  __shared__ typename Scan::Storage scan;
  static_assert(kOfThread * kWarps <= kListers && kListed <= 1 << 16);
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const int64_t begin = block * kListed;
  unsigned lists[kOfThread];
#pragma unroll
  for (int k = 0; k < kOfThread; ++k) {
    const int64_t at = begin + k * kListers + threadIdx.x;
    lists[k] = __ballot_sync(kAllLanes, at < n && wanted(at));
    if (lane == 0) {
      firsts[k * kWarps + warp] = __popc(lists[k]);
      if (at < n) note(at, lists[k]);
    }
  }
  __syncthreads();
  const bool counts = threadIdx.x < kOfThread * kWarps;
  uint32_t aggregate;
  const uint32_t first = Scan::before(scan, counts ? firsts[threadIdx.x] : 0u, aggregate);
  if (counts) firsts[threadIdx.x] = first;
  __syncthreads();
#pragma unroll
  for (int k = 0; k < kOfThread; ++k) {
    if (lists[k] >> lane & 1) {
      const int place = __popc(lists[k] & ((1u << lane) - 1));
      chosen[firsts[k * kWarps + warp] + place] = static_cast<uint16_t>(k * kListers + threadIdx.x);
    }
  }
  if (warp == 0) {
    const uint32_t before = look_back(order.states, block, aggregate);
    if (lane == 0) {
      block_first = before;
      if (begin + kListed >= n) finish(before + aggregate);
    }
  }
  __syncthreads();
  for (uint32_t i = threadIdx.x; i < aggregate; i += kListers)
    emit(block_first + i, begin + chosen[i]);
}

}  // namespace torchrec_hkv::hash_table::cuda
