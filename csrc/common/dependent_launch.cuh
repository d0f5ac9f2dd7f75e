// Launches kernels one after the other without a pause between them: the blocks of the next kernel
// start as those of the previous one leave, and wait for its end (programmatic dependent launch).
//
// Such a kernel calls wait_for_kernel_before before it reads data of earlier kernels, and before it
// writes data that these may still read. All its threads call it, also idle ones, so that the end
// of the kernel implies the end of earlier kernels. If a kernel does not call
// let_next_kernel_start, the next one starts when it ends.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>

#include "common/cuda_check.h"

namespace torchrec_hkv {

__device__ __forceinline__ void wait_for_kernel_before() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
// Call it after writing all data that a block of the next kernel reads before it waits.
__device__ __forceinline__ void let_next_kernel_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
// Call it if the next kernel reads nothing before it waits.
__device__ __forceinline__ void begin_dependent_kernel() {
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
  // Shared memory in percent of a multiprocessor's maximum, the rest being L1 cache; -1: the driver
  // chooses.
  int shared_percent = -1;
};

// The compute capability of the current device. The result is cached for each device, because every
// launch needs it.
int compute_capability();
// The number of multiprocessors of the current device.
unsigned multiprocessors();

// Allows a kernel's dynamic shared memory and cluster. Calls the driver once for each kernel and
// device, because such a call takes a considerable part of a launch.
void allow_launch(const void* kernel, const LaunchShape& shape);

// arguments: addresses of the kernel's arguments. Not inline, because every file with kernels would
// include its standard headers.
void launch_dependent(const void* kernel, const LaunchShape& shape, cudaStream_t stream,
                      void** arguments);

// Launches a kernel that calls wait_for_kernel_before itself.
template <typename... Parameters, typename... Arguments>
void launch_dependent(void (*kernel)(Parameters...), const LaunchShape& shape, cudaStream_t stream,
                      const Arguments&... arguments) {
  const auto launch = [&](Parameters... values) {
    void* addresses[] = {&values...};
    launch_dependent(reinterpret_cast<const void*>(kernel), shape, stream, addresses);
  };
  launch(static_cast<Parameters>(arguments)...);
}
template <typename... Parameters, typename... Arguments>
void launch_dependent(void (*kernel)(Parameters...), unsigned blocks, unsigned threads,
                      cudaStream_t stream, const Arguments&... arguments) {
  launch_dependent(kernel, {dim3(blocks), static_cast<int>(threads)}, stream, arguments...);
}

}  // namespace torchrec_hkv
