// Gradients without a derivative.
#pragma once

#include <torch/csrc/autograd/functions/basic_ops.h>

#include <memory>
#include <string>

#include "runtime/tensor.h"

namespace torchrec_hkv::bindings {

// A gradient that a backward returns. If that backward is part of a graph (create_graph=True), the
// graph ends here: a backward that reaches this gradient raises `message`.
inline at::Tensor once_differentiable(const at::Tensor& gradient, const std::string& message) {
  if (!gradient.defined() || !at::GradMode::is_enabled()) return gradient;
  const auto refusal = std::make_shared<torch::autograd::DelayedError>(message, 1);
  return (*refusal)({gradient.detach().requires_grad_(true)})[0];
}

}  // namespace torchrec_hkv::bindings
