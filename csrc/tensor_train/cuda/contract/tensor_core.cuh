// Products on tensor cores in tf32, and in three tf32 products of split operands; reductions into
// global memory.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "common/dependent_launch.cuh"
#include "common/global_pointer.h"

namespace torchrec_hkv::tensor_train::cuda {

constexpr unsigned kAllLanes = 0xffffffffu;

// kProducts: number of products of a multiply-add. 1 is plain tf32; 3 splits each operand into its
// tf32 value and the remainder.
template <int kProducts>
struct Operand;
template <>
struct Operand<1> {
  uint32_t high;
};
template <>
struct Operand<3> {
  uint32_t high;
  uint32_t low;
};

// The tensor core drops the low 13 bits of an operand, so this adds half a unit, to round.
__device__ __forceinline__ float round_tf32(float x) {
  return __uint_as_float(__float_as_uint(x) + 0x1000u);
}

// Returns the value for shared memory: rounded, or exact if it is split later.
template <int kProducts>
__device__ __forceinline__ float prepared(float x) {
  return kProducts == 1 ? round_tf32(x) : x;
}
template <int kProducts>
__device__ __forceinline__ float4 prepared(float4 x) {
  return make_float4(prepared<kProducts>(x.x), prepared<kProducts>(x.y), prepared<kProducts>(x.z),
                     prepared<kProducts>(x.w));
}

// An operand from a prepared value.
template <int kProducts>
__device__ __forceinline__ Operand<kProducts> operand(float x) {
  if constexpr (kProducts == 1) {
    return {__float_as_uint(x)};
  } else {
    const uint32_t high = (__float_as_uint(x) + 0x1000u) & 0xffffe000u;
    return {high, __float_as_uint(x - __uint_as_float(high))};
  }
}
// An operand from any value.
template <int kProducts>
__device__ __forceinline__ Operand<kProducts> rounded_operand(float x) {
  return operand<kProducts>(prepared<kProducts>(x));
}

// c[16][8] += a[16][8] b[8][8]. With row = l / 4 and column = l % 4, lane l has
// of a: (row, column), (row + 8, column), (row, column + 4), (row + 8, column + 4);
// of b: (column, row), (column + 4, row);
// of c: (row, 2 column), (row, 2 column + 1), (row + 8, 2 column), (row + 8, 2 column + 1).
__device__ __forceinline__ void mma_tf32(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2,
                                         uint32_t a3, uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

template <int kProducts>
__device__ __forceinline__ void multiply_add(float (&c)[4], const Operand<kProducts>& a0,
                                             const Operand<kProducts>& a1,
                                             const Operand<kProducts>& a2,
                                             const Operand<kProducts>& a3,
                                             const Operand<kProducts>& b0,
                                             const Operand<kProducts>& b1) {
  if constexpr (kProducts == 3) {
    mma_tf32(c, a0.low, a1.low, a2.low, a3.low, b0.high, b1.high);
    mma_tf32(c, a0.high, a1.high, a2.high, a3.high, b0.low, b1.low);
  }
  mma_tf32(c, a0.high, a1.high, a2.high, a3.high, b0.high, b1.high);
}

// The same with separate sums for the lower parts of split operands, for shorter chains of
// dependent products.
template <int kProducts>
__device__ __forceinline__ void multiply_add(
    float (&c)[4], float (&low)[4], const Operand<kProducts>& a0, const Operand<kProducts>& a1,
    const Operand<kProducts>& a2, const Operand<kProducts>& a3, const Operand<kProducts>& b0,
    const Operand<kProducts>& b1) {
  if constexpr (kProducts == 3) {
    mma_tf32(low, a0.low, a1.low, a2.low, a3.low, b0.high, b1.high);
    mma_tf32(low, a0.high, a1.high, a2.high, a3.high, b0.low, b1.low);
  }
  mma_tf32(c, a0.high, a1.high, a2.high, a3.high, b0.high, b1.high);
}

__device__ __forceinline__ void add_one(float* to, float value) { atomicAdd(in_global(to), value); }
// to: address aligned to 8 bytes.
__device__ __forceinline__ void add_two(float* to, float a, float b) {
#if __CUDA_ARCH__ >= 900
  asm volatile("red.relaxed.gpu.global.add.v2.f32 [%0], {%1,%2};" ::"l"(to), "f"(a), "f"(b)
               : "memory");
#else
  atomicAdd(to, a);
  atomicAdd(to + 1, b);
#endif
}
// to: address aligned to 16 bytes.
__device__ __forceinline__ void add_four(float* to, float4 v) {
#if __CUDA_ARCH__ >= 900
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1,%2,%3,%4};" ::"l"(to), "f"(v.x),
               "f"(v.y), "f"(v.z), "f"(v.w)
               : "memory");
#else
  atomicAdd(to, v.x);
  atomicAdd(to + 1, v.y);
  atomicAdd(to + 2, v.z);
  atomicAdd(to + 3, v.w);
#endif
}

// Loads four matrices of 8 rows of 4 values from shared memory. row: address of row lane % 8 of
// matrix lane / 8, aligned to 16 bytes. to[i]: value lane % 4 of row lane / 4 of matrix i.
__device__ __forceinline__ void load_matrices(const float* row, float (&to)[4]) {
  uint32_t bits[4];
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(bits[0]), "=r"(bits[1]), "=r"(bits[2]), "=r"(bits[3])
               : "r"(static_cast<uint32_t>(__cvta_generic_to_shared(row))));
#pragma unroll
  for (int i = 0; i < 4; ++i) to[i] = __uint_as_float(bits[i]);
}

// Loads kCount neighbouring values from shared memory, aligned to their size.
template <int kCount>
__device__ __forceinline__ void load_neighbours(const float* from, float (&to)[kCount]) {
  static_assert(kCount == 1 || kCount == 2 || kCount == 4);
  if constexpr (kCount == 4) {
    *reinterpret_cast<float4*>(to) = *reinterpret_cast<const float4*>(from);
  } else if constexpr (kCount == 2) {
    *reinterpret_cast<float2*>(to) = *reinterpret_cast<const float2*>(from);
  } else {
    to[0] = *from;
  }
}

// Copies 4 or 16 bytes from global to shared memory asynchronously. This thread can read them after
// wait_for_copies.
template <typename Value>
__device__ __forceinline__ void start_copy(Value* to, const Value* from) {
  static_assert(sizeof(Value) == 4 || sizeof(Value) == 16);
  const auto address = static_cast<uint32_t>(__cvta_generic_to_shared(to));
  if constexpr (sizeof(Value) == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(address), "l"(from) : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(address), "l"(from) : "memory");
  }
}
__device__ __forceinline__ void wait_for_copies() {
  asm volatile("cp.async.wait_all;" ::: "memory");
}

}  // namespace torchrec_hkv::tensor_train::cuda
