// Marks functions that are compiled for the CPU and, where nvcc compiles them, for the GPU too.
#pragma once

#ifdef __CUDACC__
#define HKV_HOST_DEVICE __host__ __device__ __forceinline__
// Called, never inlined: long and rarely taken code that would cost its callers registers.
#define HKV_HOST_DEVICE_COLD inline __host__ __device__ __noinline__
#else
#define HKV_HOST_DEVICE inline
#define HKV_HOST_DEVICE_COLD inline
#endif
