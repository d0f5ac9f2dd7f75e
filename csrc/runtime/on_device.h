// Runs one of two calls, by the device of a table. The calls may use `threads` and `stream`.
#pragma once

#include <ATen/Parallel.h>
#include <c10/core/DeviceGuard.h>

#ifdef TORCHREC_HKV_CUDA
#include <c10/cuda/CUDAStream.h>
#endif

#ifdef TORCHREC_HKV_CUDA
#define HKV_ON_DEVICE(device, cpu_call, cuda_call)                                 \
  if ((device).is_cuda()) {                                                        \
    const c10::OptionalDeviceGuard guard(device);                                  \
    const cudaStream_t stream = c10::cuda::getCurrentCUDAStream((device).index()); \
    cuda_call;                                                                     \
  } else {                                                                         \
    [[maybe_unused]] const int threads = at::get_num_threads();                    \
    cpu_call;                                                                      \
  }
#else
#define HKV_ON_DEVICE(device, cpu_call, cuda_call)              \
  {                                                             \
    [[maybe_unused]] const int threads = at::get_num_threads(); \
    cpu_call;                                                   \
  }
#endif
