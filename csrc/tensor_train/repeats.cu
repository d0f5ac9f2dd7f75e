// Ids that occur more than once: their rows are spread over the output after they were computed.
// Sorted positions are walked in chunks of 32, a chunk a warp.
#include "common/cuda_check.h"
#include "tensor_train/repeats.cuh"
#include "tensor_train/tensor_core.cuh"

namespace torchrec_hkv::tensor_train::cuda {
namespace {

constexpr int kThreads = 128;
template <int kWidth>
__global__ void __launch_bounds__(kThreads)
    spread_slot_rows(RepeatsInput in, const Counts* counts, const float* __restrict__ slot_rows,
                     bool store, float* out) {
  enter_chain();
  if (counts->gather != 0) return;
  const int64_t thread = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const Chunk chunk(in, thread / 32 * kChunk);
  if (chunk.repeats == 0) return;
  for (int column = threadIdx.x % 32 * kWidth; column - threadIdx.x % 32 * kWidth < in.widest;
       column += 32 * kWidth) {
    for (int begin = 0; begin < kChunk; begin += kRowsAhead) {
      if ((chunk.repeats >> begin & ((1u << kRowsAhead) - 1)) == 0) continue;
      Columns<kWidth> rows[kRowsAhead];
#pragma unroll
      for (int j = 0; j < kRowsAhead; ++j) {
        const int32_t slot = __shfl_sync(kAllLanes, chunk.slot, begin + j);
        const float factor = __shfl_sync(kAllLanes, chunk.factor, begin + j);
        const int32_t dim = __shfl_sync(kAllLanes, chunk.dim, begin + j);
        rows[j] = {};
        if ((chunk.repeats >> (begin + j) & 1) != 0 && column < dim) {
          rows[j].load(slot_rows + static_cast<size_t>(slot) * in.widest + column, factor);
        }
      }
#pragma unroll
      for (int j = 0; j < kRowsAhead; ++j) {
        const uint32_t place = __shfl_sync(kAllLanes, chunk.place, begin + j);
        const int32_t dim = __shfl_sync(kAllLanes, chunk.dim, begin + j);
        if ((chunk.repeats >> (begin + j) & 1) == 0 || column >= dim) continue;
        float* to = out + static_cast<size_t>(place) * in.unit + column;
        if (store) {
          rows[j].store(to);
        } else {
          rows[j].add_to(to);
        }
      }
    }
  }
}

// Zeros for the rows of unpooled ids outside of their tables.
__global__ void __launch_bounds__(kThreads) clear_outside_rows(RepeatsInput in, float* out) {
  enter_chain();
  const int64_t at = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (at >= in.num_ids || in.slots[at] != kOutside) return;
  float* to = out + static_cast<size_t>(in.places[at]) * in.unit;
  for (int column = 0; column < in.dim; ++column) to[column] = 0.0f;
}

LaunchShape warp_a_chunk(const RepeatsInput& in) {
  const int64_t chunks = (in.num_ids + kChunk - 1) / kChunk;
  return {dim3(static_cast<unsigned>((chunks * 32 + kThreads - 1) / kThreads)), kThreads};
}

}  // namespace

RepeatsInput repeats_of(const Plan& plan, const Batch& batch, const Index& index) {
  return {index.slots, index.places, index.place_factors,  index.slot_dims,
          plan.dim,    plan.widest,  unit_of(plan, batch), batch.num_ids};
}

void spread_repeated_rows(const RepeatsInput& in, const Counts* counts, const float* slot_rows,
                          bool store, float* out, cudaStream_t stream) {
  const LaunchShape shape = warp_a_chunk(in);
  if (in.unit == 4) {
    launch_chained(spread_slot_rows<2>, shape, stream, in, counts, slot_rows, store, out);
  } else {
    launch_chained(spread_slot_rows<1>, shape, stream, in, counts, slot_rows, store, out);
  }
}

void clear_outside(const RepeatsInput& in, float* out, cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>((in.num_ids + kThreads - 1) / kThreads);
  launch_chained(clear_outside_rows, {dim3(blocks), kThreads}, stream, in, out);
}

}  // namespace torchrec_hkv::tensor_train::cuda
