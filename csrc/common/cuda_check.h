// Every CUDA call and every launch is checked; a failure is an exception that names the call.
#pragma once

#include <cuda_runtime.h>

#include <stdexcept>
#include <string>

namespace torchrec_hkv {

inline void cuda_check(cudaError_t status, const char* call, const char* file, int line) {
  if (status != cudaSuccess) {
    throw std::runtime_error(std::string("CUDA: ") + cudaGetErrorString(status) + " in " + call +
                             " (" + file + ":" + std::to_string(line) + ")");
  }
}

}  // namespace torchrec_hkv

#define HKV_CUDA_CHECK(call) ::torchrec_hkv::cuda_check((call), #call, __FILE__, __LINE__)
#define HKV_CUDA_CHECK_LAUNCH() HKV_CUDA_CHECK(cudaGetLastError())
