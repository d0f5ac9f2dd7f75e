// Ids that occur more than once in a batch: see repeated_grads.cu, pool.cu and repeats.cu.
#pragma once

#include "tensor_train/cuda/contract/tensor_core.cuh"
#include "tensor_train/cuda/index/index.cuh"
#include "tensor_train/cuda/index/touched_slices.cuh"

namespace torchrec_hkv::tensor_train::cuda {

struct RepeatsInput {
  const int32_t* slots;
  const uint32_t* places;
  const float* place_factors;
  const int32_t* slot_dims;  // null if all slots have `dim`
  int32_t dim;
  int32_t widest;
  int32_t unit;
  int64_t num_ids;
  int32_t multiprocessors;
  bool clusters;  // whether the device has clusters
};
RepeatsInput repeats_of(const Plan& plan, const BatchCuda& batch, const Index& index);

// Computes slot_grads[slot], the sum of the gradients of the slot's positions. It is
// bit-reproducible: at most 32 gradients are summed in single precision, and these sums in double.
// partials: memory of partial_grads_bytes. steps: incremented; may be null. touch: flags of slices,
// which are set concurrently. The next kernel of the stream may read the index before it waits for
// the sums.
size_t partial_grads_bytes(const Plan& plan, const BatchCuda& batch);
void sum_repeated_grads(const RepeatsInput& in, const float* grad, float* slot_grads,
                        void* partials, int64_t* steps, const TouchInput& touch,
                        cudaStream_t stream);
// Zeroes an output of pooled rows if rows will be added to it. The next kernel of the stream may
// read the index before it waits.
void clear_output(const Index& index, int64_t values, int32_t multiprocessors, float* out,
                  cudaStream_t stream);
void clear_outside(const RepeatsInput& in, float* out, cudaStream_t stream);

// Computes out from rows in scratch memory. always: bags gather the rows of distinct ids, for any
// number of repeats. Otherwise they gather if the index has enough repeats; if not, the row of each
// slot is added to the places of its positions, or stored there without pooling. May read the index
// before the previous kernel has ended.
void pool_rows(const Plan& plan, const BatchCuda& batch, const Index& index, const float* rows,
               bool always, float* out, cudaStream_t stream);

// kWidth columns of a row.
template <int kWidth>
struct GradColumns {
  float v[kWidth];

  __device__ __forceinline__ void load(const float* from, float factor) {
    if constexpr (kWidth == 4) {
      const float4 four = *reinterpret_cast<const float4*>(from);
      v[0] = four.x * factor;
      v[1] = four.y * factor;
      v[2] = four.z * factor;
      v[3] = four.w * factor;
    } else if constexpr (kWidth == 2) {
      const float2 pair = *reinterpret_cast<const float2*>(from);
      v[0] = pair.x * factor;
      v[1] = pair.y * factor;
    } else {
      v[0] = *from * factor;
    }
  }
  __device__ __forceinline__ void read(const float* from) {
    if constexpr (kWidth == 4) {
      *reinterpret_cast<float4*>(v) = *reinterpret_cast<const float4*>(from);
    } else if constexpr (kWidth == 2) {
      *reinterpret_cast<float2*>(v) = *reinterpret_cast<const float2*>(from);
    } else {
      v[0] = *from;
    }
  }
  __device__ __forceinline__ void store(float* to) const {
    if constexpr (kWidth == 4) {
      *reinterpret_cast<float4*>(to) = make_float4(v[0], v[1], v[2], v[3]);
    } else if constexpr (kWidth == 2) {
      *reinterpret_cast<float2*>(to) = make_float2(v[0], v[1]);
    } else {
      *to = v[0];
    }
  }
  __device__ __forceinline__ void add_to(float* to) const {
    if constexpr (kWidth == 4) {
      add_four(to, make_float4(v[0], v[1], v[2], v[3]));
    } else if constexpr (kWidth == 2) {
      add_two(to, v[0], v[1]);
    } else {
      add_one(to, v[0]);
    }
  }
};

// The sorted positions of a warp's chunk, one per lane, as bits.
struct WarpChunk {
  int32_t slot;
  uint32_t place;
  float factor;
  int32_t dim;
  unsigned repeats;  // positions that belong to a slot
  unsigned heads;    // positions that are the first of their slot
  unsigned tails;

  // first: the chunk's first position.
  __device__ __forceinline__ WarpChunk(const RepeatsInput& in, int64_t first) {
    const int64_t at = first + threadIdx.x % 32;
    auto slot_at = [&](int64_t i) { return i >= 0 && i < in.num_ids ? in.slots[i] : kNoSlot; };
    slot = slot_at(at);
    const bool has_slot = slot >= 0;
    repeats = __ballot_sync(kAllLanes, has_slot);
    heads = __ballot_sync(kAllLanes, has_slot && slot_at(at - 1) != slot);
    tails = __ballot_sync(kAllLanes, has_slot && slot_at(at + 1) != slot);
    place = has_slot ? in.places[at] : 0;
    factor = has_slot && in.place_factors != nullptr ? in.place_factors[at] : 1.0f;
    dim = has_slot && in.slot_dims != nullptr ? in.slot_dims[slot] : in.dim;
  }
};
static_assert(kChunk == 32, "a position a lane");
constexpr int kRowsAhead = 8;  // rows that are read before the first is used

}  // namespace torchrec_hkv::tensor_train::cuda
