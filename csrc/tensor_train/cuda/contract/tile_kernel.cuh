// Lookup and gradients of tiles. Both compute prefix products and keep them out of global memory.
#pragma once

#include <type_traits>

#include "tensor_train/cuda/contract/tile_gemm.cuh"
#include "tensor_train/cuda/contract/tile_grads.cuh"
#include "tensor_train/cuda/contract/tile_ids.cuh"
#include "tensor_train/cuda/contract/tile_operands.cuh"
#include "tensor_train/cuda/contract/tile_walk.cuh"
#include "tensor_train/tiles.h"

namespace torchrec_hkv::tensor_train::cuda {

// Copies a table's view to shared memory, word by word.
__device__ __forceinline__ void copy_view(const TableCuda& from, TableCuda* to) {
  static_assert(sizeof(TableCuda) % 4 == 0);
  constexpr int kWords = sizeof(TableCuda) / 4;
  for (int i = threadIdx.x; i < kWords; i += blockDim.x) {
    reinterpret_cast<uint32_t*>(to)[i] = reinterpret_cast<const uint32_t*>(&from)[i];
  }
}

// blockIdx.x processes tiles x, x + gridDim.x, ... of Config::kPrefixes prefixes. A tile may have
// several middle slices, which are processed one after the other. blockIdx.y is the block of head
// and middle columns. blockIdx.z processes an equal part of each prefix's ids. kFew: the batch has
// few ids, and most prefixes have one.
template <typename Config, bool kBackward, bool kFew>
__global__ void __launch_bounds__(Config::kThreads, Config::kMinBlocks) tile_kernel(TileInput in) {
  constexpr int kMaxStaged = kFew ? 1 : 16 * Config::kPrefixes;
  extern __shared__ float4 memory[];
  __shared__ int4 prefixes[Config::kPrefixes + 1];
  __shared__ int2 staged_ids[kMaxStaged];
  __shared__ std::conditional_t<kFew, UnstagedIds, StagedIds> ids;
  __shared__ TableCuda table;
  __shared__ int next;  // the next prefix of the tile that a warp takes
  float* middle = reinterpret_cast<float*>(memory);
  float* heads = middle + Config::kMiddleValues;
  float* products = heads + Config::kHeadValues;

  copy_view(in.tables[0], &table);  // kernels do not write views: no wait
  bool waits = in.early;            // then waits as late as possible
  if (!waits) wait_for_kernel_before();
  let_next_kernel_start();  // it may read the index
  const int thread = threadIdx.x;
  auto read_prefix = [&](int first) {
    int4 prefix = make_int4(0, -1, -1, -1);
    if (thread <= Config::kPrefixes && first + thread <= in.max_prefixes) {
      prefix = in.prefixes[first + thread];
    }
    return prefix;
  };
  // Loaded together with the counts; values beyond them are not used.
  int4 prefix = read_prefix(blockIdx.x * Config::kPrefixes);
  const IndexCounts counts = *in.counts;
  const bool gather = in.always_gather || counts.gather != 0;
  const int all = in.leaves_dense && counts.dense != 0 ? 0 : counts.prefixes;
  int loaded = 0;
  int run;
#pragma unroll 1
  for (int64_t tile = blockIdx.x; tile * Config::kPrefixes < all; tile += gridDim.x) {
    const int first_prefix = static_cast<int>(tile) * Config::kPrefixes;
    const int count = min(Config::kPrefixes, all - first_prefix);
    if (tile != blockIdx.x) {
      prefix = read_prefix(first_prefix);
      __syncthreads();  // the previous contents of shared memory have been used
    }
    if (thread <= count) prefixes[thread] = prefix;
    __syncthreads();
    if constexpr (!kFew) {
      const int begin = prefixes[0].x;
      const int staged = min(kMaxStaged, prefixes[count].x - begin);
      if (thread == 0) ids = {staged_ids, begin, staged};
      for (int i = thread; i < staged; i += Config::kThreads) {
        staged_ids[i] = make_int2(in.lasts[begin + i], static_cast<int>(in.sources[begin + i]));
      }
    }
#pragma unroll 1
    for (int first = 0; first < count; first += run) {
      run = run_length(prefixes, first, count);
      const int number = prefixes[first].y;
      if (number != loaded) {
        __syncthreads();
        copy_view(in.tables[number], &table);
        loaded = number;
        __syncthreads();
      }
      if (table.kernel != in.kernel || static_cast<int>(blockIdx.y) >= table.blocks) continue;
      BlockTask<Config> task;
      task.table = &table;
      if constexpr (Config::kFixedPoint) {
        task.fixed_point = &in.fixed_point;
        task.number = number;
      }
      task.middle = prefixes[first].z;
      task.first_head_column = static_cast<int>(blockIdx.y) / table.middle_blocks * 4;
      task.first_middle_column = static_cast<int>(blockIdx.y) % table.middle_blocks * 4;
      task.find_row_width(in.unit);
      const int4* first_prefixes = prefixes + first;
      const bool has_middle = Config::kKnownRanks || Config::kKnownQ || table.middle != nullptr;
      const int slices = Config::kKnownRanks ? Config::kSlices
                                             : (table.last_r + Config::kSlice - 1) / Config::kSlice;
#pragma unroll 1
      for (int slice = 0; slice < slices; ++slice) {
        __syncthreads();  // the previous contents of shared memory have been used
        float* to = products + (kBackward ? 0 : slice * Config::kSliceStep);
        if (thread == 0) next = 0;
        if (has_middle) {
          HeadLoad<Config> head_load;
          if constexpr (HeadLoad<Config>::kEarly) head_load.read(thread, task, first_prefixes, run);
          load_middle<Config>(thread, task, slice, middle);
          if (slice == 0) {
            if constexpr (!HeadLoad<Config>::kEarly)
              head_load.read(thread, task, first_prefixes, run);
            head_load.store(thread, heads);
          }
          __syncthreads();
          multiply_prefixes<Config>(thread, task, heads, middle, to, run);
        } else {
          HeadPrefixes<Config>::load(thread, task, slice, first_prefixes, run, to);
        }
        if (!kBackward && slice + 1 < slices) continue;
        if (waits) wait_for_kernel_before();
        waits = false;
        __syncthreads();
        for (;;) {
          int at = 0;
          if (thread % 32 == 0) at = atomicAdd(&next, 1);
          at = __shfl_sync(kAllLanes, at, 0);
          if (at >= run) break;
          float* product = products + at * Config::kPrefixStep;
          int begin = first_prefixes[at].x, end = first_prefixes[at + 1].x;
          if (gridDim.z > 1) {
            const int part =
                (end - begin + static_cast<int>(gridDim.z) - 1) / static_cast<int>(gridDim.z);
            begin += static_cast<int>(blockIdx.z) * part;
            end = min(end, begin + part);
          }
          if constexpr (kBackward) {
            gradient_ids(in, ids, task, slice, product, begin, end, LastGradInMemory<Config>{});
          } else {
            lookup_ids<Config>(in, ids, task, product, slices * (Config::kSlice / 32), begin, end,
                               gather, LastInMemory<Config>{});
          }
        }
        if constexpr (kBackward) {
          __syncthreads();
          if (has_middle) {
            add_middle_grad<Config>(thread, task, slice, heads, products, run);
            add_head_grad<Config, 2>(thread, task, first_prefixes, run, middle, products);
          } else {
            HeadPrefixes<Config>::add_grads(thread, task, slice, first_prefixes, run, products);
          }
        }
      }
    }
  }
  if (waits) wait_for_kernel_before();
}

// The number of parts of each prefix's ids. It is above 1 if there are too few prefixes to occupy
// the GPU, and so many ids per prefix that recomputing products in each part costs little.
template <typename Config>
unsigned parts_of_ids(const TileRun& run, int64_t blocks) {
  constexpr int64_t kMax = 8, kMinIds = 64;
  const int64_t wanted = 4 * int64_t{Config::kMinBlocks} * run.multiprocessors;
  const int64_t ids = run.num_ids / run.max_prefixes / kMinIds;
  return static_cast<unsigned>(
      max(int64_t{1}, min(min(kMax, ids), (wanted + blocks - 1) / blocks)));
}

template <typename Config, bool kBackward, bool kFew>
void launch_tiles(const TileRun& run, const TileInput& in) {
  auto kernel = tile_kernel<Config, kBackward, kFew>;
  constexpr size_t kBytes = Config::shared_bytes(kBackward);
  int64_t tiles = (run.max_prefixes + Config::kPrefixes - 1) / Config::kPrefixes;
  // All blocks may turn out to be idle, so launch fewer of them, with several tiles each.
  const int64_t most = 3 * int64_t{Config::kMinBlocks} * run.multiprocessors;
  if (in.leaves_dense && tiles > most) tiles = most;
  const unsigned parts =
      kFew || in.leaves_dense ? 1 : parts_of_ids<Config>(run, tiles * run.blocks);
  const dim3 grid(static_cast<unsigned>(tiles), static_cast<unsigned>(run.blocks), parts);
  launch_dependent(kernel, {grid, Config::kThreads, kBytes}, run.stream, in);
}

// Deterministic gradients, for any shape.
template <template <int> typename Config>
void run_fixed_point(const TileRun& run, const TileInput& in) {
  if (run.precision == Precision::kTf32) {
    launch_tiles<Config<1>, true, false>(run, in);
  } else {
    launch_tiles<Config<3>, true, false>(run, in);
  }
}

// Shapes<kProducts, kFit, kType> has the configurations of a rank: Few and Many for lookups of few
// and many ids, FewBackward and ManyBackward for gradients. Large ranks have no Few: a prefix takes
// so long that the time to read its ids does not matter.
template <typename Shapes>
void run_shapes(const TileRun& run, const TileInput& in) {
  if constexpr (!requires { typename Shapes::Few; }) {
    return run.backward ? launch_tiles<typename Shapes::ManyBackward, true, false>(run, in)
                        : launch_tiles<typename Shapes::Many, false, false>(run, in);
  } else if (run.backward) {
    if (run.few) {
      launch_tiles<typename Shapes::FewBackward, true, true>(run, in);
    } else {
      launch_tiles<typename Shapes::ManyBackward, true, false>(run, in);
    }
  } else {
    if (run.few) {
      launch_tiles<typename Shapes::Few, false, true>(run, in);
    } else {
      launch_tiles<typename Shapes::Many, false, false>(run, in);
    }
  }
}

template <template <int, Fit, RowType> typename Shapes, int kProducts>
void run_class(const TileRun& run, const TileInput& in) {
  if (!run.kernel.exact) {
    if (run.kernel.lasts) {
      run_shapes<Shapes<kProducts, Fit::kLasts, RowType::kFloat32>>(run, in);
    } else if (run.kernel.whole) {
      run_shapes<Shapes<kProducts, Fit::kRanks, RowType::kFloat32>>(run, in);
    } else if (run.kernel.vectors) {
      run_shapes<Shapes<kProducts, Fit::kVectors, RowType::kFloat32>>(run, in);
    } else {
      run_shapes<Shapes<kProducts, Fit::kAny, RowType::kFloat32>>(run, in);
    }
  } else if (run.kernel.type == RowType::kBFloat16) {
    run_shapes<Shapes<kProducts, Fit::kWhole, RowType::kBFloat16>>(run, in);
  } else if (run.kernel.fours) {
    run_shapes<Shapes<kProducts, Fit::kFours, RowType::kFloat32>>(run, in);
  } else {
    run_shapes<Shapes<kProducts, Fit::kWhole, RowType::kFloat32>>(run, in);
  }
}

template <template <int, Fit, RowType> typename Shapes>
void run_rank(const TileRun& run, const TileInput& in) {
  if (run.precision == Precision::kTf32) {
    run_class<Shapes, 1>(run, in);
  } else {
    run_class<Shapes, 3>(run, in);
  }
}

}  // namespace torchrec_hkv::tensor_train::cuda
