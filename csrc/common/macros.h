// Marks functions that are compiled for the CPU and, where nvcc compiles them, for the GPU too.
#pragma once

#ifdef __CUDACC__
#define HKV_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define HKV_HOST_DEVICE inline
#endif
