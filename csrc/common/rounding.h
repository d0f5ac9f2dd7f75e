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
// The draw of one of the four columns: its 16 bits, twice.
HKV_HOST_DEVICE uint32_t rounding_draw_of(uint64_t bits, uint32_t column) {
  return static_cast<uint32_t>(bits >> (column & 3) * 16 & 0xffff) * 0x10001u;
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

HKV_HOST_DEVICE uint16_t to_float16_by_chance(float x, uint32_t draw) {
  const uint32_t bits = float_bits(x);
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude >= 0x47800000u) return to_float16(x);  // 2^16 and above, infinite or NaN
  const uint32_t sign = bits >> 16 & 0x8000u;
  if (magnitude >= 0x38800000u) {  // 2^-14 and above: 13 bits of the fraction are dropped
    return static_cast<uint16_t>(sign | (((magnitude + (draw & 0x1fffu)) >> 13) - (112u << 10)));
  }
  // A multiple of 2^-24. Below about 2^-55 the chance of rounding up is less than 2^-31, so it
  // rounds down.
  const int shift = 126 - static_cast<int>(magnitude >> 23);
  if (shift > 55 || magnitude < 0x00800000u) return static_cast<uint16_t>(sign);
  const uint64_t fraction = (magnitude & 0x7fffffu) | 0x800000u;
  const uint64_t chance =
      shift >= 32 ? static_cast<uint64_t>(draw) << (shift - 32) : draw >> (32 - shift);
  return static_cast<uint16_t>(sign | static_cast<uint32_t>((fraction + chance) >> shift));
}

// A 16-bit value from the two functions above.
HKV_HOST_DEVICE uint16_t narrow_by_chance(RowType type, float x, uint32_t draw) {
  return type == RowType::kFloat16 ? to_float16_by_chance(x, draw) : to_bfloat16_by_chance(x, draw);
}

}  // namespace torchrec_hkv
