// Lookup of one table whose prefixes have many ids. Each block keeps the last core in shared
// memory, because its slices are read for each id. Blocks have equal shares of the sorted prefixes.
#pragma once

#include "tensor_train/cuda/contract/resident_kernel.cuh"

namespace torchrec_hkv::tensor_train::cuda {

// The last core in shared memory, [lasts][4][32]. 16-byte units are swizzled by the lower bit of
// the last column, so that lanes of neighbouring columns read different banks.
template <typename Config>
struct LastInBlock {
  static constexpr int kUnits = Config::kRank;  // units of 4 values in a slice of the core
  const float* values;

  __device__ __forceinline__ static int place_of(int unit) {
    return unit ^ (unit / (Config::kRank / 4) % 2 * 4);
  }

  __device__ __forceinline__ void read(const BlockTask<Config>& task, bool /*exists*/,
                                       int32_t slice, int32_t last_column, int,
                                       LastValues* to) const {
    const int row = threadIdx.x % 32 / 4, column = threadIdx.x % 4;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float* line = values + (slice * 4 + last_column + half * 2 + row % 2) * Config::kRank;
      const int first = (column ^ (row % 2 * 4)) * 4;
      float4 low = make_float4(0.0f, 0.0f, 0.0f, 0.0f), high = low;
      if (Config::kExact || column * 4 < task.last_r()) {
        low = *reinterpret_cast<const float4*>(line + first);
      }
      if (Config::kExact || column * 4 + 16 < task.last_r()) {
        high = *reinterpret_cast<const float4*>(line + (first ^ 16));
      }
      *reinterpret_cast<float4*>(to->b[half]) = low;
      *reinterpret_cast<float4*>(to->b[half] + 4) = high;
    }
  }
};

// kSubs groups of Config::kThreads threads process different prefixes.
template <typename Config, int kSubs>
__global__ void __launch_bounds__(Config::kThreads* kSubs, 1) resident_lookup(TileInput in) {
  static_assert(Config::kVectors && Config::kRank == 32 && Config::kSlices == 1);
  static_assert(Config::kPrefixes == Config::kWarps);
  constexpr int kThreads = Config::kThreads * kSubs;
  constexpr int kSubValues = Config::kMiddleValues + Config::kHeadValues + Config::kSliceStep;
  extern __shared__ float4 memory[];
  __shared__ TableCuda table;
  __shared__ PrefixList all_prefixes[kSubs];
  __shared__ NextIds<Config::kWarps> all_next_ids[kSubs];
  __shared__ int all_bounds[kSubs][2];

  copy_view(in.tables[0], &table);
  if (!in.early) wait_for_kernel_before();
  let_next_kernel_start();  // the next kernel may read the index
  const IndexCounts counts = *in.counts;
  if (counts.dense == 0 || counts.prefixes == 0) {
    wait_for_kernel_before();
    return;
  }
  const bool gather = in.always_gather || counts.gather != 0;
  const int sub = threadIdx.x / Config::kThreads;
  const int thread = threadIdx.x % Config::kThreads;
  const int lane = thread % 32;
  float* middle = reinterpret_cast<float*>(memory) + sub * kSubValues;
  float* heads = middle + Config::kMiddleValues;
  float* products = heads + Config::kHeadValues;
  __syncthreads();  // the view has arrived
  float4* const last_units = memory + kSubs * kSubValues / 4;
  const LastInBlock<Config> last = {reinterpret_cast<const float*>(last_units)};
  const int units = static_cast<int>(table.lasts) * LastInBlock<Config>::kUnits;
  BlockTask<Config> task;
  task.table = &table;
  task.middle = -1;
  task.first_head_column = 0;
  task.first_middle_column = 0;
  task.find_row_width(in.unit);
  const int32_t last_q = task.last_q(), last_r = task.last_r();
#pragma unroll 4
  for (int i = threadIdx.x; i < units; i += kThreads) {
    const int line = i / (Config::kRank / 4), unit = i % (Config::kRank / 4);
    float4 v = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    if (Config::kExact || (line % 4 < last_q && 4 * unit < last_r)) {
      v = __ldg(static_cast<const float4*>(table.last) +
                ((line / 4 * last_q + line % 4) * (last_r / 4) + unit));
    }
    last_units[LastInBlock<Config>::place_of(i)] = v;
  }
  find_share<Config, true>(in, counts, blockIdx.x * kSubs + sub, gridDim.x * kSubs, thread,
                           all_bounds[sub]);
  __syncthreads();
  auto wait = [&] {
    asm volatile("bar.sync %0, %1;" ::"r"(sub + 1), "n"(Config::kThreads) : "memory");
  };

  TileWalk<Config> walk{in, task, all_prefixes[sub], all_next_ids[sub], thread};
  walk.start(all_bounds[sub][0], all_bounds[sub][1], true, 0, wait);
  wait_for_kernel_before();  // the output is clear
#pragma unroll 1
  while (walk.run > 0) {
    if (walk.prefixes()[0].z != task.middle) {
      task.middle = walk.prefixes()[0].z;
      load_middle<Config>(thread, task, 0, middle);
    }
    walk.head_load.store(thread, heads);
    wait_for_copies();
    const IdLane id = walk.next_ids.get(walk.warp());
    const bool has_prefix = walk.has_prefix();
    const int begin = walk.begin(), stop = walk.stop();
    wait();  // all warps have used the products
    multiply_prefixes<Config>(thread, task, heads, middle, products, Config::kPrefixes);
    wait();
    walk.move_on(0);
    if (has_prefix) {
      LastValues values;
      last.read(task, true, __shfl_sync(kAllLanes, id.last, min(lane / 8, stop - begin - 1)), 0, 0,
                &values);
      lookup_ids_ahead(in, id, task, products + walk.warp() * Config::kPrefixStep, begin, stop,
                       gather, last, values);
    }
    walk.refill(0, wait);
  }
}

template <typename Config, int kSubs>
size_t resident_lookup_bytes(int64_t lasts) {
  return Config::shared_bytes(false) * kSubs +
         static_cast<size_t>(lasts) * 4 * Config::kRank * sizeof(float);
}

// Launches the kernel if it fits. Returns whether it does.
template <typename Config, int kSubs>
bool launch_resident_lookup(const TileRun& run, const TileInput& in) {
  const size_t bytes = resident_lookup_bytes<Config, kSubs>(run.only_lasts);
  if (run.only_lasts == 0 || bytes > kMaxResidentBytes) return false;
  auto kernel = resident_lookup<Config, kSubs>;
  launch_dependent(
      kernel, {dim3(static_cast<unsigned>(run.multiprocessors)), Config::kThreads * kSubs, bytes},
      run.stream, in);
  return true;
}

}  // namespace torchrec_hkv::tensor_train::cuda
