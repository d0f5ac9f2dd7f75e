// Checks of the arguments of ops. The message names the value and what is allowed.
#pragma once

#include "runtime/tensor.h"

namespace torchrec_hkv::runtime {

// Upper bound on the ids and bags of a call: kernels store positions in 32 bits, and the scratch
// table of an insertion has at most 2^31 entries.
constexpr int64_t kMaxBatch = int64_t{1} << 31;

inline void check_dtype(const at::Tensor& tensor, const char* name, at::ScalarType dtype) {
  TORCH_CHECK_TYPE(tensor.scalar_type() == dtype, name, " must be of dtype ", dtype,
                   ", but is of dtype ", tensor.scalar_type(), ".");
}

inline void check_device(const at::Tensor& tensor, const char* name, at::Device device) {
  TORCH_CHECK_VALUE(tensor.device() == device, name, " must be on ", device, ", but is on ",
                    tensor.device(), ".");
}

inline void check_vector(const at::Tensor& tensor, const char* name) {
  TORCH_CHECK_VALUE(tensor.dim() == 1, name, " must have one dimension, but has shape ",
                    tensor.sizes(), ".");
}

inline void check_length(const at::Tensor& tensor, const char* name, int64_t length) {
  check_vector(tensor, name);
  TORCH_CHECK_VALUE(tensor.numel() == length, name, " must have ", length, " elements, but has ",
                    tensor.numel(), ".");
}

}  // namespace torchrec_hkv::runtime
