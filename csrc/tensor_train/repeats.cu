// Ids that occur more than once: their rows are spread over the output after they were computed.
// Sorted positions are walked in chunks of 32, a chunk a warp.
#include <algorithm>

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
  const int lane = threadIdx.x % 32;
  const int64_t warps = static_cast<int64_t>(gridDim.x) * (kThreads / 32);
  const int64_t warp = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) / 32;
  for (int64_t first = warp * kChunk; first < in.num_ids; first += warps * kChunk) {
    const Chunk chunk(in, first);
    for (int base = 0; base < in.widest; base += 32 * kWidth) {
      const int column = base + lane * kWidth;
      for (unsigned left = chunk.repeats; left != 0;) {
        Columns<kWidth> rows[kRowsAhead];
        int lanes[kRowsAhead];
#pragma unroll
        for (int j = 0; j < kRowsAhead; ++j) {
          lanes[j] = take_lowest(&left);
          const int of = max(lanes[j], 0);
          const int32_t slot = __shfl_sync(kAllLanes, chunk.slot, of);
          const float factor = __shfl_sync(kAllLanes, chunk.factor, of);
          const int32_t dim = __shfl_sync(kAllLanes, chunk.dim, of);
          rows[j] = {};
          if (lanes[j] >= 0 && column < dim) {
            rows[j].load(slot_rows + static_cast<size_t>(slot) * in.widest + column, factor);
          }
        }
#pragma unroll
        for (int j = 0; j < kRowsAhead; ++j) {
          const int of = max(lanes[j], 0);
          const uint32_t place = __shfl_sync(kAllLanes, chunk.place, of);
          const int32_t dim = __shfl_sync(kAllLanes, chunk.dim, of);
          if (lanes[j] < 0 || column >= dim) continue;
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
}

// Zeros for the rows of unpooled ids outside of their tables.
__global__ void __launch_bounds__(kThreads) clear_outside_rows(RepeatsInput in, float* out) {
  enter_chain();
  const int64_t at = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (at >= in.num_ids || in.slots[at] != kOutside) return;
  float* to = out + static_cast<size_t>(in.places[at]) * in.unit;
  for (int column = 0; column < in.dim; ++column) to[column] = 0.0f;
}

// No more blocks than run at a time: where bags gather, all of them end at once.
LaunchShape warps_for_chunks(const RepeatsInput& in) {
  constexpr int64_t kBlocks = 2048 / kThreads;  // of a multiprocessor
  const int64_t chunks = (in.num_ids + kChunk - 1) / kChunk;
  const int64_t blocks =
      std::min((chunks * 32 + kThreads - 1) / kThreads, kBlocks * in.multiprocessors);
  return {dim3(static_cast<unsigned>(blocks)), kThreads};
}

}  // namespace

RepeatsInput repeats_of(const Plan& plan, const Batch& batch, const Index& index) {
  return {index.slots, index.places,         index.place_factors, index.slot_dims,     plan.dim,
          plan.widest, unit_of(plan, batch), batch.num_ids,       plan.multiprocessors};
}

void spread_repeated_rows(const RepeatsInput& in, const Counts* counts, const float* slot_rows,
                          bool store, float* out, cudaStream_t stream) {
  const LaunchShape shape = warps_for_chunks(in);
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
