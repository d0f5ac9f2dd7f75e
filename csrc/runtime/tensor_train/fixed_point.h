// Gradients of Tensor-Train cores on a GPU that are the same bits in every run. Floats that many
// blocks add up depend on the order; integers do not. So each core's gradient is summed in 64 bits
// of fixed point, whose unit follows from a bound on it: the largest values of cores, of the
// output's gradient and of the weights. The unit is so small that nothing is lost against floats.
#pragma once

#ifdef TORCHREC_HKV_CUDA

#include <optional>

#include "runtime/tensor.h"
#include "runtime/tensor_train/group.h"
#include "tensor_train/cuda/kernels.h"

namespace torchrec_hkv::runtime {

class FixedPointGradients {
 public:
  // Of a batch of num_ids ids. Does not wait for the device.
  FixedPointGradients(const TensorTrainGroup& group, const TensorTrainPlan& plan,
                      at::TensorList cores, const at::Tensor& grad,
                      const std::optional<at::Tensor>& weights, int64_t num_ids);

  tensor_train::cuda::FixedPointSums view() const;
  // Writes the plan's gradients, of heads of four cores too.
  void finish(const TensorTrainGroup& group, const TensorTrainPlan& plan) const;

 private:
  at::Tensor sums_;    // int64, of each float of the plan's zeros
  at::Tensor scales_;  // float64 [tables, 3]
  const float* grads_;
};

}  // namespace torchrec_hkv::runtime

#endif
