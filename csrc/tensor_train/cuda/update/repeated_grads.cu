// Sums gradients of ids that occur more than once before the contraction. Each warp processes a
// chunk of 32 sorted positions. Blocks combine sums of runs that cross the ends of chunks. A second
// kernel, or in a small batch the cluster of all blocks, combines sums of runs that cross the ends
// of blocks. The order is fixed, so results are bit-reproducible, and sums are too short to lose
// digits.
#include <cooperative_groups.h>

#include <climits>

#include "common/cuda_check.h"
#include "tensor_train/cuda/index/repeats.cuh"

namespace torchrec_hkv::tensor_train::cuda {
namespace {

constexpr int kJoinThreads = 256;
constexpr int kJoinWarps = kJoinThreads / 32;
constexpr int kJoinColumns = 64;       // columns at a time
constexpr int kCluster = 16;           // blocks that sum a small batch
constexpr int kFlagBlocks = kCluster;  // blocks that set flags concurrently
constexpr int kMaxSmallWarps = static_cast<int>(kSmallBatch) / kChunk / kCluster;
constexpr int kTouching = 2;  // blocks per multiprocessor that set flags

// Results of a block for join_runs.
struct BlockEnds {
  int32_t slot;     // slot of the run that begins here and continues, or kNoSlot
  int32_t through;  // 1 if the whole block belongs to one run that began earlier and continues
};

struct Partials {
  BlockEnds* ends;  // [blocks]
  float* rows;  // [blocks][2][widest] sums of the run from earlier, and of the one that continues
};

constexpr int kSumWarps = 16;  // warps per block of sum_runs

// Number of blocks, at least that of sum_small.
int64_t blocks_of(int64_t num_ids) {
  constexpr int64_t kPositions = kSumWarps * kChunk;
  return max((num_ids + kPositions - 1) / kPositions, int64_t{kCluster});
}

size_t allocate(int64_t num_ids, int32_t widest, void* memory, Partials* partials) {
  BufferAllocator allocator{static_cast<char*>(memory)};
  const int64_t blocks = blocks_of(num_ids);
  partials->ends = allocator.take<BlockEnds>(blocks);
  partials->rows = allocator.take<float>(blocks * 2 * widest);
  return allocator.used;
}

// Data that the warps of a block exchange. A lane has kWidth neighbouring columns.
template <int kWidth, int kWarps>
struct SumShared {
  alignas(16) float sides[kWarps][2][32 * kWidth];  // sums of runs that cross a chunk's ends
  int32_t slots_before[kWarps];                     // slot of the run from earlier, or kNoSlot
  int32_t slots_behind[kWarps];                     // slot of the run that continues, or kNoSlot
  bool passes[kWarps];                              // whether both are one run of the whole chunk
};

// Sums the runs in the chunks of a block of `warps` warps. Sums of runs that cross the block's ends
// are written to `partials`.
template <int kWidth, int kWarps>
__device__ __forceinline__ void sum_chunks(const RepeatsInput& in, const float* __restrict__ grad,
                                           float* slot_grads, const Partials& partials, int warps,
                                           SumShared<kWidth, kWarps>& shared) {
  constexpr int kColumns = 32 * kWidth;  // columns at a time
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const WarpChunk chunk(in, (static_cast<int64_t>(blockIdx.x) * warps + warp) * kChunk);
  const bool arrived = (chunk.repeats & ~chunk.heads & 1) != 0;
  const bool continues = (chunk.repeats & ~chunk.tails) >> 31 != 0;
  if (lane == 0) {
    shared.slots_before[warp] = arrived ? chunk.slot : kNoSlot;
    shared.passes[warp] = arrived && chunk.tails == 0;
  }
  if (lane == 31) shared.slots_behind[warp] = continues ? chunk.slot : kNoSlot;
  const bool crosses = __syncthreads_or(arrived || continues) != 0;
  if (!crosses) {
    if (threadIdx.x == 0) partials.ends[blockIdx.x] = {kNoSlot, 0};
    if (chunk.repeats == 0) return;
  }
  const bool scaled = in.place_factors != nullptr;
  float* const rows = partials.rows + static_cast<size_t>(blockIdx.x) * 2 * in.widest;
  for (int base = 0; base < in.widest; base += kColumns) {
    const int column = base + lane * kWidth;
    bool open = arrived;  // whether the run began in an earlier chunk
    for (unsigned remaining = chunk.repeats; remaining != 0;) {
      const int first = __ffs(static_cast<int>(remaining)) - 1;
      const unsigned tails = chunk.tails >> first;
      const bool ends = tails != 0;
      const int last = ends ? first + __ffs(static_cast<int>(tails)) - 1 : kChunk - 1;
      const int32_t dim = __shfl_sync(kAllLanes, chunk.dim, first);
      GradColumns<kWidth> sum = {};
      for (int at = first; at <= last; at += kRowsAhead) {
        GradColumns<kWidth> ahead[kRowsAhead];
#pragma unroll
        for (int j = 0; j < kRowsAhead; ++j) {
          const uint32_t place = __shfl_sync(kAllLanes, chunk.place, at + j);
          const float factor = scaled ? __shfl_sync(kAllLanes, chunk.factor, at + j) : 1.0f;
          ahead[j] = {};
          if (at + j <= last && column < dim) {
            ahead[j].load(grad + static_cast<size_t>(place) * in.unit + column, factor);
          }
        }
#pragma unroll
        for (int j = 0; j < kRowsAhead; ++j) {
#pragma unroll
          for (int i = 0; i < kWidth; ++i) sum.v[i] += ahead[j].v[i];
        }
      }
      const int32_t slot = __shfl_sync(kAllLanes, chunk.slot, first);
      if (!ends || open) {
        sum.store(&shared.sides[warp][open ? 0 : 1][lane * kWidth]);
      } else if (column < in.widest) {
        sum.store(slot_grads + static_cast<size_t>(slot) * in.widest + column);
      }
      open = false;
      remaining = last == kChunk - 1 ? 0 : remaining & ~0u << (last + 1);
    }
    if (!crosses) continue;
    __syncthreads();
    const int grad_column = base + static_cast<int>(threadIdx.x);
    if (threadIdx.x < kColumns && grad_column < in.widest) {
      double run = 0.0;
      bool began = false;  // whether the run began in this block
      for (int w = 0; w < warps; ++w) {
        if (shared.slots_before[w] != kNoSlot) {
          run += shared.sides[w][0][threadIdx.x];
          if (shared.passes[w]) continue;
          const auto value = static_cast<float>(run);
          if (began) {
            slot_grads[static_cast<size_t>(shared.slots_before[w]) * in.widest + grad_column] =
                value;
          } else {
            rows[grad_column] = value;
          }
        }
        run = 0.0;
        began = false;
        if (shared.slots_behind[w] != kNoSlot) {
          run = shared.sides[w][1][threadIdx.x];
          began = true;
        }
      }
      const int32_t behind = shared.slots_behind[warps - 1];
      if (behind != kNoSlot) rows[(began ? in.widest : 0) + grad_column] = static_cast<float>(run);
      if (grad_column == 0) {
        partials.ends[blockIdx.x] = {behind != kNoSlot && began ? behind : kNoSlot,
                                     behind != kNoSlot && !began ? 1 : 0};
      }
    }
    __syncthreads();
  }
}

// Sums all chunks of the grid. join_runs follows.
template <int kWidth, int kWarps>
__global__ void __launch_bounds__(kWarps * 32)
    sum_runs(RepeatsInput in, const float* __restrict__ grad, float* slot_grads, Partials partials,
             int64_t* steps) {
  __shared__ SumShared<kWidth, kWarps> shared;
  wait_for_kernel_before();
  let_next_kernel_start();  // kernels that follow read the index before they wait
  if (steps != nullptr && blockIdx.x == 0 && threadIdx.x == 0) *steps += 1;
  sum_chunks(in, grad, slot_grads, partials, kWarps, shared);
}

struct JoinShared {
  int last;  // last block of the run
  double sums[kJoinWarps][kJoinColumns];
};

// Combines the sums of the run that begins in block `first` of sum_chunks and continues, if there
// is one. Called by one block.
__device__ __forceinline__ void join_run(const Partials& partials, int first, int blocks,
                                         int32_t widest, float* slot_grads, JoinShared& shared) {
  constexpr int kColumns = kJoinColumns;
  const int threads = static_cast<int>(blockDim.x), warps = min(threads / 32, kJoinWarps);
  const int32_t slot = partials.ends[first].slot;
  if (slot == kNoSlot) return;
  if (threadIdx.x == 0) shared.last = INT_MAX;
  __syncthreads();
  for (int base = first + 1;; base += threads) {
    const int at = base + static_cast<int>(threadIdx.x);
    if (at >= blocks || partials.ends[at].through == 0) atomicMin(&shared.last, at);
    __syncthreads();
    const int found = shared.last;
    __syncthreads();
    if (found != INT_MAX) break;
  }
  const int terms = shared.last - first + 1;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  for (int base = 0; base < widest; base += kColumns) {
    const int column = base + 2 * lane;  // widest is a multiple of 4
    double sum[2] = {};
    if (warp < warps && column < widest) {
#pragma unroll 8
      for (int i = warp; i < terms; i += warps) {
        const size_t row = static_cast<size_t>(first + i) * 2 + (i == 0 ? 1 : 0);
        const float2 pair = *reinterpret_cast<const float2*>(partials.rows + row * widest + column);
        sum[0] += pair.x;
        sum[1] += pair.y;
      }
    }
    if (warp < warps) {
      shared.sums[warp][2 * lane] = sum[0];
      shared.sums[warp][2 * lane + 1] = sum[1];
    }
    __syncthreads();
    const int grad_column = base + static_cast<int>(threadIdx.x);
    if (threadIdx.x < kColumns && grad_column < widest) {
      double all = 0.0;
      for (int w = 0; w < warps; ++w) all += shared.sums[w][threadIdx.x];
      slot_grads[static_cast<size_t>(slot) * widest + grad_column] = static_cast<float>(all);
    }
    __syncthreads();
  }
}

// Block b combines the sums of the run that begins in block b of sum_runs and continues. The first
// blocks set flags of slices while sum_runs is running.
__global__ void __launch_bounds__(kJoinThreads)
    join_runs(TouchInput touch, int touching, Partials partials, int blocks, int32_t widest,
              float* slot_grads) {
  __shared__ JoinShared shared;
  __shared__ TouchedSlices touched;
  let_next_kernel_start();
  if (static_cast<int>(blockIdx.x) < touching) touched.set(touch, blockIdx.x, touching);
  wait_for_kernel_before();
  join_run(partials, blockIdx.x, blocks, widest, slot_grads, shared);
}

// Processes a small batch in one launch: a cluster of blocks sums runs, others set flags of slices.
template <int kWidth>
__global__ void __launch_bounds__(kMaxSmallWarps * 32)
    sum_small(RepeatsInput in, TouchInput touch, const float* __restrict__ grad, float* slot_grads,
              Partials partials, int64_t* steps) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  __shared__ union {
    SumShared<kWidth, kMaxSmallWarps> sums;
    JoinShared join;
    TouchedSlices touched;
  } shared;
  wait_for_kernel_before();
  let_next_kernel_start();  // kernels that follow read the index before they wait
  if (steps != nullptr && blockIdx.x == 0 && threadIdx.x == 0) *steps += 1;
  if (blockIdx.x >= kCluster) {
    shared.touched.set(touch, static_cast<int>(blockIdx.x) - kCluster, kFlagBlocks);
    return;
  }
  sum_chunks(in, grad, slot_grads, partials, static_cast<int>(blockDim.x) / 32, shared.sums);
  cooperative_groups::this_cluster().sync();
  join_run(partials, blockIdx.x, kCluster, in.widest, slot_grads, shared.join);
#endif
}

}  // namespace

size_t partial_grads_bytes(const Plan& plan, const BatchCuda& batch) {
  Partials partials;
  return allocate(batch.num_ids, plan.widest, nullptr, &partials);
}

void sum_repeated_grads(const RepeatsInput& in, const float* grad, float* slot_grads, void* memory,
                        int64_t* steps, const TouchInput& touch, cudaStream_t stream) {
  Partials partials;
  allocate(in.num_ids, in.widest, memory, &partials);
  if (in.clusters && in.num_ids <= kSmallBatch) {
    constexpr int64_t kOfWarps = kCluster * kChunk;
    const int warps = max(static_cast<int>((in.num_ids + kOfWarps - 1) / kOfWarps), 2);
    auto run = [&](auto kernel) {
      launch_dependent(kernel, {dim3(kCluster + kFlagBlocks), warps * 32, 0, kCluster}, stream, in,
                       touch, grad, slot_grads, partials, steps);
    };
    return in.unit == 4 ? run(sum_small<2>) : run(sum_small<1>);
  }
  const auto blocks = static_cast<unsigned>(blocks_of(in.num_ids));
  auto run = [&](auto kernel) {
    launch_dependent(kernel, {dim3(blocks), kSumWarps * 32}, stream, in, grad, slot_grads, partials,
                     steps);
  };
  in.unit == 4 ? run(sum_runs<2, kSumWarps>) : run(sum_runs<1, kSumWarps>);
  const int touching = min(static_cast<int>(blocks), kTouching * in.multiprocessors);
  launch_dependent(join_runs, {dim3(blocks), kJoinThreads}, stream, touch, touching, partials,
                   static_cast<int>(blocks), in.widest, slot_grads);
}

}  // namespace torchrec_hkv::tensor_train::cuda
