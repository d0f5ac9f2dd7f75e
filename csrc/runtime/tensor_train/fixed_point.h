// Bit-reproducible gradients of Tensor-Train cores on a GPU. A sum of floats from many blocks
// depends on their order; a sum of integers does not. Each core's gradient is therefore summed in
// 64-bit fixed point. Its unit follows from a bound on the gradient, by the largest values of
// cores, of the output's gradient and of the weights. It is so small that no precision is lost
// compared with floats.
#pragma once

#ifdef TORCHREC_HKV_CUDA

#include <optional>

#include "runtime/tensor.h"
#include "runtime/tensor_train/group.h"
#include "tensor_train/cuda/kernels.h"

namespace torchrec_hkv::runtime {

class FixedPointGradients {
 public:
  // For a batch of num_ids ids. Does not wait for the device.
  FixedPointGradients(const TensorTrainGroup& group, const TensorTrainPlan& plan,
                      at::TensorList cores, const at::Tensor& grad,
                      const std::optional<at::Tensor>& weights, int64_t num_ids);

  tensor_train::cuda::FixedPointSums view() const;
  // Writes the plan's gradients, including those of heads of four cores.
  void finish(const TensorTrainGroup& group, const TensorTrainPlan& plan) const;

 private:
  at::Tensor sums_;    // int64, one per float of the plan's zeros
  at::Tensor scales_;  // float64 [tables, 3]
  const float* grads_;
};

}  // namespace torchrec_hkv::runtime

#endif
