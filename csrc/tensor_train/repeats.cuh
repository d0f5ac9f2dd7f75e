// Ids that occur more than once in a batch: see repeats.cu; and bags that gather rows: pool.cu.
#pragma once

#include "tensor_train/index.cuh"

namespace torchrec_hkv::tensor_train::cuda {

struct RepeatsInput {
  const int32_t* slots;
  const uint32_t* places;
  const float* place_factors;
  const int32_t* slot_dims;  // null: all have `dim`
  int32_t dim;
  int32_t widest;
  int32_t unit;
  int64_t num_ids;
};
RepeatsInput repeats_of(const Plan& plan, const Batch& batch, const Index& index);

// slot_grads[slot] = sum of the gradients of the slot's positions.
void sum_repeated_grads(const RepeatsInput& in, const float* grad, float* slot_grads,
                        cudaStream_t stream);
// Adds the row of each slot to the places of its positions, or stores it there.
void spread_repeated_rows(const RepeatsInput& in, const Counts* counts, const float* slot_rows,
                          bool store, float* out, cudaStream_t stream);
void clear_outside(const RepeatsInput& in, float* out, cudaStream_t stream);

// Where bags gather: out from the rows of distinct ids.
void gather_rows(const Plan& plan, const Batch& batch, const Index& index, const float* rows,
                 float* out, cudaStream_t stream);

}  // namespace torchrec_hkv::tensor_train::cuda
