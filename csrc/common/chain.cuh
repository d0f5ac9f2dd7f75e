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

#include <cstddef>

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
int compute_capability();

// Lets a kernel have the dynamic shared memory and the cluster that it is launched with. The driver
// is asked once for each kernel and device, as asking takes about as long as a part of a launch.
void allow_launch(const void* kernel, const LaunchShape& shape);

// arguments: the addresses of the kernel's. In a source of its own: what it takes of the standard
// library, each file with kernels would read.
void launch_chained(const void* kernel, const LaunchShape& shape, cudaStream_t stream,
                    void** arguments);

// Launches a kernel that waits for the one before it by itself.
template <typename... Parameters, typename... Arguments>
void launch_chained(void (*kernel)(Parameters...), const LaunchShape& shape, cudaStream_t stream,
                    const Arguments&... arguments) {
  const auto launch = [&](Parameters... values) {
    void* addresses[] = {&values...};
    launch_chained(reinterpret_cast<const void*>(kernel), shape, stream, addresses);
  };
  launch(static_cast<Parameters>(arguments)...);
}
template <typename... Parameters, typename... Arguments>
void launch_chained(void (*kernel)(Parameters...), unsigned blocks, unsigned threads,
                    cudaStream_t stream, const Arguments&... arguments) {
  launch_chained(kernel, {dim3(blocks), static_cast<int>(threads)}, stream, arguments...);
}

}  // namespace torchrec_hkv
