// Checks CUDA calls and kernel launches. A failure throws an exception that names the call.
#pragma once

#include <cuda_runtime.h>

namespace torchrec_hkv {

// Throws std::runtime_error. In a file of its own, because <string> takes longer to compile than
// most kernels.
[[noreturn]] void cuda_failed(cudaError_t status, const char* call, const char* file, int line);

inline void cuda_check(cudaError_t status, const char* call, const char* file, int line) {
  if (status != cudaSuccess) cuda_failed(status, call, file, line);
}

}  // namespace torchrec_hkv

#define HKV_CUDA_CHECK(call) ::torchrec_hkv::cuda_check((call), #call, __FILE__, __LINE__)
#define HKV_CUDA_CHECK_LAUNCH() HKV_CUDA_CHECK(cudaGetLastError())
