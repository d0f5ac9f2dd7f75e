// Parts of the pass over sorted keys in index_large.cu: the keys of a thread with their neighbours,
// whether a distinct id, prefix or slot begins at each key, and a scan over tiles with decoupled
// look-back (Merrill and Garland, 2016).
#pragma once

#include "tensor_train/cuda/contract/tensor_core.cuh"
#include "tensor_train/cuda/index/index.cuh"

namespace torchrec_hkv::tensor_train::cuda {

constexpr int kItems = 4;  // items per thread

// The state of a tile for its successors: two words with the tile's progress in their upper bits.
struct TileState {
  unsigned long long ids;    // state << 62 | prefixes << 31 | distinct
  unsigned long long slots;  // state << 62 | slots
};
constexpr unsigned long long kAggregate = 1ull << 62;        // the sum of this tile alone
constexpr unsigned long long kInclusivePrefix = 2ull << 62;  // the sum up to this tile
constexpr unsigned long long kValue = kAggregate - 1;

// The numbers of distinct ids, prefixes and slots that begin in a range of sorted positions.
struct BeginCounts {
  int32_t ids = 0;
  int32_t prefixes = 0;
  int32_t slots = 0;

  __device__ __forceinline__ void add(const BeginCounts& other) {
    ids += other.ids;
    prefixes += other.prefixes;
    slots += other.slots;
  }
};
// The same for few positions, with 10 bits per number.
__device__ __forceinline__ BeginCounts unpacked(uint32_t packed) {
  constexpr uint32_t kMask = (1u << 10) - 1;
  return {static_cast<int32_t>(packed & kMask), static_cast<int32_t>(packed >> 10 & kMask),
          static_cast<int32_t>(packed >> 20)};
}

__device__ __forceinline__ unsigned long long read_state(const unsigned long long* state) {
  return *const_cast<const volatile unsigned long long*>(state);
}

// Returns the sums of all earlier tiles, and publishes the tile's own sums for its successors.
// Called by one warp.
__device__ inline TileState sums_before(TileState* tiles, int64_t tile, TileState counts) {
  const int lane = threadIdx.x % 32;
  TileState before = {0, 0};
  volatile unsigned long long* ids_word = &tiles[tile].ids;
  volatile unsigned long long* slots_word = &tiles[tile].slots;
  if (tile > 0) {
    if (lane == 0) {
      *ids_word = kAggregate | counts.ids;
      *slots_word = kAggregate | counts.slots;
    }
    for (int64_t end = tile;; end -= 32) {
      const int64_t other = end - 1 - lane;
      unsigned long long ids = kInclusivePrefix;
      unsigned long long slots = kInclusivePrefix;
      if (other >= 0) {
        do {
          ids = read_state(&tiles[other].ids);
          slots = read_state(&tiles[other].slots);
        } while (ids >> 62 == 0 || ids >> 62 != slots >> 62);
      }
      // Lane 0 has the nearest tile. Adds all tiles up to the first total.
      const unsigned totals = __ballot_sync(kAllLanes, (ids & kInclusivePrefix) != 0);
      const int first = totals != 0 ? __ffs(totals) - 1 : 31;
      unsigned long long sum_ids = lane <= first ? ids & kValue : 0;
      unsigned long long sum_slots = lane <= first ? slots & kValue : 0;
#pragma unroll
      for (int step = 16; step > 0; step /= 2) {
        sum_ids += __shfl_xor_sync(kAllLanes, sum_ids, step);
        sum_slots += __shfl_xor_sync(kAllLanes, sum_slots, step);
      }
      before.ids += sum_ids;
      before.slots += sum_slots;
      if (totals != 0) break;
    }
  }
  if (lane == 0) {
    *ids_word = kInclusivePrefix | (before.ids + counts.ids);
    *slots_word = kInclusivePrefix | (before.slots + counts.slots);
  }
  return before;
}

// Loads four neighbouring values from `begin` on of an array of `n`; `missing` beyond its end.
template <typename Value>
__device__ __forceinline__ void load_items(const Value* __restrict__ from, int64_t begin, int64_t n,
                                           Value missing, Value (&values)[kItems]) {
  struct alignas(16) KeyItems {
    Value v[kItems];
  };
  if (begin + kItems <= n) {
    const KeyItems items = *reinterpret_cast<const KeyItems*>(from + begin);
#pragma unroll
    for (int k = 0; k < kItems; ++k) values[k] = items.v[k];
  } else {
#pragma unroll
    for (int k = 0; k < kItems; ++k) values[k] = begin + k < n ? from[begin + k] : missing;
  }
}

template <typename Value>
__device__ __forceinline__ void store_items(Value* to, int64_t begin, int64_t n,
                                            const Value (&values)[kItems]) {
  struct alignas(16) KeyItems {
    Value v[kItems];
  };
  if (begin + kItems <= n) {
    KeyItems items;
#pragma unroll
    for (int k = 0; k < kItems; ++k) items.v[k] = values[k];
    *reinterpret_cast<KeyItems*>(to + begin) = items;
  } else {
#pragma unroll
    for (int k = 0; k < kItems; ++k) {
      if (begin + k < n) to[begin + k] = values[k];
    }
  }
}

// The sorted keys of a thread, with their neighbours.
template <typename Key>
struct SortedKeys {
  Key keys[kItems];
  Key before[kShortRun];  // the nearest last
  Key behind[kShortRun];

  // outside: the value for keys that do not exist.
  __device__ __forceinline__ void load(const Key* sorted, int64_t begin, int64_t n, Key outside) {
    static_assert(kShortRun == 2 && kItems >= 2);
    const int lane = threadIdx.x % 32;
    load_items(sorted, begin, n, outside, keys);
#pragma unroll
    for (int i = 0; i < kShortRun; ++i) {
      before[i] = __shfl_up_sync(kAllLanes, keys[kItems - kShortRun + i], 1);
      behind[i] = __shfl_down_sync(kAllLanes, keys[i], 1);
    }
    if (lane == 0) {
#pragma unroll
      for (int i = 0; i < kShortRun; ++i) {
        const int64_t at = begin - kShortRun + i;
        before[i] = at >= 0 && at < n ? sorted[at] : outside;
      }
    }
    if (lane == 31) {
#pragma unroll
      for (int i = 0; i < kShortRun; ++i) {
        const int64_t at = begin + kItems + i;
        behind[i] = at < n ? sorted[at] : outside;
      }
    }
  }
  __device__ __forceinline__ Key at(int k) const {
    return k < 0 ? before[kShortRun + k] : k < kItems ? keys[k] : behind[k - kItems];
  }
};

// Properties of the sorted positions of a thread, as bits.
template <typename Key>
struct FirstFlags {
  unsigned ids = 0;
  unsigned prefixes = 0;
  unsigned repeats = 0;
  KeyParts<Key> parts[kItems];

  __device__ __forceinline__ FirstFlags(const IndexInput& in, const SortedKeys<Key>& sorted,
                                        Key outside) {
    const KeyParts<Key> none = {-1, 0, 0};
    const Key previous = sorted.at(-1);
    KeyParts<Key> before = previous != outside ? parts_of(in, previous) : none;
#pragma unroll
    for (int k = 0; k < kItems; ++k) {
      const Key key = sorted.at(k);
      const bool inside = key != outside;
      const bool same[4] = {sorted.at(k - 2) == key, sorted.at(k - 1) == key,
                            sorted.at(k + 1) == key, sorted.at(k + 2) == key};
      // Whether the run is longer than a short run.
      const bool many = (same[0] && same[1]) || (same[1] && same[2]) || (same[2] && same[3]);
      const bool repeat = inside && (in.splits_short ? many : same[1] || same[2]);
      const bool first = inside && !(repeat && same[1]);
      parts[k] = same[1] ? before : inside ? parts_of(in, key) : none;
      ids |= static_cast<unsigned>(first) << k;
      prefixes |= static_cast<unsigned>(first && !parts[k].same_prefix(before)) << k;
      repeats |= static_cast<unsigned>(repeat) << k;
      before = parts[k];
    }
  }
  __device__ __forceinline__ uint32_t packed() const {
    return __popc(ids) | __popc(prefixes) << 10 | __popc(ids & repeats) << 20;
  }
};

}  // namespace torchrec_hkv::tensor_train::cuda
