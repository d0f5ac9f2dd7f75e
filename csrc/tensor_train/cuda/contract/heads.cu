// Heads of tables with four cores: the products of the first two cores. The work grows with the
// number of heads, p_0 p_1, not with the batch. Products are in fp32.
#include "common/cuda_check.h"
#include "tensor_train/cuda/contract/tensor_core.cuh"
#include "tensor_train/cuda/kernels.h"

namespace torchrec_hkv::tensor_train::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kRanks = 8;  // ranks r_1 that a thread processes at once

__device__ __forceinline__ float core_element(const HeadView& view, const void* core, size_t at) {
  return load_element(view.type, static_cast<const char*>(core), static_cast<int64_t>(at));
}

// heads[i0 p1 + i1][d0 q1 + d1][r] = sum over s of first[i0][d0][s] second[i1][s][d1][r].
__global__ void __launch_bounds__(kThreads) make_heads_kernel(HeadView view) {
  begin_dependent_kernel();
  const int64_t columns = static_cast<int64_t>(view.q1) * view.r2;
  const int64_t all = static_cast<int64_t>(view.p0) * view.p1 * view.q0 * columns;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t at = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; at < all;
       at += step) {
    const int64_t column = at % columns;
    const int64_t d0 = at / columns % view.q0;
    const int64_t head = at / columns / view.q0;
    const int64_t i0 = head / view.p1, i1 = head % view.p1;
    const size_t first = static_cast<size_t>(i0 * view.q0 + d0) * view.r1;
    const size_t second = static_cast<size_t>(i1) * view.r1 * columns + column;
    float sum = 0.0f;
#pragma unroll 4
    for (int s = 0; s < view.r1; ++s) {
      sum += core_element(view, view.first, first + s) *
             core_element(view, view.second, second + static_cast<size_t>(s) * columns);
    }
    view.heads[at] = sum;
  }
}

// A thread computes a column (d1, r) of slice i1 = block x, for kRanks values of r_1.
__global__ void __launch_bounds__(kThreads) second_grad_kernel(HeadView view) {
  begin_dependent_kernel();
  const int i1 = blockIdx.x;
  const int first_rank = blockIdx.y * kRanks;
  const int columns = view.q1 * view.r2;
  const int column = blockIdx.z * kThreads + threadIdx.x;
  float sums[kRanks] = {};
  bool any = false;
  for (int i0 = 0; i0 < view.p0; ++i0) {
    const size_t head = static_cast<size_t>(i0) * view.p1 + i1;
    if (view.heads_touched[head] == 0) continue;
    any = true;
    if (column >= columns) continue;
    for (int d0 = 0; d0 < view.q0; ++d0) {
      const float g = view.heads_grad[(head * view.q0 + d0) * columns + column];
      const size_t first = (static_cast<size_t>(i0) * view.q0 + d0) * view.r1 + first_rank;
#pragma unroll
      for (int s = 0; s < kRanks; ++s) {
        if (first_rank + s < view.r1) sums[s] += g * core_element(view, view.first, first + s);
      }
    }
  }
  if (!any) return;
  if (threadIdx.x == 0) view.second_touched[i1] = 1;
  if (column >= columns) return;
#pragma unroll
  for (int s = 0; s < kRanks; ++s) {
    if (first_rank + s >= view.r1) break;
    view.second_grad[(static_cast<size_t>(i1) * view.r1 + first_rank + s) * columns + column] +=
        sums[s];
  }
}

// A warp computes row (i0, d0) = (block x, block z), for kRanks values of r_1 from block y.
__global__ void __launch_bounds__(kThreads) first_grad_kernel(HeadView view) {
  begin_dependent_kernel();
  __shared__ float shared[kThreads / 32][kRanks];
  const int i0 = blockIdx.x, d0 = blockIdx.z;
  const int first_rank = blockIdx.y * kRanks;
  const int columns = view.q1 * view.r2;
  float sums[kRanks] = {};
  bool any = false;
  for (int i1 = 0; i1 < view.p1; ++i1) {
    const size_t head = static_cast<size_t>(i0) * view.p1 + i1;
    if (view.heads_touched[head] == 0) continue;
    any = true;
    for (int column = threadIdx.x; column < columns; column += kThreads) {
      const float g = view.heads_grad[(head * view.q0 + d0) * columns + column];
      const size_t second = (static_cast<size_t>(i1) * view.r1 + first_rank) * columns + column;
#pragma unroll
      for (int s = 0; s < kRanks; ++s) {
        if (first_rank + s < view.r1) {
          sums[s] += g * core_element(view, view.second, second + static_cast<size_t>(s) * columns);
        }
      }
    }
  }
  if (!any) return;
#pragma unroll
  for (int s = 0; s < kRanks; ++s) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
      sums[s] += __shfl_xor_sync(kAllLanes, sums[s], step);
    }
    if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32][s] = sums[s];
  }
  __syncthreads();
  const int s = threadIdx.x;
  if (s == 0) view.first_touched[i0] = 1;
  if (s >= kRanks || first_rank + s >= view.r1) return;
  float sum = 0.0f;
  for (int w = 0; w < kThreads / 32; ++w) sum += shared[w][s];
  view.first_grad[(static_cast<size_t>(i0) * view.q0 + d0) * view.r1 + first_rank + s] += sum;
}

__global__ void __launch_bounds__(kThreads) clear_heads_kernel(HeadView view) {
  begin_dependent_kernel();
  const size_t head = blockIdx.x;
  if (view.heads_touched[head] == 0) return;
  const int values = view.q0 * view.q1 * view.r2;
  for (int i = threadIdx.x; i < values; i += kThreads) view.heads_grad[head * values + i] = 0.0f;
  __syncthreads();
  if (threadIdx.x == 0) view.heads_touched[head] = 0;
}

unsigned parts(int64_t of, int64_t by) { return static_cast<unsigned>((of + by - 1) / by); }

}  // namespace

void make_heads(const HeadView& view, cudaStream_t stream) {
  const int64_t all = static_cast<int64_t>(view.p0) * view.p1 * view.q0 * view.q1 * view.r2;
  const unsigned blocks = all / kThreads < 65536 ? parts(all, kThreads) : 65536u;
  launch_dependent(make_heads_kernel, {dim3(blocks), kThreads}, stream, view);
}

void heads_backward(const HeadView& view, cudaStream_t stream) {
  const unsigned ranks = parts(view.r1, kRanks);
  const unsigned columns = parts(static_cast<int64_t>(view.q1) * view.r2, kThreads);
  launch_dependent(second_grad_kernel,
                   {dim3(static_cast<unsigned>(view.p1), ranks, columns), kThreads}, stream, view);
  launch_dependent(
      first_grad_kernel,
      {dim3(static_cast<unsigned>(view.p0), ranks, static_cast<unsigned>(view.q0)), kThreads},
      stream, view);
  launch_dependent(
      clear_heads_kernel,
      {dim3(static_cast<unsigned>(view.p0) * static_cast<unsigned>(view.p1)), kThreads}, stream,
      view);
}

}  // namespace torchrec_hkv::tensor_train::cuda
