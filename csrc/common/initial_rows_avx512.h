// Uniform initial rows with AVX-512, for processors that have it at run time: it multiplies 64-bit
// numbers in one instruction. The values equal those of initial_value, bit for bit.
#pragma once

#ifdef __x86_64__

#include <cstdint>
#include <cstring>

#include "common/initial_rows.h"

#define HKV_AVX512 __attribute__((target("avx512f,avx512dq,avx512bw")))

namespace torchrec_hkv {

inline bool has_avx512() {
  static const bool has = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
                          __builtin_cpu_supports("avx512bw");
  return has;
}

typedef uint64_t WideLanes __attribute__((vector_size(64)));

HKV_AVX512 inline void mix_wide_lanes(WideLanes& x) {  // mix64
  x ^= x >> 30;
  x *= 0xbf58476d1ce4e5b9ull;
  x ^= x >> 27;
  x *= 0x94d049bb133111ebull;
  x ^= x >> 31;
}

// scale_uniform of the draws in eight lanes, lower halves first.
HKV_AVX512 inline void store_uniform_wide(const InitialRows& init, const WideLanes& lanes,
                                          float* out) {
  typedef int32_t WideInts __attribute__((vector_size(64)));
  typedef uint32_t WideDraws __attribute__((vector_size(64)));
  typedef float WideValues __attribute__((vector_size(64)));
  const WideInts draws = (WideInts)((WideDraws)lanes >> 8);
  const WideValues unit = __builtin_convertvector(draws, WideValues) * (1.0f / 16777216.0f);
  const WideValues values = init.low + (init.high - init.low) * unit;
  std::memcpy(out, &values, sizeof(values));
}

// out[i] = the value of column 4 * block + i of the row with id_bits, for the largest multiple of
// 32 columns within n. Returns that multiple.
HKV_AVX512 inline int32_t uniform_columns_avx512(const InitialRows& init, uint64_t of_id,
                                                 uint64_t block, int32_t n, float* out) {
  const WideLanes steps = {0, 1, 2, 3, 4, 5, 6, 7};
  int32_t c = 0;
  for (; n - c >= 32; c += 32, block += 8) {
    WideLanes first = of_id ^ ((steps + block) << 1);
    mix_wide_lanes(first);
    WideLanes second = first ^ 0xd1b54a32d192ed03ull;
    mix_wide_lanes(second);
    const WideLanes low = __builtin_shufflevector(first, second, 0, 8, 1, 9, 2, 10, 3, 11);
    const WideLanes high = __builtin_shufflevector(first, second, 4, 12, 5, 13, 6, 14, 7, 15);
    store_uniform_wide(init, low, out + c);
    store_uniform_wide(init, high, out + c + 16);
  }
  return c;
}

}  // namespace torchrec_hkv

#endif
