// Host memory that a GPU reads in place.
#pragma once

#include <ATen/ATen.h>

namespace torchrec_hkv::bindings {

// [rows, columns] in pinned host memory, exactly as large (PyTorch's pinned allocator rounds up to
// a power of two). For a CPU device, and for no elements, an ordinary tensor.
at::Tensor pinned_matrix(int64_t rows, int64_t columns, at::ScalarType dtype, at::Device device);

}  // namespace torchrec_hkv::bindings
