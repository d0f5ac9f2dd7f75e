// What kernels know of repeated ids, and the rows of ids outside of their tables.
#include "common/cuda_check.h"
#include "tensor_train/repeats.cuh"
#include "tensor_train/tensor_core.cuh"

namespace torchrec_hkv::tensor_train::cuda {
namespace {

constexpr int kThreads = 128;

// Zeros for the rows of unpooled ids outside of their tables.
__global__ void __launch_bounds__(kThreads) clear_outside_rows(RepeatsInput in, float* out) {
  enter_chain();
  const int64_t at = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (at >= in.num_ids || in.slots[at] != kOutside) return;
  float* to = out + static_cast<size_t>(in.places[at]) * in.unit;
  for (int column = 0; column < in.dim; ++column) to[column] = 0.0f;
}

}  // namespace

RepeatsInput repeats_of(const Plan& plan, const Batch& batch, const Index& index) {
  return {index.slots, index.places,         index.place_factors, index.slot_dims,     plan.dim,
          plan.widest, unit_of(plan, batch), batch.num_ids,       plan.multiprocessors};
}

void clear_outside(const RepeatsInput& in, float* out, cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>((in.num_ids + kThreads - 1) / kThreads);
  launch_chained(clear_outside_rows, {dim3(blocks), kThreads}, stream, in, out);
}

}  // namespace torchrec_hkv::tensor_train::cuda
