// The lookup of Tensor-Train tables in plain torch operations, for second derivatives.
#pragma once

#include <optional>

#include "runtime/tensor.h"

namespace torchrec_hkv::bindings {

// Returns the same as tt_lookup. Autograd records each operation, so that gradients of the result
// can be differentiated again. It needs memory for a row and its partial products for each id, and
// waits for a GPU.
at::Tensor differentiable_lookup(at::TensorList cores, int64_t group, const at::Tensor& ids,
                                 const at::Tensor& offsets,
                                 const std::optional<at::Tensor>& weights, int64_t batch_size,
                                 bool mean, bool pooled);

}  // namespace torchrec_hkv::bindings
