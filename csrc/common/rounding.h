// Stochastic rounding of rows of 16 and 8 bits: up or down at random, so that the expected value is
// exact and steps smaller than the distance of two neighbours are not lost. The random bits are a
// pure function of (seed, table, id, step, column): equal on both devices and in any order.
#pragma once

#include <cstdint>

#include "common/dtypes.h"
#include "common/hashing.h"
#include "common/macros.h"

namespace torchrec_hkv {

// The common part of the keys of a table's rows in one step. table_seed: seed of its initial rows.
HKV_HOST_DEVICE uint64_t rounding_step(uint64_t seed, uint64_t table_seed, int64_t step) {
  return mix64(mix64(seed ^ 0x3c6ef372fe94f82bull) ^ table_seed) +
         static_cast<uint64_t>(step) * 0x9e3779b97f4a7c15ull;
}
// The key of the draws of a row in this step.
HKV_HOST_DEVICE uint64_t rounding_key(uint64_t of_step, int64_t id) {
  return mix64(mix64(of_step) ^ static_cast<uint64_t>(id));
}
// The same in one call.
HKV_HOST_DEVICE uint64_t rounding_key(uint64_t seed, uint64_t table_seed, int64_t id,
                                      int64_t step) {
  return rounding_key(rounding_step(seed, table_seed, step), id);
}

// 64 random bits for four columns, 16 each. `quad`: the first column's number in the table, divided
// by four.
HKV_HOST_DEVICE uint64_t rounding_bits(uint64_t key, uint32_t quad) {
  return mix64(key + (static_cast<uint64_t>(quad) + 1) * 0xd1b54a32d192ed03ull);
}
// The draw of one of the four columns: 16 bits.
HKV_HOST_DEVICE uint32_t rounding_draw_of(uint64_t bits, uint32_t column) {
  return static_cast<uint32_t>(bits >> (column & 3) * 16 & 0xffff);
}
// The draw of a column.
HKV_HOST_DEVICE uint32_t rounding_draw(uint64_t key, uint32_t column) {
  return rounding_draw_of(rounding_bits(key, column >> 2), column);
}

HKV_HOST_DEVICE uint16_t to_bfloat16_by_chance(float x, uint32_t draw) {
  const uint32_t bits = float_bits(x);
  if ((bits & 0x7f800000u) == 0x7f800000u) return to_bfloat16(x);  // infinite or NaN
  return static_cast<uint16_t>((bits + (draw & 0xffffu)) >> 16);
}

// A neighbour of x in float16. The magnitude is rounded down after 13 random bits are added to the
// bits of the fraction that float16 does not have. Below 2^-14 float16 has multiples of 2^-24. Such
// a value is rounded after 2^-14 is added, and 2^-14 is subtracted again: the sum drops the same 13
// bits. The addition rounds the value to a multiple of 2^-37.
HKV_HOST_DEVICE float float16_by_chance(float x, uint32_t draw) {
  constexpr uint32_t kDropped = 0x1fffu;
  const uint32_t bits = float_bits(x);
  const uint32_t magnitude = bits & 0x7fffffffu;
  const float added = magnitude < 0x38800000u ? 0x1p-14f : 0.0f;
  const float raised = bits_float(magnitude) + added;
  const float truncated = bits_float((float_bits(raised) + (draw & kDropped)) & ~kDropped) - added;
  // 2^16 and above, infinite or NaN
  return magnitude >= 0x47800000u ? x : bits_float(float_bits(truncated) | (bits ^ magnitude));
}

HKV_HOST_DEVICE uint16_t to_float16_by_chance(float x, uint32_t draw) {
  return to_float16(float16_by_chance(x, draw));
}

// Converts to one of the 16-bit types.
HKV_HOST_DEVICE uint16_t narrow_by_chance(RowType type, float x, uint32_t draw) {
  return type == RowType::kFloat16 ? to_float16_by_chance(x, draw) : to_bfloat16_by_chance(x, draw);
}

}  // namespace torchrec_hkv
