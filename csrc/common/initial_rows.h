// The initial row of an id: a pure function of (seed, table, id, column). Both devices compute the
// same bits, in any order of arrival and at any world size.
#pragma once

#include <cmath>
#include <cstdint>

#include "common/hashing.h"
#include "common/inverse_normal.h"
#include "common/macros.h"

namespace torchrec_hkv {

enum class Distribution : int32_t { kUniform = 0, kNormal = 1 };

// Created by uniform_rows or normal_rows.
struct InitialRows {
  uint64_t seed;  // already mixed with the table's name
  Distribution distribution;
  // Uniform: the range [low, high), a constant if both are equal. Normal: the bounds.
  float low;
  float high;
  // Normal: mean + scale * z, where z has the quantiles [first, first + mass].
  double mean;
  double scale;
  double first;
  double mass;
};

InitialRows uniform_rows(uint64_t seed, float low, float high);

// A normal distribution within [low, high]; either bound may be infinite. std must be positive.
InitialRows normal_rows(uint64_t seed, double mean, double std, double low, double high);

// Product and sum are rounded separately: a fused multiply-add would differ between devices.
HKV_HOST_DEVICE float scale_uniform(const InitialRows& init, uint32_t bits) {
  const float unit = static_cast<float>(bits >> 8) * (1.0f / 16777216.0f);
#ifdef __CUDA_ARCH__
  return __fadd_rn(init.low, __fmul_rn(init.high - init.low, unit));
#else
  return init.low + (init.high - init.low) * unit;
#endif
}

// Uses inverse_normal; its header explains why both devices agree. The unit is never 0 or 1.
HKV_HOST_DEVICE_COLD double normal_between(double first, double mass, uint32_t bits) {
  const double unit = (static_cast<double>(bits) + 0.5) * (1.0 / 4294967296.0);
  return inverse_normal(fma(mass, unit, first));
}

HKV_HOST_DEVICE float scale_normal(const InitialRows& init, uint32_t bits) {
  const double z = normal_between(init.first, init.mass, bits);
  const double value = fma(init.scale, z, init.mean);
  const double low = init.low;
  const double high = init.high;
  return static_cast<float>(value < low ? low : value > high ? high : value);
}

// Two mixes give the bits of four columns.
struct InitialBits {
  uint64_t first;   // columns 4b and 4b + 1
  uint64_t second;  // columns 4b + 2 and 4b + 3
};

HKV_HOST_DEVICE uint64_t id_bits(const InitialRows& init, int64_t id) {
  return mix64(init.seed ^ (static_cast<uint64_t>(id) * 0x9e3779b97f4a7c15ull));
}

HKV_HOST_DEVICE InitialBits block_bits(uint64_t of_id, uint32_t block) {
  InitialBits bits;
  bits.first = mix64(of_id ^ (static_cast<uint64_t>(block) << 1));
  bits.second = mix64(bits.first ^ 0xd1b54a32d192ed03ull);
  return bits;
}

HKV_HOST_DEVICE uint32_t draw_of(const InitialBits& bits, uint32_t column) {
  const uint64_t pair = (column & 2) ? bits.second : bits.first;
  return static_cast<uint32_t>((column & 1) ? pair >> 32 : pair);
}

// Columns count from the first column of the table, not of the shard.
HKV_HOST_DEVICE uint32_t initial_draw(const InitialRows& init, int64_t id, uint32_t column) {
  return draw_of(block_bits(id_bits(init, id), column >> 2), column);
}

HKV_HOST_DEVICE float initial_value(const InitialRows& init, int64_t id, uint32_t column) {
  const uint32_t draw = initial_draw(init, id, column);
  return init.distribution == Distribution::kUniform ? scale_uniform(init, draw)
                                                     : scale_normal(init, draw);
}

}  // namespace torchrec_hkv
