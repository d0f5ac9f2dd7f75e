// Kernels of one call, one after the other, without the pause between them: the blocks of the next
// come to the multiprocessors as those of the one before leave, and wait there for its end
// (programmatic dependent launch).
//
// A kernel that is launched so waits (wait_for_kernel_before) before it reads what kernels before
// it have written, and before it writes what these may still read; all its threads, so that its own
// end says that those before it have ended too. Where a kernel does not say that the next one may
// start, that starts when it ends.
#pragma once

#include <cuda_runtime.h>

#include <utility>

#include "common/cuda_check.h"

namespace torchrec_hkv::hash_table::cuda {

__device__ __forceinline__ void wait_for_kernel_before() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
// To be called once all that a block of the next kernel reads before it waits is written.
__device__ __forceinline__ void let_next_kernel_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

inline bool chains_kernels() {
  int device = 0, major = 0;
  HKV_CUDA_CHECK(cudaGetDevice(&device));
  HKV_CUDA_CHECK(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
  return major >= 9;
}

// Launches a kernel that waits for the one before it by itself.
template <typename... Parameters, typename... Arguments>
void launch_chained(void (*kernel)(Parameters...), unsigned blocks, unsigned threads,
                    cudaStream_t stream, Arguments&&... arguments) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(blocks);
  config.blockDim = dim3(threads);
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = chains_kernels() ? 1 : 0;
  HKV_CUDA_CHECK(cudaLaunchKernelEx(&config, kernel, std::forward<Arguments>(arguments)...));
}

}  // namespace torchrec_hkv::hash_table::cuda
