// The row an id starts from: a pure function of (seed, table, id, column), the same bits on a CPU
// and on a GPU, in any order of arrival and at any world size.
#pragma once

#include <cstdint>

#include "common/hashing.h"
#include "common/macros.h"

namespace torchrec_hkv {

// Uniform over [low, high); a constant where the two are equal.
struct InitialRows {
  uint64_t seed;  // already mixed with the table's name
  float low;
  float high;
};

// Product and sum are rounded apart: a fused multiply-add would differ between devices.
HKV_HOST_DEVICE float scale_uniform(const InitialRows& init, uint32_t bits) {
  const float unit = static_cast<float>(bits >> 8) * (1.0f / 16777216.0f);
#ifdef __CUDA_ARCH__
  return __fadd_rn(init.low, __fmul_rn(init.high - init.low, unit));
#else
  return init.low + (init.high - init.low) * unit;
#endif
}

// Two mixes serve a block of four columns.
struct InitialBits {
  uint64_t first;   // columns 4b and 4b + 1
  uint64_t second;  // columns 4b + 2 and 4b + 3
};

HKV_HOST_DEVICE InitialBits initial_bits(const InitialRows& init, int64_t id, uint32_t block) {
  InitialBits bits;
  bits.first = mix64(mix64(init.seed ^ (static_cast<uint64_t>(id) * 0x9e3779b97f4a7c15ull)) ^
                     (static_cast<uint64_t>(block) << 1));
  bits.second = mix64(bits.first ^ 0xd1b54a32d192ed03ull);
  return bits;
}

// Column counted from the table's first, not the shard's.
HKV_HOST_DEVICE float initial_value(const InitialRows& init, int64_t id, uint32_t column) {
  const InitialBits bits = initial_bits(init, id, column >> 2);
  const uint64_t pair = (column & 2) ? bits.second : bits.first;
  return scale_uniform(init, static_cast<uint32_t>((column & 1) ? pair >> 32 : pair));
}

}  // namespace torchrec_hkv
