// Ids that occur more than once: their rows are spread over the output after they were computed.
// A warp lists those among 128 sorted positions first, as they are few where this is much to do.
#include <algorithm>

#include "common/cuda_check.h"
#include "tensor_train/repeats.cuh"
#include "tensor_train/tensor_core.cuh"

namespace torchrec_hkv::tensor_train::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kSpan = 128;  // sorted positions that a warp looks at at once

// A repeated position: its slot, and where its row goes.
struct Repeat {
  int32_t slot;
  uint32_t place;
  float factor;
};

// Repeats among the kSpan positions from `first` on, in their order, into a list of the warp. How
// many there are.
__device__ __forceinline__ int list_repeats(const RepeatsInput& in, int64_t first, Repeat* list) {
  static_assert(kSpan == 4 * 32, "four positions a lane");
  const int lane = threadIdx.x % 32;
  const int64_t at = first + 4 * lane;
  int32_t slots[4] = {kNoSlot, kNoSlot, kNoSlot, kNoSlot};
  if (at + 4 <= in.num_ids) {
    *reinterpret_cast<int4*>(slots) = *reinterpret_cast<const int4*>(in.slots + at);
  } else {
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      if (at + k < in.num_ids) slots[k] = in.slots[at + k];
    }
  }
  int mine = 0;
#pragma unroll
  for (int k = 0; k < 4; ++k) mine += slots[k] >= 0 ? 1 : 0;
  int to = mine;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int other = __shfl_up_sync(kAllLanes, to, step);
    if (lane >= step) to += other;
  }
  const int all = __shfl_sync(kAllLanes, to, 31);
  to -= mine;
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    if (slots[k] < 0) continue;
    list[to++] = {slots[k], in.places[at + k],
                  in.place_factors != nullptr ? in.place_factors[at + k] : 1.0f};
  }
  __syncwarp();
  return all;
}

// kLanes lanes a row, kWidth columns a lane.
template <int kLanes, int kWidth>
__global__ void __launch_bounds__(kThreads)
    spread_slot_rows(RepeatsInput in, const Counts* counts, const float* __restrict__ slot_rows,
                     bool store, float* out) {
  constexpr int kAtOnce = 32 / kLanes;  // rows of a warp
  constexpr int kAhead = 4;             // rows of a lane that are read before the first is used
  __shared__ Repeat lists[kThreads / 32][kSpan];
  enter_chain();
  if (counts->gather != 0) return;
  const int lane = threadIdx.x % 32;
  Repeat* const list = lists[threadIdx.x / 32];
  const int64_t warps = static_cast<int64_t>(gridDim.x) * (kThreads / 32);
  const int64_t warp = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) / 32;
  for (int64_t first = warp * kSpan; first < in.num_ids; first += warps * kSpan) {
    const int all = list_repeats(in, first, list);
    for (int base = 0; base < in.widest; base += kLanes * kWidth) {
      const int column = base + lane % kLanes * kWidth;
      for (int i = lane / kLanes; i < all; i += kAtOnce * kAhead) {
        Columns<kWidth> rows[kAhead];
        float* to[kAhead];
#pragma unroll
        for (int j = 0; j < kAhead; ++j) {
          to[j] = nullptr;
          if (i + j * kAtOnce >= all) continue;
          const Repeat repeat = list[i + j * kAtOnce];
          const int32_t dim = in.slot_dims != nullptr ? in.slot_dims[repeat.slot] : in.dim;
          if (column >= dim) continue;
          rows[j].load(slot_rows + static_cast<size_t>(repeat.slot) * in.widest + column,
                       repeat.factor);
          to[j] = out + static_cast<size_t>(repeat.place) * in.unit + column;
        }
#pragma unroll
        for (int j = 0; j < kAhead; ++j) {
          if (to[j] == nullptr) continue;
          if (store) {
            rows[j].store(to[j]);
          } else {
            rows[j].add_to(to[j]);
          }
        }
      }
    }
    __syncwarp();  // the list is done with
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
LaunchShape warps_for_spans(const RepeatsInput& in) {
  constexpr int64_t kBlocks = 2048 / kThreads;  // of a multiprocessor
  const int64_t spans = (in.num_ids + kSpan - 1) / kSpan;
  const int64_t blocks =
      std::min((spans * 32 + kThreads - 1) / kThreads, kBlocks * in.multiprocessors);
  return {dim3(static_cast<unsigned>(blocks)), kThreads};
}

}  // namespace

RepeatsInput repeats_of(const Plan& plan, const Batch& batch, const Index& index) {
  return {index.slots, index.places,         index.place_factors, index.slot_dims,     plan.dim,
          plan.widest, unit_of(plan, batch), batch.num_ids,       plan.multiprocessors};
}

void spread_repeated_rows(const RepeatsInput& in, const Counts* counts, const float* slot_rows,
                          bool store, float* out, cudaStream_t stream) {
  auto run = [&](auto kernel) {
    launch_chained(kernel, warps_for_spans(in), stream, in, counts, slot_rows, store, out);
  };
  if (in.unit == 1) {
    run(spread_slot_rows<32, 1>);
  } else if (in.widest <= 32) {
    run(spread_slot_rows<8, 4>);
  } else if (in.widest <= 64) {
    run(spread_slot_rows<16, 4>);
  } else {
    run(spread_slot_rows<32, 4>);
  }
}

void clear_outside(const RepeatsInput& in, float* out, cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>((in.num_ids + kThreads - 1) / kThreads);
  launch_chained(clear_outside_rows, {dim3(blocks), kThreads}, stream, in, out);
}

}  // namespace torchrec_hkv::tensor_train::cuda
