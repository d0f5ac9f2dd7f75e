// Registers ops for CPU tensors and, in a build with CUDA, for GPU tensors.
#pragma once

#include <torch/library.h>

// `add` is a function void(torch::Library&) that calls `impl` for each op.
#ifdef TORCHREC_HKV_CUDA
#define HKV_REGISTER_ON_DEVICES(add)                   \
  TORCH_LIBRARY_IMPL(torchrec_hkv, CPU, m) { add(m); } \
  TORCH_LIBRARY_IMPL(torchrec_hkv, CUDA, m) { add(m); }
#else
#define HKV_REGISTER_ON_DEVICES(add) \
  TORCH_LIBRARY_IMPL(torchrec_hkv, CPU, m) { add(m); }
#endif
