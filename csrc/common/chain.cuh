// Launches kernels one after the other without a pause, by programmatic dependent launch: blocks of
// the next kernel start on the multiprocessors as the blocks of the previous one leave, and wait
// there for its end.
//
// A kernel that is launched this way calls wait_for_kernel_before before it reads what earlier
// kernels wrote, and before it overwrites what they may still read. All of its threads call it,
// also idle ones, so that the kernel's end implies the end of all kernels before it. If a kernel
// does not allow the next one to start early, that one starts when it ends.
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
// Call this when everything is written that a block of the next kernel reads before it waits.
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
  // All blocks run at the same time, so they may wait for each other. Such a launch does not
  // overlap with the previous one.
  bool together = false;
  // Share of a multiprocessor's shared memory, in percent of the maximum; the rest is cache. -1
  // leaves the choice to the driver.
  int shared_percent = -1;
};

// Properties of the current device. They are cached, because every launch needs them.
inline int compute_capability() {
  constexpr int kMost = 64;  // devices in the cache
  static std::atomic<int> known[kMost];
  int device = 0;
  HKV_CUDA_CHECK(cudaGetDevice(&device));
  int major = device < kMost ? known[device].load(std::memory_order_relaxed) : 0;
  if (major != 0) return major;
  HKV_CUDA_CHECK(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
  if (device < kMost) known[device].store(major, std::memory_order_relaxed);
  return major;
}

constexpr int kFreeCluster = 8;  // cluster size that every kernel may use

// Allows a kernel the dynamic shared memory and the cluster that it is launched with. The driver is
// called once for each kernel and device, because the call takes a noticeable part of a launch.
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

// Launches a kernel that itself waits for the previous one.
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
