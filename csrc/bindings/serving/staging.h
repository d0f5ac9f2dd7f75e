// Scratch memory of a lookup in read-only tables on a GPU.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include "bindings/serving/open_tables.h"
#include "serving/kernels_cuda.h"

namespace torchrec_hkv::bindings {

struct StagingMemory {
  at::Tensor found, copies;
  serving::cuda::Staging arguments{};

  // num_found: number of row addresses that the lookup stores. options: for an int64 tensor on the
  // device.
  StagingMemory(const ServingTables& open, int64_t num_found, const at::TensorOptions& options) {
    if (num_found == 0) return;
    found = at::empty({num_found}, options);
    arguments.found = reinterpret_cast<const char**>(found.data_ptr<int64_t>());
    arguments.num_found = num_found;
    arguments.row_bytes = open.host_row_bytes;
    arguments.host_bytes = open.host_bytes;
    const auto bytes = static_cast<int64_t>(serving::cuda::staging_bytes(arguments));
    if (bytes == 0) return;
    copies = at::empty({bytes}, options.dtype(at::kByte));
    arguments.memory = static_cast<char*>(copies.data_ptr());
  }
};

}  // namespace torchrec_hkv::bindings
