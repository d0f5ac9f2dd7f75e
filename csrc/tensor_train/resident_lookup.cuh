// Lookup of one table where prefixes have many ids: each block keeps the last core in shared
// memory, as its slices are what is read for each id. Blocks have equal shares of the sorted
// prefixes.
#pragma once

#include "tensor_train/resident_kernel.cuh"

namespace torchrec_hkv::tensor_train::cuda {

// The last core in shared memory, [lasts][4][32]. 16-byte units are swizzled by the lower bit of
// the last column, so that lanes of neighbouring columns read different banks.
template <typename Config>
struct LastInBlock {
  static constexpr int kUnits = Config::kRank;  // of 4 values, in a slice of the core
  const float* values;

  __device__ __forceinline__ static int place_of(int unit) {
    return unit ^ (unit / (Config::kRank / 4) % 2 * 4);
  }

  __device__ __forceinline__ void read(const Piece<Config>&, bool /*exists*/, int32_t slice,
                                       int32_t last_column, int, LastValues* to) const {
    const int row = threadIdx.x % 32 / 4, column = threadIdx.x % 4;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float* line = values + (slice * 4 + last_column + half * 2 + row % 2) * Config::kRank;
      const int first = (column ^ (row % 2 * 4)) * 4;
      *reinterpret_cast<float4*>(to->b[half]) = *reinterpret_cast<const float4*>(line + first);
      *reinterpret_cast<float4*>(to->b[half] + 4) =
          *reinterpret_cast<const float4*>(line + (first ^ 16));
    }
  }
};

// kSubs groups of Config::kThreads work on prefixes of their own.
template <typename Config, int kSubs>
__global__ void __launch_bounds__(Config::kThreads* kSubs, 1) resident_lookup(TileInput in) {
  static_assert(Config::kFours && Config::kRank == 32 && Config::kSlices == 1);
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
  const bool gather = in.always_gather || counts.gather != 0;
  const int sub = threadIdx.x / Config::kThreads;
  const int thread = threadIdx.x % Config::kThreads;
  float* middle = reinterpret_cast<float*>(memory) + sub * kSubValues;
  float* heads = middle + Config::kMiddleValues;
  float* products = heads + Config::kHeadValues;
  int4* prefixes = all_prefixes[sub];
  int* next = all_next + sub;
  __syncthreads();  // the view is there
  float4* const last_units = memory + kSubs * kSubValues / 4;
  const LastInBlock<Config> last = {reinterpret_cast<const float*>(last_units)};
  const int units = static_cast<int>(table.lasts) * LastInBlock<Config>::kUnits;
#pragma unroll 4
  for (int i = threadIdx.x; i < units; i += kThreads) {
    last_units[LastInBlock<Config>::place_of(i)] =
        __ldg(static_cast<const float4*>(table.last) + i);
  }
  find_share<Config>(in, counts, blockIdx.x * kSubs + sub, gridDim.x * kSubs, thread,
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
      piece.middle = prefixes[0].z;
      load_middle<Config>(thread, piece, 0, middle);
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
      lookup_ids<Config>(in, UnstagedIds{}, piece, products + at * Config::kPrefixStep, 1,
                         prefixes[at].x, prefixes[at + 1].x, gather, last);
    }
  }
}

template <typename Config, int kSubs>
size_t resident_lookup_bytes(int64_t lasts) {
  return Config::shared_bytes(false) * kSubs +
         static_cast<size_t>(lasts) * 4 * Config::kRank * sizeof(float);
}

// A lookup of a table: by the resident kernel where it fits and the device finds the batch to be
// dense, otherwise by tiles.
template <typename Resident, int kSubs, typename Tiles>
void run_lookup(const TileRun& run, TileInput in) {
  const size_t bytes = resident_lookup_bytes<Resident, kSubs>(run.only_lasts);
  in.leaves_dense = run.only_lasts > 0 && bytes <= kMostResidentBytes;
  if (in.leaves_dense) {
    auto kernel = resident_lookup<Resident, kSubs>;
    HKV_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                        static_cast<int>(bytes)));
    launch_chained(
        kernel,
        {dim3(static_cast<unsigned>(run.multiprocessors)), Resident::kThreads * kSubs, bytes},
        run.stream, in);
  }
  launch_tiles<Tiles, false, false>(run, in);
}

}  // namespace torchrec_hkv::tensor_train::cuda
