// The launches of radix_sort.cuh. One launch zeroes counts, and one per digit moves the keys.
#include "common/cuda_check.h"
#include "tensor_train/cuda/contract/tensor_core.cuh"
#include "tensor_train/cuda/index/block_digits.cuh"
#include "tensor_train/cuda/index/radix_sort.cuh"

namespace torchrec_hkv::tensor_train::cuda {
namespace {

constexpr int kThreads = 1024;
constexpr int kWarps = kThreads / 32;
constexpr int kBlocks = 1;  // blocks per multiprocessor
constexpr int kItems = 10;  // items per thread
constexpr int kTile = kThreads * kItems;
constexpr int kAhead = 8;  // predecessors that are read at once
static_assert(kRadix == kDigits && kThreads >= kRadix);

// Kinds of states, in the upper two bits.
constexpr uint32_t kAggregate = 1u << 30;        // counts keys of this tile
constexpr uint32_t kInclusivePrefix = 2u << 30;  // counts keys of this and all earlier tiles
constexpr uint32_t kCount = kAggregate - 1;

struct Shared {
  uint32_t keys[kTile];
  int32_t positions[kTile];
  uint16_t warp_digits[kWarps]
                      [kRadix];  // keys of a digit in each warp, later in all warps before it
  uint32_t starts[kRadix];       // first place of a digit in the tile
  uint32_t to[kRadix];           // first place of a digit in memory, minus `starts`
  uint32_t warp_sums[2][kRadix / 32];
  int32_t tile;
};

__device__ __forceinline__ uint32_t read_state(const uint32_t* state) {
  return *const_cast<const volatile uint32_t*>(state);
}

// Returns the number of keys with a digit in all earlier tiles. States of a digit are kRadix apart.
__device__ __forceinline__ uint32_t count_before(const uint32_t* states, int64_t tile) {
  uint32_t sum = 0;
  for (int64_t end = tile; end > 0; end -= kAhead) {
    uint32_t ahead[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      ahead[i] = end - 1 - i >= 0 ? read_state(states + (end - 1 - i) * kRadix) : kInclusivePrefix;
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      uint32_t state = ahead[i];
      while (state < kAggregate) state = read_state(states + (end - 1 - i) * kRadix);
      sum += state & kCount;
      if (state >= kInclusivePrefix) return sum;
    }
  }
  return sum;
}

__global__ void __launch_bounds__(kRadix* kMaxPasses) clear_counts(RadixSort sort) {
  begin_dependent_kernel();
  sort.counts[threadIdx.x] = 0;
  if (threadIdx.x < kMaxPasses) sort.tickets[threadIdx.x] = 0;
}

// One pass, of the digit from bit `shift` on.
struct Pass {
  const uint32_t* keys;
  const int32_t* positions;
  uint32_t* to_keys;
  int32_t* to_positions;
  const uint32_t* counts;
  uint32_t* ticket;
  uint32_t* states;
  int64_t n;
  int shift;
};

// kFirst: the position of a key is its index.
template <bool kFirst>
__global__ void __launch_bounds__(kThreads, kBlocks) sort_pass(Pass pass) {
  extern __shared__ char memory[];
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
  for (int i = thread; i < kWarps * kRadix / 2; i += kThreads) {
    reinterpret_cast<uint32_t*>(shared.warp_digits)[i] = 0;
  }
  begin_dependent_kernel();
  if (thread == 0) shared.tile = static_cast<int32_t>(atomicAdd(pass.ticket, 1u));
  const uint32_t in_all = thread < kRadix ? pass.counts[thread] : 0;
  __syncthreads();
  const int64_t tile = shared.tile;
  const int shift = pass.shift;
  const int64_t first = tile * kTile;
  const int here = static_cast<int>(min(pass.n - first, static_cast<int64_t>(kTile)));

  // Items of a warp lie side by side.
  uint32_t keys[kItems];
  int32_t positions[kItems];
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    const int at = (warp * kItems + i) * 32 + lane;
    keys[i] = at < here ? pass.keys[first + at] : 0xffffffffu;
    if (!kFirst) positions[i] = at < here ? pass.positions[first + at] : 0;
  }
  uint16_t* const warp_counts = shared.warp_digits[warp];
  uint16_t ranks[kItems];
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    const bool exists = (warp * kItems + i) * 32 + lane < here;
    const uint32_t digit = keys[i] >> shift & (kRadix - 1);
    unsigned same = __ballot_sync(kAllLanes, exists);
#pragma unroll
    for (int bit = 0; bit < 8; ++bit) {
      const unsigned set = __ballot_sync(kAllLanes, digit >> bit & 1);
      same &= (digit >> bit & 1) ? set : ~set;
    }
    const int before = __popc(same & ((1u << lane) - 1));
    const int earlier = warp_counts[digit];
    ranks[i] = static_cast<uint16_t>(earlier + before);
    __syncwarp();
    if (exists && before == 0) warp_counts[digit] = static_cast<uint16_t>(earlier + __popc(same));
    __syncwarp();
  }
  __syncthreads();
  uint32_t digit_count = 0;
  uint32_t* const states = pass.states + thread;
  if (thread < kRadix) {
    uint16_t counts[kWarps];
#pragma unroll
    for (int w = 0; w < kWarps; ++w) counts[w] = shared.warp_digits[w][thread];
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      shared.warp_digits[w][thread] = static_cast<uint16_t>(digit_count);
      digit_count += counts[w];
    }
    *const_cast<volatile uint32_t*>(states + tile * kRadix) =
        (tile == 0 ? kInclusivePrefix : kAggregate) | digit_count;
    const int32_t sum = inclusive_scan(static_cast<int32_t>(digit_count));
    const int32_t sum_all = inclusive_scan(static_cast<int32_t>(in_all));
    shared.starts[thread] = static_cast<uint32_t>(sum) - digit_count;
    shared.to[thread] = static_cast<uint32_t>(sum_all) - in_all;
    if (lane == 31) {
      shared.warp_sums[0][warp] = static_cast<uint32_t>(sum);
      shared.warp_sums[1][warp] = static_cast<uint32_t>(sum_all);
    }
  }
  __syncthreads();
  if (thread < kRadix) {
    uint32_t start = shared.starts[thread], to = shared.to[thread];
    for (int w = 0; w < warp; ++w) {
      start += shared.warp_sums[0][w];
      to += shared.warp_sums[1][w];
    }
    shared.starts[thread] = start;
    shared.to[thread] = to - start;
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    const int at = (warp * kItems + i) * 32 + lane;
    if (at >= here) break;
    const uint32_t digit = keys[i] >> shift & (kRadix - 1);
    const uint32_t place = shared.starts[digit] + warp_counts[digit] + ranks[i];
    shared.keys[place] = keys[i];
    shared.positions[place] = kFirst ? static_cast<int32_t>(first) + at : positions[i];
  }
  if (thread < kRadix) {
    const uint32_t before = count_before(states, tile);
    if (tile > 0) {
      *const_cast<volatile uint32_t*>(states + tile * kRadix) =
          kInclusivePrefix | (before + digit_count);
    }
    shared.to[thread] += before;
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    const int at = i * kThreads + thread;
    if (at >= here) break;
    const uint32_t key = shared.keys[at];
    const uint32_t to = shared.to[key >> shift & (kRadix - 1)] + static_cast<uint32_t>(at);
    pass.to_keys[to] = key;
    pass.to_positions[to] = shared.positions[at];
  }
}

}  // namespace

RadixSort allocate_radix_sort(BufferAllocator& allocator, int64_t n, int bits) {
  RadixSort sort;
  sort.passes = (bits + 7) / 8;
  sort.num_tiles = (n + kTile - 1) / kTile;
  sort.counts = allocator.take<uint32_t>(kMaxPasses * kRadix);
  sort.tickets = allocator.take<uint32_t>(kMaxPasses);
  sort.states = allocator.take<uint32_t>(sort.passes * sort.num_tiles * kRadix);
  for (uint32_t*& keys : sort.keys) keys = allocator.take<uint32_t>(n);
  for (int32_t*& positions : sort.positions) positions = allocator.take<int32_t>(n);
  return sort;
}

void begin_radix_sort(const RadixSort& sort, cudaStream_t stream) {
  launch_dependent(clear_counts, {dim3(1), kRadix * kMaxPasses}, stream, sort);
}

void radix_sort(const RadixSort& sort, int64_t n, cudaStream_t stream) {
  const LaunchShape shape = {dim3(static_cast<unsigned>(sort.num_tiles)), kThreads, sizeof(Shared)};
  auto run = [&](auto kernel, int number) {
    const int from = number % 2, to = from ^ 1;
    const Pass pass = {sort.keys[from],
                       sort.positions[from],
                       sort.keys[to],
                       sort.positions[to],
                       sort.counts + number * kRadix,
                       sort.tickets + number,
                       sort.states + number * sort.num_tiles * kRadix,
                       n,
                       8 * number};
    launch_dependent(kernel, shape, stream, pass);
  };
  run(sort_pass<true>, 0);
  for (int pass = 1; pass < sort.passes; ++pass) run(sort_pass<false>, pass);
}

}  // namespace torchrec_hkv::tensor_train::cuda
