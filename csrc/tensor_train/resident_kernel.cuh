// Gradients of one table where prefixes have many ids: each block keeps the gradient of the last
// core, for a slice of ranks, in shared memory, and the one of a middle slice in registers, so that
// neither is added in memory for each id or tile. Blocks have equal shares of the sorted prefixes.
#pragma once

#include "tensor_train/tile_kernel.cuh"

namespace torchrec_hkv::tensor_train::cuda {

// Of shared memory, less what is static.
constexpr size_t kMostResidentBytes = (227 - 3) * 1024;

// What a prefix costs beside its ids, in ids.
constexpr int kPrefixCost = 12;

// The first prefix at which `target` of the work is done, by one warp.
__device__ __forceinline__ int range_start(const int4* __restrict__ prefixes, int count,
                                           int64_t target) {
  int low = 0, high = count;
  const int lane = threadIdx.x % 32;
  while (low < high) {
    const int step = (high - low + 31) / 32;
    const int at = min(low + (lane + 1) * step - 1, high - 1);
    const int64_t work = prefixes[at].x + static_cast<int64_t>(kPrefixCost) * at;
    const unsigned done = __ballot_sync(kAllLanes, work >= target);
    if (done == 0) return high;
    const int first = __ffs(done) - 1;
    high = __shfl_sync(kAllLanes, at, first);
    const int before = __shfl_sync(kAllLanes, at, first > 0 ? first - 1 : 0);
    if (first > 0) low = before + 1;
  }
  return low;
}

// The prefixes of one of `shares` equal shares of the work, by two warps.
template <typename Config>
__device__ __forceinline__ void find_share(const TileInput& in, const Counts& counts, int share,
                                           int shares, int thread, int* bounds) {
  if (thread / 32 >= 2) return;
  const int64_t work = counts.distinct + static_cast<int64_t>(kPrefixCost) * counts.prefixes;
  const int bound = share + thread / 32;
  // What the last share leaves over by rounding is none: its target is all of the work.
  const int at = bound == shares ? counts.prefixes
                                 : range_start(in.prefixes, counts.prefixes, work * bound / shares);
  if (thread % 32 == 0) bounds[thread / 32] = at;
}

// The gradient of a slice of ranks of the last core in shared memory, [lasts][4][kSlice], with a
// word for each slice of the core: kHeld while a warp adds to it, kTouched from its first sum on.
// 16-byte units are swizzled by the upper bit of the last column.
template <typename Config>
struct LastGradInBlock {
  static constexpr int kUnits = Config::kSlice;  // of 4 values, in a slice of the core
  static constexpr bool kAhead = true;
  static constexpr int kHeld = 1;
  static constexpr int kTouched = 2;
  float* values;
  int* locks;

  // Flags follow from the words.
  __device__ __forceinline__ bool touches(const Piece<Config>&, int32_t, bool) const {
    return false;
  }

  __device__ __forceinline__ void add(const Piece<Config>&, bool exists, int32_t slice,
                                      int32_t last_column, int, const float (&d)[4][4]) const {
    const int lane = threadIdx.x % 32, row = lane / 4, column = lane % 4;
    const int leader = lane & ~7;  // eight lanes have one id
    float* line =
        values + static_cast<size_t>(slice) * (4 * Config::kSlice) + last_column * Config::kSlice;
    const int swizzle = row % 2 * 4;
    float4* low = reinterpret_cast<float4*>(line) + (column ^ swizzle);
    float4* high = reinterpret_cast<float4*>(line) + ((column + 4) ^ swizzle);
    constexpr int kNextLine = Config::kSlice / 4;
    bool waits = exists;
    while (__any_sync(kAllLanes, waits)) {
      int got = 0;
      if (waits && lane == leader) got = (atomicOr(locks + slice, kHeld) & kHeld) == 0;
      got = __shfl_sync(kAllLanes, got, leader);
      if (got != 0) {
        __threadfence_block();
        float4 v[4] = {*low, *high, low[kNextLine], high[kNextLine]};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          v[i].x += d[0][i];
          v[i].y += d[1][i];
          v[i].z += d[2][i];
          v[i].w += d[3][i];
        }
        *low = v[0];
        *high = v[1];
        low[kNextLine] = v[2];
        high[kNextLine] = v[3];
        __threadfence_block();
        waits = false;
      }
      __syncwarp();
      if (got != 0 && lane == leader) atomicExch(locks + slice, kTouched);
    }
  }
};

// kSubs groups of Config::kThreads work on prefixes of their own; groups share the last core's
// gradient. Block b has slice b % kSlices of ranks.
template <typename Config, int kSubs>
__global__ void __launch_bounds__(Config::kThreads* kSubs, 1) resident_kernel(TileInput in) {
  static_assert(Config::kFours && Config::kSlice == 32);
  static_assert(MiddleGrad<Config>::kTiles == MiddleGrad<Config>::kAllTiles);
  constexpr int kThreads = Config::kThreads * kSubs;
  constexpr int kSubValues = Config::kMiddleValues + Config::kHeadValues + Config::kSliceStep;
  extern __shared__ float4 memory[];
  __shared__ TableView table;
  __shared__ int4 all_prefixes[kSubs][Config::kPrefixes + 1];
  __shared__ int all_next[kSubs];
  __shared__ int all_bounds[kSubs][2];

  copy_view(in.tables[0], &table);
  enter_chain();
  const Counts counts = *in.counts;
  if (counts.dense == 0 || counts.prefixes == 0) return;
  const int sub = threadIdx.x / Config::kThreads;
  const int thread = threadIdx.x % Config::kThreads;
  const int slice = blockIdx.x % Config::kSlices;
  float* middle = reinterpret_cast<float*>(memory) + sub * kSubValues;
  float* heads = middle + Config::kMiddleValues;
  float* products = heads + Config::kHeadValues;
  int4* prefixes = all_prefixes[sub];
  int* next = all_next + sub;
  __syncthreads();  // the view is there
  const int32_t lasts = static_cast<int32_t>(table.lasts);
  const LastGradInBlock<Config> last_grad = {
      reinterpret_cast<float*>(memory) + kSubs * kSubValues,
      reinterpret_cast<int*>(reinterpret_cast<float*>(memory) + kSubs * kSubValues +
                             static_cast<size_t>(lasts) * 4 * Config::kSlice)};
  const int units = lasts * LastGradInBlock<Config>::kUnits;
  for (int i = threadIdx.x; i < units; i += kThreads) {
    reinterpret_cast<float4*>(last_grad.values)[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  }
  for (int i = threadIdx.x; i < lasts; i += kThreads) last_grad.locks[i] = 0;
  find_share<Config>(in, counts, static_cast<int>(blockIdx.x) / Config::kSlices * kSubs + sub,
                     static_cast<int>(gridDim.x) / Config::kSlices * kSubs, thread,
                     all_bounds[sub]);
  __syncthreads();
  auto wait = [&] {
    asm volatile("bar.sync %0, %1;" ::"r"(sub + 1), "n"(Config::kThreads) : "memory");
  };

  Piece<Config> piece;
  piece.table = &table;
  piece.middle = -1;
  piece.first_head_column = 0;
  piece.first_middle_column = 0;
  MiddleGrad<Config> middle_grad;
  const int end = all_bounds[sub][1];
  int run;
#pragma unroll 1
  for (int first = all_bounds[sub][0]; first < end; first += run) {
    const int count = min(Config::kPrefixes, end - first);
    wait();  // shared memory is done with
    if (thread <= count) prefixes[thread] = in.prefixes[first + thread];
    if (thread == 0) *next = 0;
    wait();
    run = run_length(prefixes, 0, count);
    HeadLoad<Config> head_load;
    head_load.read(thread, piece, prefixes, run);
    if (prefixes[0].z != piece.middle) {
      if (piece.middle >= 0) middle_grad.flush(thread, piece, slice, 0);
      middle_grad.clear();
      piece.middle = prefixes[0].z;
      load_middle<Config>(thread, piece, slice, middle);
    }
    if (thread < run) {
      if (table.head_touched != nullptr) table.head_touched[prefixes[thread].w] = 1;
      if (table.middle_touched != nullptr) table.middle_touched[piece.middle] = 1;
    }
    head_load.store(thread, heads);
    wait();
    multiply_prefixes<Config>(thread, heads, middle, products);
    wait();
    for (;;) {
      int at = 0;
      if (thread % 32 == 0) at = atomicAdd(next, 1);
      at = __shfl_sync(kAllLanes, at, 0);
      if (at >= run) break;
      gradient_ids(in, UnstagedIds{}, piece, slice, products + at * Config::kPrefixStep,
                   prefixes[at].x, prefixes[at + 1].x, last_grad);
    }
    wait();
    middle_grad.add(thread, 0, heads, products, run);
    add_head_grad<Config>(thread, piece, prefixes, run, middle, products);
  }
  if (piece.middle >= 0) middle_grad.flush(thread, piece, slice, 0);
  __syncthreads();
  if (table.last_touched != nullptr) {
    for (int i = threadIdx.x; i < lasts; i += kThreads) {
      if (last_grad.locks[i] != 0) table.last_touched[i] = 1;
    }
  }
  // Blocks begin at different places.
  const int shift = static_cast<int>(static_cast<int64_t>(units) * blockIdx.x / gridDim.x);
  for (int i = threadIdx.x; i < units; i += kThreads) {
    const int at = i + shift < units ? i + shift : i + shift - units;
    constexpr int kLine = Config::kSlice / 4;
    const int line = at / kLine;  // (slice of the core, last column)
    const int unit = at % kLine;
    const float4 v = reinterpret_cast<const float4*>(
        last_grad.values)[line * kLine + (unit ^ (line % 4 / 2 * 4))];
    if (v.x == 0.0f && v.y == 0.0f && v.z == 0.0f && v.w == 0.0f) continue;
    add_four(table.last_grad + static_cast<size_t>(line) * Config::kRank + slice * Config::kSlice +
                 unit * 4,
             v);
  }
}

template <typename Config, int kSubs>
size_t resident_bytes(int64_t lasts) {
  return Config::shared_bytes(true) * kSubs +
         static_cast<size_t>(lasts) * (4 * Config::kSlice + 1) * sizeof(float);
}

// Whether the kernel may be run for a table with so many slices of the last core.
template <typename Config, int kSubs>
bool fits_resident(int64_t lasts) {
  return lasts > 0 && resident_bytes<Config, kSubs>(lasts) <= kMostResidentBytes;
}

template <typename Config, int kSubs>
void launch_resident(const TileRun& run, const TileInput& in) {
  auto kernel = resident_kernel<Config, kSubs>;
  const size_t bytes = resident_bytes<Config, kSubs>(run.only_lasts);
  HKV_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                      static_cast<int>(bytes)));
  const unsigned blocks =
      static_cast<unsigned>(run.multiprocessors) / Config::kSlices * Config::kSlices;
  launch_chained(kernel, {dim3(blocks), Config::kThreads * kSubs, bytes}, run.stream, in);
}

// Gradients of a table: by the resident kernel where it fits and the device finds the batch to be
// dense, otherwise by tiles.
template <typename Resident, int kSubs, typename Tiles>
void run_gradients(const TileRun& run, TileInput in) {
  in.leaves_dense = fits_resident<Resident, kSubs>(run.only_lasts);
  if (in.leaves_dense) launch_resident<Resident, kSubs>(run, in);
  launch_tiles<Tiles, true, false>(run, in);
}

}  // namespace torchrec_hkv::tensor_train::cuda
