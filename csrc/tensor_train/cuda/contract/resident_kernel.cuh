// Gradients of one table whose prefixes have many ids. For a slice of ranks, each block keeps the
// last core, and later its gradient, in shared memory, and the gradient of a middle slice in
// registers, so that ids and tiles need no traffic to memory for them. Blocks have equal shares of
// the sorted prefixes.
#pragma once

#include "tensor_train/cuda/contract/resident_ids.cuh"
#include "tensor_train/cuda/contract/tile_kernel.cuh"

namespace torchrec_hkv::tensor_train::cuda {

// Largest dynamic shared memory: all shared memory minus the static part.
constexpr size_t kMaxResidentBytes = (227 - 11) * 1024;

// The cost of a prefix without its ids, in units of an id's cost.
constexpr int kPrefixCost = 12;

// Returns the first prefix at which `target` of the work is done. Called by one warp.
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

// Returns the number of prefixes directly before `at` with the same middle slice, modulo kPrefixes;
// 0 if there are many. Called by one warp.
template <int kPrefixes>
__device__ __forceinline__ int behind_a_tile(const int4* __restrict__ prefixes, int at) {
  constexpr int kLooks = 8;  // at 32 prefixes each
  static_assert(32 % kPrefixes == 0);
  const int4 here = prefixes[at];
  const int first = at - 1 - static_cast<int>(threadIdx.x % 32);
  bool same[kLooks];
#pragma unroll
  for (int k = 0; k < kLooks; ++k) {
    const int before = first - 32 * k;
    same[k] = false;
    if (before >= 0) {
      const int4 prefix = prefixes[before];
      same[k] = prefix.y == here.y && prefix.z == here.z;
    }
  }
#pragma unroll
  for (int k = 0; k < kLooks; ++k) {
    const unsigned of_slice = __ballot_sync(kAllLanes, same[k]);
    if (of_slice != kAllLanes) return (__ffs(static_cast<int>(~of_slice)) - 1) % kPrefixes;
  }
  return 0;
}

// Finds the prefixes of one of `shares` equal shares of the work. Called by two warps. kWholeTiles:
// shares end with a tile, counted from the begin of a middle slice; otherwise a share may have two
// partial tiles.
template <typename Config, bool kWholeTiles>
__device__ __forceinline__ void find_share(const TileInput& in, const IndexCounts& counts,
                                           int share, int shares, int thread, int* bounds) {
  if (thread / 32 >= 2) return;
  const int bound = share + thread / 32;
  int at;
  if (in.one_table && few_a_prefix(counts)) {
    // Equal numbers of prefixes balance as well and need no search. Prefixes of small tables have
    // more ids than prefixes of large tables.
    at = static_cast<int>(static_cast<int64_t>(counts.prefixes) * bound / shares);
  } else {
    const int64_t work = counts.distinct + static_cast<int64_t>(kPrefixCost) * counts.prefixes;
    // The last share ends with the last prefix, so rounding leaves no work over.
    at = bound == shares ? counts.prefixes
                         : range_start(in.prefixes, counts.prefixes, work * bound / shares);
  }
  if (kWholeTiles && bound < shares && at < counts.prefixes) {
    at -= behind_a_tile<Config::kPrefixes>(in.prefixes, at);
  }
  if (thread % 32 == 0) bounds[thread / 32] = at;
}

// The gradient of a slice of ranks of the last core in shared memory, [lasts][4][kSlice]. Each
// slice of the core has a word: kHeld while a warp adds to the slice, kTouched from its first sum
// on. 16-byte units are swizzled by the upper bit of the last column.
template <typename Config>
struct LastGradInBlock {
  static constexpr int kUnits = Config::kSlice;  // units of 4 values in a slice of the core
  static constexpr int kHeld = 1;
  static constexpr int kTouched = 2;
  float* values;
  int* locks;
  int32_t count;  // number of ranks in the slice

  // A warp locks a word with acquire and unlocks it with release. Fences would be slower, because
  // they also wait for loads of the next ids. compute-sanitizer's racecheck does not know locks,
  // and reports the data that they guard.
  __device__ __forceinline__ void add(bool exists, int32_t slice, int32_t last_column,
                                      const float (&d)[4][4]) const {
    const int lane = threadIdx.x % 32, row = lane / 4, column = lane % 4;
    const int leader = lane & ~7;  // eight lanes have one id
    float* line = values + slice * (4 * Config::kSlice) + last_column * Config::kSlice;
    const int swizzle = row % 2 * 4;
    float4* low = reinterpret_cast<float4*>(line) + (column ^ swizzle);
    float4* high = reinterpret_cast<float4*>(line) + ((column + 4) ^ swizzle);
    constexpr int kNextLine = Config::kSlice / 4;
    bool waits = exists;
    do {
      int got = 0;
      if (waits && lane == leader) got = (acquire(locks + slice) & kHeld) == 0;
      got = __shfl_sync(kAllLanes, got, leader);
      __syncwarp();  // orders the leader's acquire before the lanes' reads
      if (got != 0) {
        const bool has_low = Config::kExact || 4 * column < count;
        const bool has_high = Config::kExact || 4 * column + 16 < count;
        float4 v[4] = {};
        if (has_low) v[0] = *low, v[2] = low[kNextLine];
        if (has_high) v[1] = *high, v[3] = high[kNextLine];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          v[i].x += d[0][i];
          v[i].y += d[1][i];
          v[i].z += d[2][i];
          v[i].w += d[3][i];
        }
        if (has_low) *low = v[0], low[kNextLine] = v[2];
        if (has_high) *high = v[1], high[kNextLine] = v[3];
        waits = false;
      }
      __syncwarp();
      if (got != 0 && lane == leader) release(locks + slice);
    } while (__any_sync(kAllLanes, waits));
  }

 private:
  static __device__ __forceinline__ int acquire(int* lock) {
    int before = 0;
    asm volatile("atom.acquire.cta.shared.or.b32 %0, [%1], %2;"
                 : "=r"(before)
                 : "r"(static_cast<unsigned>(__cvta_generic_to_shared(lock))), "n"(kHeld)
                 : "memory");
    return before;
  }
  static __device__ __forceinline__ void release(int* lock) {
    asm volatile("st.release.cta.shared.b32 [%0], %1;" ::"r"(
                     static_cast<unsigned>(__cvta_generic_to_shared(lock))),
                 "r"(kTouched)
                 : "memory");
  }
};

// Makes two passes over the prefixes of a block: first gradients of heads and middles, with the
// last core in shared memory, then gradients of the last core, in shared memory. Both passes read
// the gradients of the rows; a single pass would read the last core from memory, which is more.
//
// kSubs groups of Config::kThreads threads process different prefixes and share the last core and
// its gradient. Block b has slice b % kSlices of ranks.
template <typename Config, int kSubs>
__global__ void __launch_bounds__(Config::kThreads* kSubs, 1) resident_kernel(TileInput in) {
  static_assert(Config::kVectors && Config::kSlice == 32 && Config::kPrefixes == Config::kWarps);
  static_assert(MiddleGrad<Config>::kTiles == MiddleGrad<Config>::kAllTiles);
  constexpr int kThreads = Config::kThreads * kSubs;
  constexpr int kSubValues = Config::kMiddleValues + Config::kHeadValues + Config::kSliceStep;
  constexpr int kLine = Config::kSlice / 4;  // units per last column
  extern __shared__ float4 memory[];
  __shared__ TableCuda table;
  __shared__ PrefixList all_prefixes[kSubs];
  __shared__ NextIds<Config::kWarps> all_next_ids[kSubs];
  __shared__ int all_bounds[kSubs][2];

  copy_view(in.tables[0], &table);
  begin_dependent_kernel();
  const IndexCounts counts = *in.counts;
  if (counts.dense == 0 || counts.prefixes == 0) return;
  const int sub = threadIdx.x / Config::kThreads;
  const int thread = threadIdx.x % Config::kThreads;
  const int slice = blockIdx.x % Config::kSlices;
  float* middle = reinterpret_cast<float*>(memory) + sub * kSubValues;
  float* heads = middle + Config::kMiddleValues;
  float* products = heads + Config::kHeadValues;
  float* const product = products + thread / 32 * Config::kPrefixStep;  // the warp's prefix
  __syncthreads();                                                      // the view has arrived
  const int32_t lasts = static_cast<int32_t>(table.lasts);
  float4* const last_units = memory + kSubs * kSubValues / 4;
  int* const locks = reinterpret_cast<int*>(last_units + lasts * Config::kSlice);
  const int units = lasts * Config::kSlice;
  BlockTask<Config> task;
  task.table = &table;
  task.middle = -1;
  task.first_head_column = 0;
  task.first_middle_column = 0;
  task.find_row_width(in.unit);
  const int32_t last_q = task.last_q(), last_r = task.last_r();
  const int32_t ranks = min(last_r - slice * Config::kSlice, Config::kSlice);
  // Returns the offset of unit i of shared memory, (slice of the core, last column, unit), in the
  // last core and in its gradient, in units; negative if it does not exist.
  auto unit_in_core = [&](int i) -> int64_t {
    const int line = i / kLine, unit = i % kLine;
    if constexpr (Config::kExact) {
      return static_cast<int64_t>(line) * (Config::kRank / 4) + slice * kLine + unit;
    } else {
      if (line % 4 >= last_q || 4 * unit >= ranks) return -1;
      return static_cast<int64_t>(line / 4 * last_q + line % 4) * (last_r / 4) + slice * kLine +
             unit;
    }
  };
#pragma unroll 4
  for (int i = threadIdx.x; i < units; i += kThreads) {
    const int64_t from = unit_in_core(i);
    float4 v = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    if (Config::kExact || from >= 0) v = __ldg(static_cast<const float4*>(table.last) + from);
    last_units[LastSlice<Config>::place_of(i)] = v;
  }
  find_share<Config, true>(in, counts, static_cast<int>(blockIdx.x) / Config::kSlices * kSubs + sub,
                           static_cast<int>(gridDim.x) / Config::kSlices * kSubs, thread,
                           all_bounds[sub]);
  __syncthreads();
  auto wait = [&] {
    asm volatile("bar.sync %0, %1;" ::"r"(sub + 1), "n"(Config::kThreads) : "memory");
  };
  {
    const LastSlice<Config> last = {reinterpret_cast<const float*>(last_units), ranks};
    MiddleGrad<Config> middle_grad;
    middle_grad.clear();
    TileWalk<Config> walk{in, task, all_prefixes[sub], all_next_ids[sub], thread};
    walk.start(all_bounds[sub][0], all_bounds[sub][1], true, 0, wait);
#pragma unroll 1
    while (walk.run > 0) {
      const int4* const prefixes = walk.prefixes();
      const int run = walk.run;
      wait_for_copies();
      const IdLane id = walk.next_ids.get(walk.warp());
      const int begin = walk.begin(), stop = walk.stop();
      PrefetchedRows<Config, FourRowsByColumn> rows(task);
      rows.start(in, id, stop - begin);
      if (prefixes[0].z != task.middle) {
        if (task.middle >= 0) {
          middle_grad.flush(thread, task, slice, 0);
          middle_grad.clear();
        }
        task.middle = prefixes[0].z;
        load_middle<Config>(thread, task, slice, middle);
        if (thread == 0 && table.middle_touched != nullptr) {
          in_global(table.middle_touched)[task.middle] = 1;
        }
      }
      if (thread < run && table.head_touched != nullptr) {
        in_global(table.head_touched)[prefixes[thread].w] = 1;
      }
      walk.head_load.store(thread, heads);
      // Warps without a prefix store zeros, which are multiplied with heads of zeros.
      prefix_grad(in, id, begin, stop, last, rows, product);
      wait();
      walk.move_on(0);
      middle_grad.add(thread, 0, heads, products, run);
      add_head_grad<Config, 4>(thread, task, prefixes, run, middle, products);
      wait();  // shared memory has been used
      walk.refill(0, wait);
    }
    if (task.middle >= 0) middle_grad.flush(thread, task, slice, 0);
  }

  __syncthreads();  // the last core has been used
  const LastGradInBlock<Config> last_grad = {reinterpret_cast<float*>(last_units), locks, ranks};
  for (int i = threadIdx.x; i < units; i += kThreads) {
    last_units[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  }
  for (int i = threadIdx.x; i < lasts; i += kThreads) locks[i] = 0;
  __syncthreads();
  {
    task.middle = -1;
    TileWalk<Config> walk{in, task, all_prefixes[sub], all_next_ids[sub], thread};
    walk.start(all_bounds[sub][0], all_bounds[sub][1], true, 0, wait);
#pragma unroll 1
    while (walk.run > 0) {
      wait_for_copies();
      const IdLane id = walk.next_ids.get(walk.warp());
      const bool has_prefix = walk.has_prefix();
      const int begin = walk.begin(), stop = walk.stop();
      PrefetchedRows<Config, FourRowsByRow> rows(task);
      rows.start(in, id, stop - begin);
      if (walk.prefixes()[0].z != task.middle) {
        task.middle = walk.prefixes()[0].z;
        load_middle<Config>(thread, task, slice, middle);
      }
      walk.head_load.store(thread, heads);
      wait();  // all warps have used the products
      multiply_prefixes<Config>(thread, task, heads, middle, products, Config::kPrefixes);
      wait();
      walk.move_on(0);
      if (has_prefix) last_grads<Config>(in, id, begin, stop, product, rows, last_grad);
      walk.refill(0, wait);
    }
  }
  __syncthreads();
  if (table.last_touched != nullptr) {
    for (int i = threadIdx.x; i < lasts; i += kThreads) {
      if (locks[i] != 0) in_global(table.last_touched)[i] = 1;
    }
  }
  // Blocks begin at different places, to avoid contention.
  const int shift = static_cast<int>(static_cast<int64_t>(units) * blockIdx.x / gridDim.x);
  for (int i = threadIdx.x; i < units; i += kThreads) {
    const int at = i + shift < units ? i + shift : i + shift - units;
    const int line = at / kLine;  // (slice of the core, last column)
    const int unit = at % kLine;
    const int64_t to = unit_in_core(at);
    if (!Config::kExact && to < 0) continue;
    const float4 v = last_units[line * kLine + (unit ^ (line % 4 / 2 * 4))];
    if (v.x == 0.0f && v.y == 0.0f && v.z == 0.0f && v.w == 0.0f) continue;
    add_four(table.last_grad + 4 * to, v);
  }
}

template <typename Config, int kSubs>
size_t resident_bytes(int64_t lasts) {
  return Config::shared_bytes(true) * kSubs +
         static_cast<size_t>(lasts) * (4 * Config::kSlice + 1) * sizeof(float);
}

// Whether the kernel can run for a table with this number of slices of the last core.
template <typename Config, int kSubs>
bool fits_resident(int64_t lasts) {
  return lasts > 0 && resident_bytes<Config, kSubs>(lasts) <= kMaxResidentBytes;
}

// Launches the kernel if it fits. Returns whether it does. The kernel also sets the flags of
// slices.
template <typename Config, int kSubs>
bool launch_resident(const TileRun& run, const TileInput& in) {
  if (!fits_resident<Config, kSubs>(run.only_lasts)) return false;
  auto kernel = resident_kernel<Config, kSubs>;
  const size_t bytes = resident_bytes<Config, kSubs>(run.only_lasts);
  const unsigned blocks =
      static_cast<unsigned>(run.multiprocessors) / Config::kSlices * Config::kSlices;
  launch_dependent(kernel, {dim3(blocks), Config::kThreads * kSubs, bytes}, run.stream, in);
  return true;
}

}  // namespace torchrec_hkv::tensor_train::cuda
