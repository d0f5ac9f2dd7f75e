// Scratch memory of a lookup in read-only tables on a GPU.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include "bindings/serving/open_tables.h"
#include "serving/kernels_cuda.h"

namespace torchrec_hkv::bindings {

struct StagingMemory {
  at::Tensor found, copies;
  serving::cuda::Staging its{};

  // num_found: number of row addresses that the lookup stores. options: for an int64 tensor on the
  // device.
  StagingMemory(const ServingTables& open, int64_t num_found, const at::TensorOptions& options) {
    if (num_found == 0) return;
    found = at::empty({num_found}, options);
    its.found = reinterpret_cast<const char**>(found.data_ptr<int64_t>());
    its.num_found = num_found;
    its.row_bytes = open.host_row_bytes;
    its.host_bytes = open.host_bytes;
    const auto bytes = static_cast<int64_t>(serving::cuda::staging_bytes(its));
    if (bytes == 0) return;
    copies = at::empty({bytes}, options.dtype(at::kByte));
    its.memory = static_cast<char*>(copies.data_ptr());
  }
};

}  // namespace torchrec_hkv::bindings
