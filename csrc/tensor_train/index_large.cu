// The index of a large batch: keys, a radix sort, and one pass that numbers distinct ids and
// prefixes. The pass is a scan with decoupled look-back (Merrill and Garland, 2016).
#include <cub/device/device_radix_sort.cuh>

#include "common/cuda_check.h"
#include "tensor_train/index.cuh"
#include "tensor_train/tensor_core.cuh"

namespace torchrec_hkv::tensor_train::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kItems = 4;  // of a thread
constexpr int kTile = kThreads * kItems;

// What a tile has told its successors: two words, each with how far it is in its upper bits.
struct TileState {
  unsigned long long ids;    // state << 62 | prefixes << 31 | distinct
  unsigned long long slots;  // state << 62 | slots
};
constexpr unsigned long long kOwn = 1ull << 62;    // the sum of this tile alone
constexpr unsigned long long kTotal = 2ull << 62;  // the sum up to this tile
constexpr unsigned long long kValue = kOwn - 1;

template <typename Key>
struct Scratch {
  Key* keys;
  Key* sorted_keys;
  int32_t* positions;
  int32_t* sorted_positions;
  uint32_t* places;  // by position
  float* factors;
  TileState* tiles;
  uint32_t* ticket;
  void* sort;
  size_t sort_bytes;
};

int sort_bits(uint64_t num_keys) {
  int bits = 1;
  while (bits < 64 && (uint64_t{1} << bits) <= num_keys) ++bits;
  return bits;
}

int64_t tiles_of(int64_t n) { return (n + kTile - 1) / kTile; }

template <typename Key>
size_t carve(uint64_t num_keys, int64_t n, bool scaled, void* memory, Scratch<Key>* scratch) {
  Carver carver{static_cast<char*>(memory)};
  scratch->keys = carver.take<Key>(n);
  scratch->sorted_keys = carver.take<Key>(n);
  scratch->positions = carver.take<int32_t>(n);
  scratch->sorted_positions = carver.take<int32_t>(n);
  scratch->places = carver.take<uint32_t>(n);
  scratch->factors = scaled ? carver.take<float>(n) : nullptr;
  scratch->tiles = carver.take<TileState>(tiles_of(n));
  scratch->ticket = carver.take<uint32_t>(1);
  scratch->sort_bytes = 0;
  HKV_CUDA_CHECK(cub::DeviceRadixSort::SortPairs(
      nullptr, scratch->sort_bytes, scratch->keys, scratch->sorted_keys, scratch->positions,
      scratch->sorted_positions, static_cast<int>(n), 0, sort_bits(num_keys)));
  scratch->sort = carver.take<char>(static_cast<int64_t>(scratch->sort_bytes));
  return carver.used;
}

// The bags of a tile of positions in shared memory. Bags that begin in the tile are marked where
// they do, and marks are carried on.
__device__ __forceinline__ void find_bags(const Batch& batch, int64_t begin, int64_t end,
                                          int32_t (&bags)[kTile], int32_t (&warp_bags)[kWarps]) {
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
  const int64_t* const offsets = batch.offsets;
  const auto num_bags = static_cast<int32_t>(batch.num_bags());
  for (int i = thread; i < kTile; i += kThreads) bags[i] = 0;
  // The last bag that begins at `begin` or before.
  int32_t first = 0, high = num_bags;
  while (high - first > 1) {
    const int32_t step = (high - first + kThreads - 1) / kThreads;
    const int64_t at = first + static_cast<int64_t>(thread + 1) * step;
    const int passed = __syncthreads_count(at < high && offsets[at] <= begin);
    first += passed * step;
    high = min(high, first + step);
  }
  __syncthreads();
  for (int64_t base = first + 1;; base += kThreads) {
    const int64_t bag = base + thread;
    const int64_t start = bag < num_bags ? offsets[bag] : end;
    if (start > begin && start < end) {
      atomicMax(bags + (start - begin), static_cast<int32_t>(bag));
    }
    if (__syncthreads_and(start < end) == 0) break;
  }
  int4* const mine = reinterpret_cast<int4*>(bags) + thread;
  static_assert(kItems == 4);
  int4 four = *mine;
  four.y = max(four.x, four.y);
  four.z = max(four.y, four.z);
  four.w = max(four.z, four.w);
  int32_t largest = four.w;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int32_t other = __shfl_up_sync(kAllLanes, largest, step);
    if (lane >= step) largest = max(largest, other);
  }
  if (lane == 31) warp_bags[warp] = largest;
  int32_t before = __shfl_up_sync(kAllLanes, largest, 1);
  before = max(lane > 0 ? before : 0, first);
  __syncthreads();
  for (int w = 0; w < warp; ++w) before = max(before, warp_bags[w]);
  *mine =
      make_int4(max(before, four.x), max(before, four.y), max(before, four.z), max(before, four.w));
  __syncthreads();
}

template <typename Key>
__global__ void __launch_bounds__(kThreads)
    make_keys(IndexInput in, Scratch<Key> scratch, int64_t num_tiles) {
  __shared__ __align__(16) int32_t bags[kTile];
  __shared__ int32_t warp_bags[kWarps];
  enter_chain();
  const int64_t thread = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (thread < num_tiles) scratch.tiles[thread] = {0, 0};
  if (thread == 0) *scratch.ticket = 0;
  clear_on_the_way(in);
  const int64_t n = in.batch.num_ids;
  const int64_t begin = static_cast<int64_t>(blockIdx.x) * kTile;
  find_bags(in.batch, begin, min(begin + kTile, n), bags, warp_bags);
#pragma unroll
  for (int k = 0; k < kItems; ++k) {
    const int within = k * kThreads + static_cast<int>(threadIdx.x);
    const int64_t at = begin + within;
    if (at >= n) break;
    const int64_t bag = bags[within];
    const Place place = place_of(in, at, bag);
    scratch.keys[at] = static_cast<Key>(key_of(in, at, bag));
    scratch.positions[at] = static_cast<int32_t>(at);
    scratch.places[at] = place.row;
    if (scratch.factors != nullptr) scratch.factors[at] = place.factor;
  }
}

__device__ __forceinline__ unsigned long long read_state(const unsigned long long* state) {
  return *const_cast<const volatile unsigned long long*>(state);
}

// The sums of all tiles before this one, by one warp; tells the successors.
__device__ TileState sums_before(TileState* tiles, int64_t tile, TileState own) {
  const int lane = threadIdx.x % 32;
  TileState before = {0, 0};
  volatile unsigned long long* mine_ids = &tiles[tile].ids;
  volatile unsigned long long* mine_slots = &tiles[tile].slots;
  if (tile > 0) {
    if (lane == 0) {
      *mine_ids = kOwn | own.ids;
      *mine_slots = kOwn | own.slots;
    }
    for (int64_t end = tile;; end -= 32) {
      const int64_t other = end - 1 - lane;
      unsigned long long ids = kTotal;
      unsigned long long slots = kTotal;
      if (other >= 0) {
        do {
          ids = read_state(&tiles[other].ids);
          slots = read_state(&tiles[other].slots);
        } while (ids >> 62 == 0 || ids >> 62 != slots >> 62);
      }
      // Lane 0 has the nearest tile. All up to the first total count.
      const unsigned totals = __ballot_sync(kAllLanes, (ids & kTotal) != 0);
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
    *mine_ids = kTotal | (before.ids + own.ids);
    *mine_slots = kTotal | (before.slots + own.slots);
  }
  return before;
}

// Four neighbouring values of an array of `n` from `begin` on; those behind its end are `missing`.
template <typename Value>
__device__ __forceinline__ void load_items(const Value* __restrict__ from, int64_t begin, int64_t n,
                                           Value missing, Value (&values)[kItems]) {
  struct alignas(16) Items {
    Value v[kItems];
  };
  if (begin + kItems <= n) {
    const Items items = *reinterpret_cast<const Items*>(from + begin);
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
  struct alignas(16) Items {
    Value v[kItems];
  };
  if (begin + kItems <= n) {
    Items items;
#pragma unroll
    for (int k = 0; k < kItems; ++k) items.v[k] = values[k];
    *reinterpret_cast<Items*>(to + begin) = items;
  } else {
#pragma unroll
    for (int k = 0; k < kItems; ++k) {
      if (begin + k < n) to[begin + k] = values[k];
    }
  }
}

template <typename Key>
__global__ void __launch_bounds__(kThreads)
    find_distinct(IndexInput in, Index index, Scratch<Key> scratch) {
  __shared__ uint32_t ticket;
  __shared__ TileState warp_sums[kWarps];
  __shared__ TileState sums;
  enter_chain();
  if (threadIdx.x == 0) ticket = atomicAdd(scratch.ticket, 1u);
  __syncthreads();
  const int64_t tile = ticket;
  const int64_t n = in.batch.num_ids;
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  const int64_t begin = tile * kTile + threadIdx.x * kItems;
  const auto outside = static_cast<Key>(in.num_keys);

  Key keys[kItems];
  int32_t positions[kItems];
  load_items(scratch.sorted_keys, begin, n, outside, keys);
  load_items(scratch.sorted_positions, begin, n, -1, positions);
  Key previous = __shfl_up_sync(kAllLanes, keys[kItems - 1], 1);
  Key next = __shfl_down_sync(kAllLanes, keys[0], 1);
  if (lane == 0) previous = begin > 0 && begin <= n ? scratch.sorted_keys[begin - 1] : outside;
  if (lane == 31) next = begin + kItems < n ? scratch.sorted_keys[begin + kItems] : outside;
  uint32_t places[kItems];  // on their way while ids are counted
  float factors[kItems];
#pragma unroll
  for (int k = 0; k < kItems; ++k) {
    const bool exists = positions[k] >= 0;
    places[k] = exists ? scratch.places[positions[k]] : 0;
    factors[k] = exists && scratch.factors != nullptr ? scratch.factors[positions[k]] : 1.0f;
  }
  TileState mine = {0, 0};
  unsigned firsts = 0, prefix_firsts = 0, repeats = 0;
  KeyParts parts[kItems];
  KeyParts parts_before = {-1, 0, 0};
  if (previous != outside && previous != keys[0]) parts_before = parts_of(in, previous);
#pragma unroll
  for (int k = 0; k < kItems; ++k) {
    const Key before = k > 0 ? keys[k - 1] : previous;
    const Key behind = k + 1 < kItems ? keys[k + 1] : next;
    const bool inside = keys[k] != outside;
    const bool first = inside && keys[k] != before;
    if (k > 0) parts_before = parts[k - 1];
    parts[k] = first ? parts_of(in, keys[k]) : parts_before;
    const bool first_of_prefix = first && !parts[k].same_prefix(parts_before);
    const bool next_same = inside && behind == keys[k];
    firsts |= static_cast<unsigned>(first) << k;
    prefix_firsts |= static_cast<unsigned>(first_of_prefix) << k;
    repeats |= static_cast<unsigned>(inside && (!first || next_same)) << k;
    mine.ids += (first ? 1ull : 0) + (first_of_prefix ? 1ull << 31 : 0);
    mine.slots += first && next_same ? 1ull : 0;
    // An id that began with an earlier thread: the next one is compared with it.
    if (k == 0 && inside && !first) parts[k] = parts_of(in, keys[k]);
  }

  TileState before = mine;  // inclusive, first of the warp, then of the tile
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const unsigned long long ids = __shfl_up_sync(kAllLanes, before.ids, step);
    const unsigned long long slots = __shfl_up_sync(kAllLanes, before.slots, step);
    if (lane >= step) {
      before.ids += ids;
      before.slots += slots;
    }
  }
  if (lane == 31) warp_sums[warp] = before;
  __syncthreads();
  if (warp == 0) {
    TileState own = {0, 0};
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      own.ids += warp_sums[w].ids;
      own.slots += warp_sums[w].slots;
    }
    const TileState earlier = sums_before(scratch.tiles, tile, own);
    if (lane == 0) {
      sums = earlier;
      if ((tile + 1) * kTile >= n) {
        const unsigned long long ids = earlier.ids + own.ids;
        write_counts(in, index, static_cast<int32_t>(ids & 0x7fffffffu),
                     static_cast<int32_t>(ids >> 31),
                     static_cast<int32_t>(earlier.slots + own.slots));
      }
    }
  }
  __syncthreads();
  before.ids += sums.ids - mine.ids;
  before.slots += sums.slots - mine.slots;
  for (int w = 0; w < warp; ++w) {
    before.ids += warp_sums[w].ids;
    before.slots += warp_sums[w].slots;
  }

  int32_t distinct = static_cast<int32_t>(before.ids & 0x7fffffffu) - 1;
  int32_t prefix = static_cast<int32_t>(before.ids >> 31) - 1;
  int32_t slot = static_cast<int32_t>(before.slots) - 1;
  int32_t slots[kItems];
#pragma unroll
  for (int k = 0; k < kItems; ++k) {
    if (keys[k] == outside) {
      slots[k] = kOutside;
      if (positions[k] >= 0) index.distinct_of[positions[k]] = -1;
      continue;
    }
    Sorted s = {};
    s.first = firsts >> k & 1;
    s.first_of_prefix = prefix_firsts >> k & 1;
    s.repeats = repeats >> k & 1;
    distinct += s.first;
    prefix += s.first_of_prefix;
    slot += s.first && s.repeats;
    s.distinct = distinct;
    s.prefix = prefix;
    s.slot = slot;
    slots[k] = s.repeats ? slot : kNoSlot;
    index.distinct_of[positions[k]] = distinct;
    if (s.first) write_distinct(in, index, s, parts[k], places[k], factors[k]);
  }
  store_items(index.places, begin, n, places);
  store_items(index.slots, begin, n, slots);
  if (index.place_factors != nullptr) store_items(index.place_factors, begin, n, factors);
}

template <typename Key>
void run(const IndexInput& in, const Index& index, void* memory, cudaStream_t stream) {
  const int64_t n = in.batch.num_ids;
  Scratch<Key> scratch;
  carve<Key>(in.num_keys, n, is_scaled(in.batch), memory, &scratch);
  const int64_t num_tiles = tiles_of(n);
  const auto blocks = static_cast<unsigned>((n + kTile - 1) / kTile);
  launch_chained(make_keys<Key>, {dim3(blocks), kThreads}, stream, in, scratch, num_tiles);
  HKV_CUDA_CHECK(cub::DeviceRadixSort::SortPairs(
      scratch.sort, scratch.sort_bytes, scratch.keys, scratch.sorted_keys, scratch.positions,
      scratch.sorted_positions, static_cast<int>(n), 0, sort_bits(in.num_keys), stream));
  launch_chained(find_distinct<Key>, {dim3(blocks), kThreads}, stream, in, index, scratch);
}

bool narrow(uint64_t num_keys) { return num_keys <= 0xffffffffull; }

}  // namespace

size_t large_scratch_bytes(const Plan& plan, const Batch& batch) {
  const bool scaled = is_scaled(batch);
  if (narrow(plan.num_keys)) {
    Scratch<uint32_t> scratch;
    return carve<uint32_t>(plan.num_keys, batch.num_ids, scaled, nullptr, &scratch);
  }
  Scratch<uint64_t> scratch;
  return carve<uint64_t>(plan.num_keys, batch.num_ids, scaled, nullptr, &scratch);
}

void index_large(const IndexInput& in, const Index& index, void* scratch, cudaStream_t stream) {
  if (narrow(in.num_keys)) {
    run<uint32_t>(in, index, scratch, stream);
  } else {
    run<uint64_t>(in, index, scratch, stream);
  }
}

}  // namespace torchrec_hkv::tensor_train::cuda
