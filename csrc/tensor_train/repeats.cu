// Ids that occur more than once: their rows are spread over the output after they were computed,
// and their gradients are added up before. Sorted positions are walked in chunks of 32, a chunk a
// warp.
#include "common/cuda_check.h"
#include "tensor_train/repeats.cuh"
#include "tensor_train/tensor_core.cuh"

namespace torchrec_hkv::tensor_train::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kAhead = 8;  // rows that are read before the first is used
static_assert(kChunk == 32, "a position a lane");

template <int kWidth>
struct Columns {
  float v[kWidth];

  __device__ __forceinline__ void load(const float* from, float factor) {
    if constexpr (kWidth == 2) {
      const float2 pair = *reinterpret_cast<const float2*>(from);
      v[0] = pair.x * factor;
      v[1] = pair.y * factor;
    } else {
      v[0] = *from * factor;
    }
  }
  __device__ __forceinline__ void store(float* to) const {
    if constexpr (kWidth == 2) {
      *reinterpret_cast<float2*>(to) = make_float2(v[0], v[1]);
    } else {
      *to = v[0];
    }
  }
  __device__ __forceinline__ void add_to(float* to) const {
    if constexpr (kWidth == 2) {
      add_two(to, v[0], v[1]);
    } else {
      add_one(to, v[0]);
    }
  }
};

// The positions of a warp's chunk, one a lane, as bits.
struct Chunk {
  int64_t first;
  int32_t slot;
  uint32_t place;
  float factor;
  int32_t dim;
  unsigned repeats;  // that belong to a slot
  unsigned heads;    // that are the first of their slot
  unsigned tails;

  __device__ __forceinline__ Chunk(const RepeatsInput& in) {
    first = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) / 32 * kChunk;
    const int64_t at = first + threadIdx.x % 32;
    auto slot_at = [&](int64_t i) { return i >= 0 && i < in.num_ids ? in.slots[i] : kNoSlot; };
    slot = slot_at(at);
    const bool mine = slot >= 0;
    repeats = __ballot_sync(kAllLanes, mine);
    heads = __ballot_sync(kAllLanes, mine && slot_at(at - 1) != slot);
    tails = __ballot_sync(kAllLanes, mine && slot_at(at + 1) != slot);
    place = mine ? in.places[at] : 0;
    factor = mine && in.place_factors != nullptr ? in.place_factors[at] : 1.0f;
    dim = mine && in.slot_dims != nullptr ? in.slot_dims[slot] : in.dim;
  }
};

// Rows of slots that several chunks add to.
__global__ void __launch_bounds__(kThreads) clear_open_slots(RepeatsInput in, float* slot_grads) {
  enter_chain();
  const int64_t first = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) / 32 * kChunk;
  if (first == 0 || first >= in.num_ids) return;
  const int32_t slot = in.slots[first];
  if (slot < 0 || in.slots[first - 1] != slot) return;
  float4* to = reinterpret_cast<float4*>(slot_grads + static_cast<size_t>(slot) * in.widest);
  for (int i = threadIdx.x % 32; i < in.widest / 4; i += 32) {
    to[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  }
}

template <int kWidth>
__global__ void __launch_bounds__(kThreads)
    sum_slot_grads(RepeatsInput in, const float* __restrict__ grad, float* slot_grads) {
  enter_chain();
  const Chunk chunk(in);
  if (chunk.repeats == 0) return;
  for (int column = threadIdx.x % 32 * kWidth; column - threadIdx.x % 32 * kWidth < in.widest;
       column += 32 * kWidth) {
    Columns<kWidth> sum = {};
    bool open = (chunk.heads & 1) == 0;  // the slot began in an earlier chunk
    for (int begin = 0; begin < kChunk; begin += kAhead) {
      if ((chunk.repeats >> begin & ((1u << kAhead) - 1)) == 0) continue;
      Columns<kWidth> rows[kAhead];
#pragma unroll
      for (int j = 0; j < kAhead; ++j) {
        const uint32_t place = __shfl_sync(kAllLanes, chunk.place, begin + j);
        const float factor = __shfl_sync(kAllLanes, chunk.factor, begin + j);
        const int32_t dim = __shfl_sync(kAllLanes, chunk.dim, begin + j);
        rows[j] = {};
        if ((chunk.repeats >> (begin + j) & 1) != 0 && column < dim) {
          rows[j].load(grad + static_cast<size_t>(place) * in.unit + column, factor);
        }
      }
#pragma unroll
      for (int j = 0; j < kAhead; ++j) {
        const int at = begin + j;
        const int32_t slot = __shfl_sync(kAllLanes, chunk.slot, at);
        const int32_t dim = __shfl_sync(kAllLanes, chunk.dim, at);
        if ((chunk.repeats >> at & 1) == 0) continue;
        if ((chunk.heads >> at & 1) != 0) {
          sum = {};
          open = false;
        }
#pragma unroll
        for (int i = 0; i < kWidth; ++i) sum.v[i] += rows[j].v[i];
        const bool ends = (chunk.tails >> at & 1) != 0;
        if (!ends && at != kChunk - 1) continue;
        if (column >= dim) continue;
        float* to = slot_grads + static_cast<size_t>(slot) * in.widest + column;
        if (ends && !open) {
          sum.store(to);
        } else {
          sum.add_to(to);
        }
      }
    }
  }
}

template <int kWidth>
__global__ void __launch_bounds__(kThreads)
    spread_slot_rows(RepeatsInput in, const Counts* counts, const float* __restrict__ slot_rows,
                     bool store, float* out) {
  enter_chain();
  if (counts->gather != 0) return;
  const Chunk chunk(in);
  if (chunk.repeats == 0) return;
  for (int column = threadIdx.x % 32 * kWidth; column - threadIdx.x % 32 * kWidth < in.widest;
       column += 32 * kWidth) {
    for (int begin = 0; begin < kChunk; begin += kAhead) {
      if ((chunk.repeats >> begin & ((1u << kAhead) - 1)) == 0) continue;
      Columns<kWidth> rows[kAhead];
#pragma unroll
      for (int j = 0; j < kAhead; ++j) {
        const int32_t slot = __shfl_sync(kAllLanes, chunk.slot, begin + j);
        const float factor = __shfl_sync(kAllLanes, chunk.factor, begin + j);
        const int32_t dim = __shfl_sync(kAllLanes, chunk.dim, begin + j);
        rows[j] = {};
        if ((chunk.repeats >> (begin + j) & 1) != 0 && column < dim) {
          rows[j].load(slot_rows + static_cast<size_t>(slot) * in.widest + column, factor);
        }
      }
#pragma unroll
      for (int j = 0; j < kAhead; ++j) {
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

void sum_repeated_grads(const RepeatsInput& in, const float* grad, float* slot_grads,
                        cudaStream_t stream) {
  const LaunchShape shape = warp_a_chunk(in);
  launch_chained(clear_open_slots, shape, stream, in, slot_grads);
  if (in.unit == 4) {
    launch_chained(sum_slot_grads<2>, shape, stream, in, grad, slot_grads);
  } else {
    launch_chained(sum_slot_grads<1>, shape, stream, in, grad, slot_grads);
  }
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
