
#include "common/cuda_check.h"
#include "common/scan.cuh"
#include "routing/blocks.h"

namespace torchrec_hkv::routing::cuda {
namespace {

constexpr int kThreads = 512;
constexpr int kBagsOfThread = 4;
constexpr int64_t kIdsOfBlock = 4096;
using Scan = BlockScan<int64_t, kThreads>;

// One block for each feature, and one for the numbers of samples.
template <typename Length>
__global__ void __launch_bounds__(kThreads) count_kernel(const Length* lengths, Counts out) {
  __shared__ Scan::Storage storage;
  const int64_t feature = blockIdx.x;
  if (feature == out.num_features) {
    for (int64_t r = threadIdx.x; r < out.num_ranks; r += kThreads) {
      out.counts[out.samples_at[r]] = out.batch_size;
    }
    return;
  }
  int64_t ids = 0;
  for (int64_t bag = threadIdx.x; bag < out.batch_size; bag += kThreads) {
    ids += lengths[feature * out.batch_size + bag];
  }
  int64_t all;
  Scan::before(storage, ids, all);
  if (threadIdx.x == 0) out.counts[out.at[feature]] = all;
}

// Begins of the ids of a segment: in the ids of the blocks, by segment, and in the batch, in order.
struct Starts {
  int64_t* from;
  int64_t* to;
};

__device__ int64_t count_of(const Blocks& blocks, int64_t segment) {
  return blocks.counts[segment + segment / blocks.num_features];
}

// One block: exclusive sums of the segments' counts in both orders.
__global__ void __launch_bounds__(kThreads) segment_starts(Blocks blocks, Starts starts) {
  __shared__ Scan::Storage storage;
  const int64_t segments = blocks.num_ranks * blocks.num_features;
  int64_t arrived = 0, placed = 0;
  for (int64_t first = 0; first < segments; first += kThreads) {
    const int64_t s = first + threadIdx.x;
    const bool valid = s < segments;
    int64_t total;
    int64_t sum = Scan::before(storage, valid ? count_of(blocks, s) : 0, total);
    if (valid) starts.from[s] = arrived + sum;
    arrived += total;
    __syncthreads();  // the storage is reused
    sum = Scan::before(storage, valid ? count_of(blocks, blocks.order[s]) : 0, total);
    if (valid) starts.to[s] = placed + sum;
    placed += total;
    __syncthreads();
  }
}

// Lengths and offsets of a segment's bags, by one block.
template <typename Length>
__device__ void copy_lengths(const int64_t* from, int64_t n, int64_t first_id, Length* lengths,
                             int64_t* offsets) {
  __shared__ Scan::Storage storage;
  for (int64_t first = 0; first < n; first += kThreads * kBagsOfThread) {
    int64_t sums[kBagsOfThread], all = 0, total;
    const int64_t thread_begin = first + threadIdx.x * kBagsOfThread;
#pragma unroll
    for (int i = 0; i < kBagsOfThread; ++i) {
      sums[i] = thread_begin + i < n ? from[thread_begin + i] : 0;
      if (thread_begin + i < n) lengths[thread_begin + i] = static_cast<Length>(sums[i]);
      all += sums[i];
    }
    int64_t at = first_id + Scan::before(storage, all, total);
#pragma unroll
    for (int i = 0; i < kBagsOfThread; ++i) {
      if (thread_begin + i < n) offsets[thread_begin + i] = at;
      at += sums[i];
    }
    first_id += total;
    __syncthreads();  // the storage is reused
  }
}

// Blocks (k, 0) take lengths and offsets of the k-th segment of the batch; the others its ids.
__global__ void __launch_bounds__(kThreads)
    copy_segments(Blocks blocks, MergedBatch out, Starts starts) {
  const int64_t segments = blocks.num_ranks * blocks.num_features;
  const int64_t k = blockIdx.x, s = blocks.order[k], rank = s / blocks.num_features;
  const int64_t lengths_of_block = blocks.num_features * blocks.batch_size;
  const int64_t first_of_rank = starts.from[rank * blocks.num_features];
  const int64_t first_id = starts.to[k];
  if (blockIdx.y == 0) {
    const int64_t* const lengths = blocks.words + first_of_rank + rank * lengths_of_block +
                                   (s % blocks.num_features) * blocks.batch_size;
    const int64_t first_bag = k * blocks.batch_size;
    int64_t* const offsets = out.offsets + first_bag;
    if (out.narrow_lengths) {
      copy_lengths(lengths, blocks.batch_size, first_id,
                   static_cast<int32_t*>(out.lengths) + first_bag, offsets);
    } else {
      copy_lengths(lengths, blocks.batch_size, first_id,
                   static_cast<int64_t*>(out.lengths) + first_bag, offsets);
    }
    if (k == segments - 1 && threadIdx.x == 0) {
      out.offsets[segments * blocks.batch_size] = first_id + count_of(blocks, s);
    }
    return;
  }
  const int64_t n = min(count_of(blocks, s), blocks.num_ids - first_id);
  const int64_t* const ids = blocks.words + starts.from[s] + (rank + 1) * lengths_of_block;
  const float* const weights = blocks.weights + starts.from[s];
  const int64_t stride = static_cast<int64_t>(gridDim.y - 1) * kThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.y - 1) * kThreads + threadIdx.x; i < n;
       i += stride) {
    out.ids[first_id + i] = ids[i];
    if (out.weights != nullptr) out.weights[first_id + i] = weights[i];
  }
}

}  // namespace

void count_ids(const void* lengths, bool narrow, const Counts& out, cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>(out.num_features + 1);
  if (narrow) {
    count_kernel<<<blocks, kThreads, 0, stream>>>(static_cast<const int32_t*>(lengths), out);
  } else {
    count_kernel<<<blocks, kThreads, 0, stream>>>(static_cast<const int64_t*>(lengths), out);
  }
  HKV_CUDA_CHECK_LAUNCH();
}

int64_t merge_blocks_scratch(int64_t num_segments) {
  return 2 * num_segments * static_cast<int64_t>(sizeof(int64_t));
}

void merge_blocks(const Blocks& blocks, MergedBatch out, void* scratch, cudaStream_t stream) {
  const int64_t segments = blocks.num_segments();
  if (segments == 0) {
    HKV_CUDA_CHECK(cudaMemsetAsync(out.offsets, 0, sizeof(int64_t), stream));
    return;
  }
  const Starts starts{static_cast<int64_t*>(scratch), static_cast<int64_t*>(scratch) + segments};
  segment_starts<<<1, kThreads, 0, stream>>>(blocks, starts);
  HKV_CUDA_CHECK_LAUNCH();
  const int64_t parts = blocks.num_ids / segments / kIdsOfBlock + 1;
  const dim3 grid(static_cast<unsigned>(segments),
                  static_cast<unsigned>(1 + min(parts, int64_t{64})));
  copy_segments<<<grid, kThreads, 0, stream>>>(blocks, out, starts);
  HKV_CUDA_CHECK_LAUNCH();
}

}  // namespace torchrec_hkv::routing::cuda
