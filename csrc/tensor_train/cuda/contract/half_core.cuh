// Single-precision products from three half-precision products on tensor cores, of values that are
// scaled by powers of two.
//
// A value x is split as x 2^e = high + low, both in half precision, which gives 22 bits. Many
// values share e, with which the largest of them is in [2^14, 2^15). Values down to 2^-17 of the
// largest keep all 22 bits; smaller values lose 2^-40 of the largest. The product of the low parts
// is omitted.
#pragma once

#include <cuda_fp16.h>

#include "tensor_train/cuda/contract/tensor_core.cuh"

namespace torchrec_hkv::tensor_train::cuda {

// Returns the exponent for values whose largest magnitude has the bits `most`.
__device__ __forceinline__ int exponent_for(uint32_t most) {
  return min(141 - static_cast<int>(most >> 23), 127);
}
// Returns 2^e; 0 if it is below 2^-126, at most 2^127.
__device__ __forceinline__ float power_of_two(int e) {
  return __uint_as_float(static_cast<uint32_t>(max(0, min(e + 127, 254))) << 23);
}

// The largest value of a warp, as bits. Values must not be negative.
__device__ __forceinline__ uint32_t largest_of_warp(float value) {
  return __reduce_max_sync(kAllLanes, __float_as_uint(value));
}
__device__ __forceinline__ float largest(float4 v) {
  return fmaxf(fmaxf(fabsf(v.x), fabsf(v.y)), fmaxf(fabsf(v.z), fabsf(v.w)));
}

// Two values, the first in the lower half.
struct HalfPair {
  uint32_t high, low;
};
__device__ __forceinline__ uint32_t halves(float first, float second) {
  uint32_t pair;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
  return pair;
}
// Splits two scaled values.
__device__ __forceinline__ HalfPair half_pair(float first, float second) {
  const uint32_t high = halves(first, second);
  const float2 back = __half22float2(*reinterpret_cast<const __half2*>(&high));
  return {high, halves(first - back.x, second - back.y)};
}
__device__ __forceinline__ uint32_t times(uint32_t pair, __half2 factor) {
  const __half2 product = __hmul2(*reinterpret_cast<const __half2*>(&pair), factor);
  return *reinterpret_cast<const uint32_t*>(&product);
}

// c[16][8] += a[16][16] b[16][8]. With row = l / 4 and column = l % 4, lane l has
// of a: two neighbours from (row, 2 column) on in a0, from (row + 8, 2 column) on in a1, and those
// eight columns further in a2 and a3;
// of b: (2 column, row) and the value below it in b0, those eight rows further in b1;
// of c: the same values as in mma_tf32.
__device__ __forceinline__ void mma_half(float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                         uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
      "{%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
// c[16][8] += a[16][8] b[8][8].
__device__ __forceinline__ void mma_half(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t b0) {
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, "
      "{%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(b0));
}

// Loads four matrices of 8 rows of 8 halves from shared memory. row: address of row lane % 8 of
// matrix lane / 8, aligned to 16 bytes. to[i]: two neighbours from (lane / 4, 2 (lane % 4)) on, of
// matrix i or, with kTransposed, of its transpose.
template <bool kTransposed>
__device__ __forceinline__ void load_halves(const __half* row, uint32_t (&to)[4]) {
  const auto address = static_cast<uint32_t>(__cvta_generic_to_shared(row));
  if constexpr (kTransposed) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(address)
                 : "memory");
  } else {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(address)
                 : "memory");
  }
}
// The inverse: stores from[i] where load_halves reads to[i].
__device__ __forceinline__ void store_halves(__half* row, const uint32_t (&from)[4]) {
  const auto address = static_cast<uint32_t>(__cvta_generic_to_shared(row));
#if __CUDA_ARCH__ >= 900
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(address),
               "r"(from[0]), "r"(from[1]), "r"(from[2]), "r"(from[3])
               : "memory");
#else
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t to = __shfl_sync(kAllLanes, address, 8 * i + lane / 4) + lane % 4 * 4;
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(to), "r"(from[i]) : "memory");
  }
#endif
}

// Offset of the low parts of 32 values from their high parts in shared memory.
constexpr int kLow = 32;

}  // namespace torchrec_hkv::tensor_train::cuda
