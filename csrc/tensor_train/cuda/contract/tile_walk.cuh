// Walks through the tiles of a share of the sorted prefixes. A tile has prefixes of one middle
// slice, one per warp.
//
// Warps of a tile wait for each other, so its prefixes should have similar numbers of ids. The
// prefixes of one middle slice are therefore sorted by their number of ids, most first.
#pragma once

#include "tensor_train/cuda/contract/prefetched_ids.cuh"
#include "tensor_train/cuda/contract/tile_operands.cuh"

namespace torchrec_hkv::tensor_train::cuda {

// Returns, to all lanes of a warp, the number of prefixes from `first` on, out of `count`, with the
// same table and middle slice.
__device__ __forceinline__ int run_length(const int4* prefixes, int first, int count) {
  const int at = first + threadIdx.x % 32;
  const bool same =
      at < count && prefixes[at].y == prefixes[first].y && prefixes[at].z == prefixes[first].z;
  return __ffs(~__ballot_sync(kAllLanes, same)) - 1;
}

// A part of the sorted prefixes in shared memory.
struct PrefixList {
  static constexpr int kMax = 128;
  static constexpr int kWarps = kMax / 32;
  int4 items[kMax];  // like Index::prefixes
  union {
    int32_t ends[kMax];               // ends of their distinct ids
    alignas(16) uint32_t keys[kMax];  // sort keys, during the sort
  };
  unsigned starts[kWarps];  // begins of middle slices
  int32_t first, count;     // first prefix and length of the list
  int32_t end;              // end of the share
  bool ordered;

  // Loads prefixes from `from` on, as many as fit. Called by a group of threads, which `wait`
  // synchronises, after they have used the previous list. by_ids: whether to sort the prefixes of a
  // middle slice by their number of ids.
  template <typename Wait>
  __device__ __forceinline__ void load(const int4* prefixes, int from, int to, int thread,
                                       bool by_ids, const Wait& wait) {
    const int capacity = min(kMax, to - from);
    if (thread == 0) {
      first = from;
      count = capacity;
      end = to;
      ordered = by_ids;
    }
    const bool is_loader = thread < capacity;
    int4 prefix = make_int4(0, 0, 0, 0);
    int32_t behind = 0;
    bool begins = false;
    if (is_loader) {
      prefix = prefixes[from + thread];
      behind = prefixes[from + thread + 1].x;
      if (by_ids && thread > 0) {
        const int4 before = prefixes[from + thread - 1];
        begins = before.y != prefix.y || before.z != prefix.z;
      }
    }
    int place = thread;
    if (by_ids) {
      const int warp = thread / 32, lane = thread % 32;
      const unsigned of_warp = __ballot_sync(kAllLanes, begins);
      if (warp < kWarps && lane == 0) starts[warp] = of_warp;
      wait();
      constexpr uint32_t kMaxIds = (1u << 16) - 1;
      uint32_t key = 0xffffffffu;
      if (is_loader) {
        int run = __popc(of_warp & (2u << lane) - 1);
        for (int w = 0; w < warp; ++w) run += __popc(starts[w]);
        const uint32_t ids = min(static_cast<uint32_t>(behind - prefix.x), kMaxIds);
        static_assert(kMax <= 256);
        key =
            static_cast<uint32_t>(run) << 24 | (kMaxIds - ids) << 8 | static_cast<uint32_t>(thread);
      }
      if (thread < kMax) keys[thread] = key;
      wait();
      place = 0;
      if (is_loader) {
#pragma unroll 4
        for (int i = 0; i < capacity; i += 4) {
          const uint4 four = *reinterpret_cast<const uint4*>(keys + i);
          place += (four.x < key) + (four.y < key) + (four.z < key) + (four.w < key);
        }
      }
      wait();
    }
    if (is_loader) {
      items[place] = prefix;
      ends[place] = behind;
    }
    wait();
  }
};

// The walk of one group of threads, which `wait` synchronises. The heads and ids of the next tile
// are loaded during the current tile.
template <typename Config>
struct TileWalk {
  const TileInput& in;
  const BlockTask<Config>& task;
  PrefixList& list;
  NextIds<Config::kWarps>& next_ids;
  int thread;
  int at = 0, run = 0;  // begin and length of the tile in the list
  HeadLoad<Config> head_load = {};

  __device__ __forceinline__ const int4* prefixes() const { return list.items + at; }
  __device__ __forceinline__ int warp() const { return thread / 32; }
  __device__ __forceinline__ bool has_prefix() const { return warp() < run; }
  // The ids of this warp's prefix; empty if it has no prefix.
  __device__ __forceinline__ int begin() const { return has_prefix() ? prefixes()[warp()].x : 0; }
  __device__ __forceinline__ int stop() const { return has_prefix() ? list.ends[at + warp()] : 0; }

  // number: number of the table whose view is loaded; heads of other tables are not read.
  __device__ __forceinline__ void read_heads() { head_load.read(thread, task, prefixes(), run); }
  __device__ __forceinline__ void read_tile(int number) {
    run = run_length(list.items, at, min(list.count, at + Config::kPrefixes));
    if (prefixes()[0].y == number) read_heads();
    if (has_prefix()) next_ids.start(in, warp(), begin(), stop());
  }
  // Loads the prefixes [first, end) and their first tile, which is empty if there are none.
  template <typename Wait>
  __device__ __forceinline__ void start(int first, int end, bool ordered, int number,
                                        const Wait& wait) {
    at = run = 0;
    if (first >= end) return;
    list.load(in.prefixes, first, end, thread, ordered, wait);
    read_tile(number);
  }
  // Advances to the next tile of the list, if there is one. Otherwise sets the run to 0; `refill`
  // then continues after the data of this tile's prefixes has been read.
  __device__ __forceinline__ void move_on(int number) {
    at += run;
    run = 0;
    if (at < list.count) read_tile(number);
  }
  template <typename Wait>
  __device__ __forceinline__ void refill(int number, const Wait& wait) {
    if (run > 0) return;
    wait();
    const int first = list.first + list.count, end = list.end;
    const bool ordered = list.ordered;
    wait();
    start(first, end, ordered, number, wait);
  }
};

// Whether prefixes have so few ids that their order does not matter.
__device__ __forceinline__ bool few_a_prefix(const IndexCounts& counts) {
  return counts.distinct <= 2 * int64_t{counts.prefixes};
}

}  // namespace torchrec_hkv::tensor_train::cuda
