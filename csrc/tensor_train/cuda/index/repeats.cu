// Sets up arguments of kernels for repeated ids, and zeroes outputs to which rows are added and
// rows of ids outside their tables.
#include "common/cuda_check.h"
#include "tensor_train/cuda/contract/tensor_core.cuh"
#include "tensor_train/cuda/index/repeats.cuh"

namespace torchrec_hkv::tensor_train::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kClearThreads = 256;
constexpr int kClearBlocks = 8;  // blocks per multiprocessor

// Zeroes the rows of unpooled ids outside their tables.
__global__ void __launch_bounds__(kThreads) clear_outside_rows(RepeatsInput in, float* out) {
  begin_dependent_kernel();
  const int64_t at = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (at >= in.num_ids || in.slots[at] != kOutside) return;
  float* to = out + static_cast<size_t>(in.places[at]) * in.unit;
  for (int column = 0; column < in.dim; ++column) to[column] = 0.0f;
}

// Zeroes an output to which rows are added; not if bags gather, because they write all of it.
__global__ void __launch_bounds__(kClearThreads)
    clear_kernel(const IndexCounts* counts, int64_t values, float* out) {
  wait_for_kernel_before();
  let_next_kernel_start();
  if (counts->gather != 0) return;
  const int64_t threads = static_cast<int64_t>(gridDim.x) * kClearThreads;
  const int64_t thread = static_cast<int64_t>(blockIdx.x) * kClearThreads + threadIdx.x;
  const int64_t fours = reinterpret_cast<uintptr_t>(out) % 16 == 0 ? values / 4 : 0;
#pragma unroll 4
  for (int64_t i = thread; i < fours; i += threads) {
    reinterpret_cast<float4*>(out)[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  }
  for (int64_t i = 4 * fours + thread; i < values; i += threads) out[i] = 0.0f;
}

}  // namespace

void clear_output(const Index& index, int64_t values, int32_t multiprocessors, float* out,
                  cudaStream_t stream) {
  constexpr int64_t kEach = 16;  // least number of values per thread
  const int64_t all = (values + kClearThreads * kEach - 1) / (kClearThreads * kEach);
  const int64_t most = int64_t{kClearBlocks} * multiprocessors;
  if (all == 0) return;
  launch_dependent(clear_kernel,
                   {dim3(static_cast<unsigned>(all < most ? all : most)), kClearThreads}, stream,
                   index.counts, values, out);
}

RepeatsInput repeats_of(const Plan& plan, const BatchCuda& batch, const Index& index) {
  return {
      index.slots, index.places,         index.place_factors, index.slot_dims,      plan.dim,
      plan.widest, unit_of(plan, batch), batch.num_ids,       plan.multiprocessors, plan.clusters};
}

void clear_outside(const RepeatsInput& in, float* out, cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>((in.num_ids + kThreads - 1) / kThreads);
  launch_dependent(clear_outside_rows, {dim3(blocks), kThreads}, stream, in, out);
}

}  // namespace torchrec_hkv::tensor_train::cuda
