// Kernels one after the other without the pause between them: the blocks of the next come to the
// multiprocessors as those of the one before leave, and wait there for its end (programmatic
// dependent launch).
//
// A kernel that is launched so waits (wait_for_kernel_before) before it reads what kernels before
// it have written, and before it writes what these may still read; all its threads, also those with
// nothing to do, so that its own end says that those before it have ended too. Where a kernel does
// not say that the next one may start, that starts when it ends.
#pragma once

#include <cuda_runtime.h>

#include <atomic>
#include <cstddef>
#include <map>
#include <mutex>
#include <utility>

#include "common/cuda_check.h"

namespace torchrec_hkv {

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
// For a kernel whose successor reads nothing before it waits.
__device__ __forceinline__ void enter_chain() {
  let_next_kernel_start();
  wait_for_kernel_before();
}

struct LaunchShape {
  dim3 grid;
  int threads;
  size_t shared_bytes = 0;
  int cluster = 1;  // blocks of a cluster
  // All blocks run at the same time, so that they may wait for each other. Such a launch is not
  // overlapped with the one before.
  bool together = false;
  // Percent of the most that a multiprocessor can have of shared memory, the rest being cache; -1:
  // what the driver chooses.
  int shared_percent = -1;
};

// Of the current device. The driver is asked once for each device: every launch wants to know.
inline int compute_capability() {
  constexpr int kMost = 64;  // devices that are remembered
  static std::atomic<int> known[kMost];
  int device = 0;
  HKV_CUDA_CHECK(cudaGetDevice(&device));
  int major = device < kMost ? known[device].load(std::memory_order_relaxed) : 0;
  if (major != 0) return major;
  HKV_CUDA_CHECK(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
  if (device < kMost) known[device].store(major, std::memory_order_relaxed);
  return major;
}

constexpr int kFreeCluster = 8;  // blocks that every kernel may have

// Lets a kernel have the dynamic shared memory and the cluster that it is launched with. The driver
// is asked once for each kernel and device, as asking takes about as long as a part of a launch.
inline void allow_launch(const void* kernel, const LaunchShape& shape) {
  const bool prefers = shape.shared_percent >= 0;
  if (shape.shared_bytes == 0 && shape.cluster <= kFreeCluster && !prefers) return;
  static std::mutex mutex;
  static std::map<std::pair<int, const void*>, size_t> allowed;  // bytes
  int device = 0;
  HKV_CUDA_CHECK(cudaGetDevice(&device));
  const std::lock_guard<std::mutex> lock(mutex);
  const auto [at, is_new] = allowed.try_emplace({device, kernel}, 0);
  if (is_new && shape.cluster > kFreeCluster) {
    HKV_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1));
  }
  if (is_new && prefers) {
    HKV_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                                        shape.shared_percent));
  }
  if (shape.shared_bytes <= at->second) return;
  HKV_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                      static_cast<int>(shape.shared_bytes)));
  at->second = shape.shared_bytes;
}

// Launches a kernel that waits for the one before it by itself.
template <typename... Parameters, typename... Arguments>
void launch_chained(void (*kernel)(Parameters...), const LaunchShape& shape, cudaStream_t stream,
                    const Arguments&... arguments) {
  allow_launch(reinterpret_cast<const void*>(kernel), shape);
  cudaLaunchConfig_t config = {};
  config.gridDim = shape.grid;
  config.blockDim = dim3(static_cast<unsigned>(shape.threads));
  config.dynamicSmemBytes = shape.shared_bytes;
  config.stream = stream;
  cudaLaunchAttribute attributes[2];
  unsigned count = 0;
  if (shape.together) {
    attributes[count].id = cudaLaunchAttributeCooperative;
    attributes[count++].val.cooperative = 1;
  } else if (compute_capability() >= 9) {
    attributes[count].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[count++].val.programmaticStreamSerializationAllowed = 1;
  }
  if (shape.cluster > 1) {
    attributes[count].id = cudaLaunchAttributeClusterDimension;
    attributes[count].val.clusterDim.x = static_cast<unsigned>(shape.cluster);
    attributes[count].val.clusterDim.y = 1;
    attributes[count++].val.clusterDim.z = 1;
  }
  config.attrs = attributes;
  config.numAttrs = count;
  HKV_CUDA_CHECK(cudaLaunchKernelEx(&config, kernel, static_cast<Parameters>(arguments)...));
  HKV_CUDA_CHECK_LAUNCH();
}
template <typename... Parameters, typename... Arguments>
void launch_chained(void (*kernel)(Parameters...), unsigned blocks, unsigned threads,
                    cudaStream_t stream, const Arguments&... arguments) {
  launch_chained(kernel, {dim3(blocks), static_cast<int>(threads)}, stream, arguments...);
}

}  // namespace torchrec_hkv
