// The index of a large batch: keys, a radix sort, and one pass that numbers distinct ids and
// prefixes (sorted_keys.cuh).
#include <cub/device/device_radix_sort.cuh>

#include "common/cuda_check.h"
#include "common/scan.cuh"
#include "tensor_train/cuda/contract/tensor_core.cuh"
#include "tensor_train/cuda/index/index.cuh"
#include "tensor_train/cuda/index/radix_sort.cuh"
#include "tensor_train/cuda/index/sorted_keys.cuh"

namespace torchrec_hkv::tensor_train::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kTile = kThreads * kItems;

// Blocks per multiprocessor; keys of 32 bits leave registers for more blocks.
template <typename Key>
constexpr int kFindBlocks = sizeof(Key) == 4 ? 4 : 3;

// Keys of 32 bits are sorted by radix_sort.cu.
template <typename Key>
constexpr bool kOwnSort = sizeof(Key) == 4;

template <typename Key>
struct LargeIndexScratch {
  Key* keys;
  Key* sorted_keys;
  int32_t* positions;  // null if not needed
  int32_t* sorted_positions;
  uint32_t* places;  // by position
  float* factors;
  TileState* tiles;
  uint32_t* ticket;
  RadixSort sort;
  void* library_sort;
  size_t library_bytes;
};

int sort_bits(uint64_t num_keys) {
  int bits = 1;
  while (bits < 64 && (uint64_t{1} << bits) <= num_keys) ++bits;
  return bits;
}

int64_t tiles_of(int64_t n) { return (n + kTile - 1) / kTile; }

template <typename Key>
size_t allocate(uint64_t num_keys, int64_t n, bool scaled, void* memory,
                LargeIndexScratch<Key>* scratch) {
  BufferAllocator allocator{static_cast<char*>(memory)};
  scratch->places = allocator.take<uint32_t>(n);
  scratch->factors = scaled ? allocator.take<float>(n) : nullptr;
  scratch->tiles = allocator.take<TileState>(tiles_of(n));
  scratch->ticket = allocator.take<uint32_t>(1);
  if constexpr (kOwnSort<Key>) {
    scratch->sort = allocate_radix_sort(allocator, n, sort_bits(num_keys));
    const int last = scratch->sort.last();
    scratch->keys = scratch->sort.keys[0];
    scratch->sorted_keys = scratch->sort.keys[last];
    scratch->positions = nullptr;
    scratch->sorted_positions = scratch->sort.positions[last];
  } else {
    scratch->keys = allocator.take<Key>(n);
    scratch->sorted_keys = allocator.take<Key>(n);
    scratch->positions = allocator.take<int32_t>(n);
    scratch->sorted_positions = allocator.take<int32_t>(n);
    scratch->library_bytes = 0;
    HKV_CUDA_CHECK(cub::DeviceRadixSort::SortPairs(
        nullptr, scratch->library_bytes, scratch->keys, scratch->sorted_keys, scratch->positions,
        scratch->sorted_positions, static_cast<int>(n), 0, sort_bits(num_keys)));
    scratch->library_sort = allocator.take<char>(static_cast<int64_t>(scratch->library_bytes));
  }
  return allocator.used;
}

// Finds the bags of a tile of positions, in shared memory: marks the begins of bags in the tile,
// and propagates the marks.
__device__ __forceinline__ void find_bags(const BatchCuda& batch, int64_t begin, int64_t end,
                                          int32_t (&bags)[kTile], int32_t (&warp_bags)[kWarps]) {
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
  const int64_t* const offsets = batch.offsets;
  const auto num_bags = static_cast<int32_t>(batch.num_bags());
  for (int i = thread; i < kTile; i += kThreads) bags[i] = 0;
  // Finds the last bag that begins at or before `begin`.
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
  int4* const thread_bags = reinterpret_cast<int4*>(bags) + thread;
  static_assert(kItems == 4);
  int4 four = *thread_bags;
  four.y = max(four.x, four.y);
  four.z = max(four.y, four.z);
  four.w = max(four.z, four.w);
  int32_t largest = four.w;
  largest = inclusive_scan(largest, Max());
  if (lane == 31) warp_bags[warp] = largest;
  int32_t before = __shfl_up_sync(kAllLanes, largest, 1);
  before = max(lane > 0 ? before : 0, first);
  __syncthreads();
  for (int w = 0; w < warp; ++w) before = max(before, warp_bags[w]);
  *thread_bags =
      make_int4(max(before, four.x), max(before, four.y), max(before, four.z), max(before, four.w));
  __syncthreads();
}

template <typename Key>
__global__ void __launch_bounds__(kThreads)
    make_keys(IndexInput in, LargeIndexScratch<Key> scratch, int64_t num_tiles) {
  __shared__ __align__(16) int32_t bags[kTile];
  __shared__ int32_t warp_bags[kWarps];
  __shared__ uint32_t digits[kOwnSort<Key> ? kMaxPasses * kRadix : 1];
  if constexpr (kOwnSort<Key>) {
    for (int i = threadIdx.x; i < kMaxPasses * kRadix; i += kThreads) digits[i] = 0;
  }
  begin_dependent_kernel();
  const int64_t thread = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (thread < num_tiles) scratch.tiles[thread] = {0, 0};
  if (thread == 0) *scratch.ticket = 0;
  if constexpr (kOwnSort<Key>) {
    const int64_t threads = static_cast<int64_t>(gridDim.x) * kThreads;
    for (int64_t i = thread; i < scratch.sort.num_states(); i += threads) {
      scratch.sort.states[i] = 0;
    }
  }
  clear_on_the_way(in);
  const int64_t n = in.batch.num_ids;
  const int64_t begin = static_cast<int64_t>(blockIdx.x) * kTile;
  int64_t ids[kItems];  // loaded while bags are found
#pragma unroll
  for (int k = 0; k < kItems; ++k) {
    const int64_t at = begin + k * kThreads + threadIdx.x;
    ids[k] = at < n ? in.batch.ids[at] : 0;
  }
  find_bags(in.batch, begin, min(begin + kTile, n), bags, warp_bags);
#pragma unroll
  for (int k = 0; k < kItems; ++k) {
    const int within = k * kThreads + static_cast<int>(threadIdx.x);
    const int64_t at = begin + within;
    if (at >= n) break;
    const int64_t bag = bags[within];
    const RowPosition place = place_of(in, at, bag);
    const auto key = static_cast<Key>(key_of(in, ids[k], bag));
    scratch.keys[at] = key;
    if constexpr (kOwnSort<Key>) {
      for (int pass = 0; pass < scratch.sort.passes; ++pass) {
        atomicAdd(digits + pass * kRadix + (key >> 8 * pass) % kRadix, 1u);
      }
    } else {
      scratch.positions[at] = static_cast<int32_t>(at);
    }
    scratch.places[at] = place.row;
    if (scratch.factors != nullptr) scratch.factors[at] = place.factor;
  }
  if constexpr (kOwnSort<Key>) {
    __syncthreads();
    for (int i = threadIdx.x; i < scratch.sort.passes * kRadix; i += kThreads) {
      if (digits[i] != 0) atomicAdd(scratch.sort.counts + i, digits[i]);
    }
  }
}

template <typename Key>
__global__ void __launch_bounds__(kThreads, kFindBlocks<Key>)
    find_distinct(IndexInput in, Index index, LargeIndexScratch<Key> scratch) {
  __shared__ uint32_t ticket;
  __shared__ uint32_t of_warps[kWarps];
  __shared__ BeginCounts earlier;  // counts of earlier tiles
  // Collects the distinct ids of each warp, for contiguous writes to memory.
  __shared__ int32_t lasts[kWarps][32 * kItems];
  __shared__ uint32_t sources[kWarps][32 * kItems];
  begin_dependent_kernel();
  if (threadIdx.x == 0) ticket = atomicAdd(scratch.ticket, 1u);
  __syncthreads();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int64_t tile = ticket;
  const int64_t n = in.batch.num_ids;
  const int64_t begin = tile * kTile + threadIdx.x * kItems;
  const auto outside = static_cast<Key>(in.num_keys);

  int32_t positions[kItems];
  load_items(scratch.sorted_positions, begin, n, -1, positions);
  SortedKeys<Key> sorted;
  sorted.load(scratch.sorted_keys, begin, n, outside);
  uint32_t places[kItems];  // loaded while ids are counted
  float factors[kItems];
#pragma unroll
  for (int k = 0; k < kItems; ++k) {
    const bool exists = positions[k] >= 0;
    places[k] = exists ? scratch.places[positions[k]] : 0;
    factors[k] = exists && scratch.factors != nullptr ? scratch.factors[positions[k]] : 1.0f;
  }
  const FirstFlags<Key> firsts(in, sorted, outside);
  const uint32_t packed_firsts = firsts.packed();
  const uint32_t sum = inclusive_scan(packed_firsts);
  if (lane == 31) of_warps[warp] = sum;
  __syncthreads();
  if (warp == 0) {
    BeginCounts block_counts;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) block_counts.add(unpacked(of_warps[w]));
    const TileState before = sums_before(
        scratch.tiles, tile,
        {static_cast<unsigned long long>(block_counts.prefixes) << 31 | block_counts.ids,
         static_cast<unsigned long long>(block_counts.slots)});
    if (lane == 0) {
      earlier.ids = static_cast<int32_t>(before.ids & 0x7fffffffu);
      earlier.prefixes = static_cast<int32_t>(before.ids >> 31);
      earlier.slots = static_cast<int32_t>(before.slots);
      if ((tile + 1) * kTile >= n) {
        write_counts(in, index, earlier.ids + block_counts.ids,
                     earlier.prefixes + block_counts.prefixes, earlier.slots + block_counts.slots);
      }
    }
  }
  __syncthreads();
  BeginCounts before = unpacked(sum - packed_firsts);
  before.add(earlier);
  for (int w = 0; w < warp; ++w) before.add(unpacked(of_warps[w]));

  int32_t distinct = before.ids - 1;
  const int32_t first_of_warp = __shfl_sync(kAllLanes, before.ids, 0);
  int32_t prefix = before.prefixes - 1;
  int32_t slot = before.slots - 1;
  int32_t slots[kItems];
#pragma unroll
  for (int k = 0; k < kItems; ++k) {
    if (sorted.keys[k] == outside) {
      slots[k] = kOutside;
      if (positions[k] >= 0) index.distinct_of[positions[k]] = -1;
      continue;
    }
    SortedEntry s = {};
    s.first = firsts.ids >> k & 1;
    s.first_of_prefix = firsts.prefixes >> k & 1;
    s.repeats = firsts.repeats >> k & 1;
    distinct += s.first;
    prefix += s.first_of_prefix;
    slot += s.first && s.repeats;
    s.distinct = distinct;
    s.prefix = prefix;
    s.slot = slot;
    slots[k] = s.repeats ? slot : kNoSlot;
    index.distinct_of[positions[k]] = distinct;
    if (!s.first) continue;
    lasts[warp][distinct - first_of_warp] = static_cast<int32_t>(firsts.parts[k].last);
    sources[warp][distinct - first_of_warp] = source_of(s, places[k]);
    write_first(in, index, s, firsts.parts[k], factors[k]);
  }
  __syncwarp();
  const int32_t of_warp = __shfl_sync(kAllLanes, distinct, 31) + 1 - first_of_warp;
  for (int i = lane; i < of_warp; i += 32) {
    index.lasts[first_of_warp + i] = lasts[warp][i];
    index.sources[first_of_warp + i] = sources[warp][i];
  }
  store_items(index.places, begin, n, places);
  store_items(index.slots, begin, n, slots);
  if (index.place_factors != nullptr) store_items(index.place_factors, begin, n, factors);
}

template <typename Key>
void run(const IndexInput& in, const Index& index, void* memory, cudaStream_t stream) {
  const int64_t n = in.batch.num_ids;
  LargeIndexScratch<Key> scratch;
  allocate<Key>(in.num_keys, n, is_scaled(in.batch), memory, &scratch);
  const int64_t num_tiles = tiles_of(n);
  const auto blocks = static_cast<unsigned>((n + kTile - 1) / kTile);
  if constexpr (kOwnSort<Key>) begin_radix_sort(scratch.sort, stream);
  launch_dependent(make_keys<Key>, {dim3(blocks), kThreads}, stream, in, scratch, num_tiles);
  if constexpr (kOwnSort<Key>) {
    radix_sort(scratch.sort, n, stream);
  } else {
    HKV_CUDA_CHECK(cub::DeviceRadixSort::SortPairs(
        scratch.library_sort, scratch.library_bytes, scratch.keys, scratch.sorted_keys,
        scratch.positions, scratch.sorted_positions, static_cast<int>(n), 0, sort_bits(in.num_keys),
        stream));
  }
  launch_dependent(find_distinct<Key>, {dim3(blocks), kThreads}, stream, in, index, scratch);
}

bool narrow(uint64_t num_keys, int64_t n) { return num_keys <= 0xffffffffull && n < kMaxSorted; }

}  // namespace

size_t large_scratch_bytes(const Plan& plan, const BatchCuda& batch) {
  const bool scaled = is_scaled(batch);
  if (narrow(plan.num_keys, batch.num_ids)) {
    LargeIndexScratch<uint32_t> scratch;
    return allocate<uint32_t>(plan.num_keys, batch.num_ids, scaled, nullptr, &scratch);
  }
  LargeIndexScratch<uint64_t> scratch;
  return allocate<uint64_t>(plan.num_keys, batch.num_ids, scaled, nullptr, &scratch);
}

void index_large(const IndexInput& in, const Index& index, void* scratch, cudaStream_t stream) {
  if (narrow(in.num_keys, in.batch.num_ids)) {
    run<uint32_t>(in, index, scratch, stream);
  } else {
    run<uint64_t>(in, index, scratch, stream);
  }
}

}  // namespace torchrec_hkv::tensor_train::cuda
