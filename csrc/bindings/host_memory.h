// The memory of tables.
#pragma once

#include <ATen/ATen.h>

namespace torchrec_hkv::bindings {

// Uninitialised. On a CPU in huge pages where the system grants them: ids hit pages at random, and
// with small ones nearly every access to a large table would first have to find its page.
at::Tensor table_memory(at::IntArrayRef sizes, at::ScalarType dtype, at::Device device);

// [rows, columns] in pinned host memory, exactly as large (PyTorch's pinned allocator rounds up to
// a power of two). For a CPU device, and for no elements, an ordinary tensor.
at::Tensor pinned_matrix(int64_t rows, int64_t columns, at::ScalarType dtype, at::Device device);

}  // namespace torchrec_hkv::bindings
