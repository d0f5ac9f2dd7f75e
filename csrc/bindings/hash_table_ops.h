// Ops of the hash table that other bindings call directly.
#pragma once

#include <ATen/ATen.h>

#include <optional>

namespace torchrec_hkv::bindings {

// [batch_size, columns of all features]: the reduced rows of each bag.
at::Tensor pool_rows(int64_t handle, const at::Tensor& ids, const at::Tensor& offsets,
                     const std::optional<at::Tensor>& weights, const at::Tensor& slots,
                     int64_t batch_size, bool mean);

}  // namespace torchrec_hkv::bindings
