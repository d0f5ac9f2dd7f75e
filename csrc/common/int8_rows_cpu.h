// Rows of 8 bits on the CPU, sixteen columns at a time.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "common/int8_rows.h"
#include "common/vectors_cpu.h"

#ifdef __AVX2__
#include <immintrin.h>
#endif

namespace torchrec_hkv {
namespace int8_rows {

constexpr int32_t kBlock = 16;  // columns

typedef uint64_t Quads __attribute__((vector_size(32)));  // rounding_bits of sixteen columns
typedef uint16_t Draws __attribute__((vector_size(32)));
typedef uint32_t Bits __attribute__((vector_size(32)));
typedef int32_t Ints __attribute__((vector_size(32)));
typedef int8_t Bytes __attribute__((vector_size(8)));
typedef uint16_t HalfDraws __attribute__((vector_size(16)));

// rounding_bits of four quads, the first of which is `quad`: sixteen draws in the order of columns.
inline void draw_block(uint64_t key, uint32_t quad, Draws& draws) {
  const Quads steps = {1, 2, 3, 4};
  Quads x = key + (quad + steps) * 0xd1b54a32d192ed03ull;
  x ^= x >> 30;  // mix64
  x *= 0xbf58476d1ce4e5b9ull;
  x ^= x >> 27;
  x *= 0x94d049bb133111ebull;
  x ^= x >> 31;
  draws = (Draws)x;
}

// The sums of int8_of for eight columns.
inline void round_vector(const float* from, float inverse, const HalfDraws* draws, Ints& out) {
  Columns x;
  std::memcpy(&x, from, sizeof(x));
  x *= inverse;
  const Columns high = {127, 127, 127, 127, 127, 127, 127, 127}, low = -high;
  x = x > high ? high : x;
  x = x < low ? low : x;
  if (draws != nullptr) {
    const Columns wide = __builtin_convertvector(__builtin_convertvector(*draws, Ints), Columns);
    x += (wide - 32767.5f) * (1.0f / 65536.0f);
  }
  out = (Ints)(x + kInt8Magic);
}

// The low bytes of sixteen integers.
inline void store_bytes(const Ints& first, const Ints& second, char* to) {
#ifdef __AVX2__
  const __m256i low = _mm256_set1_epi32(0xff);
  const __m256i words = _mm256_packus_epi32(_mm256_and_si256((__m256i)first, low),
                                            _mm256_and_si256((__m256i)second, low));
  const __m256i bytes = _mm256_packus_epi16(words, words);  // by halves: 0-3 8-11, 4-7 12-15
  const __m256i ordered =
      _mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 4, 1, 5, 0, 4, 1, 5));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm256_castsi256_si128(ordered));
#else
  const Bytes bytes[2] = {__builtin_convertvector(first, Bytes),
                          __builtin_convertvector(second, Bytes)};
  std::memcpy(to, bytes, sizeof(bytes));
#endif
}

// Sixteen columns become bytes.
template <bool kByChance>
inline void round_block(const float* from, float inverse, uint64_t key, int32_t column, char* to) {
  Ints sums[2];
  if constexpr (kByChance) {
    Draws draws;
    draw_block(key, static_cast<uint32_t>(column) >> 2, draws);
    HalfDraws halves[2];
    std::memcpy(halves, &draws, sizeof(draws));
    round_vector(from, inverse, &halves[0], sums[0]);
    round_vector(from + 8, inverse, &halves[1], sums[1]);
  } else {
    round_vector(from, inverse, nullptr, sums[0]);
    round_vector(from + 8, inverse, nullptr, sums[1]);
  }
  store_bytes(sums[0], sums[1], to);
}

// magnitude_bits of the largest of n values.
inline uint32_t largest_magnitude(const float* values, int32_t n) {
  Ints largest[2] = {};
  int32_t c = 0;
  for (; c + kBlock <= n; c += kBlock) {
    Ints bits[2];
    std::memcpy(bits, values + c, sizeof(bits));
    for (int k = 0; k < 2; ++k) {
      bits[k] &= 0x7fffffff;
      largest[k] = bits[k] > largest[k] ? bits[k] : largest[k];
    }
  }
  const Ints both = largest[0] > largest[1] ? largest[0] : largest[1];
  auto of_all = static_cast<uint32_t>(0);
  for (int k = 0; k < 8; ++k) of_all = std::max(of_all, static_cast<uint32_t>(both[k]));
  for (; c < n; ++c) of_all = std::max(of_all, magnitude_bits(values[c]));
  return of_all;
}

template <bool kByChance>
inline void store_row(const float* values, int32_t n, uint64_t key, char* row) {
  const Int8Scale scale = int8_scale(largest_magnitude(values, n));
  std::memcpy(row, &scale.scale, sizeof(float));
  char* const to = row + kInt8Start;
  if (scale.inverse == 0.0f) {
    std::memset(to, 0, row_size(RowType::kInt8, n) - kInt8Start);
    return;
  }
  int32_t c = 0;
  for (; c + kBlock <= n; c += kBlock) {
    round_block<kByChance>(values + c, scale.inverse, key, c, to + c);
  }
  if (c == n) return;
  float rest[kBlock] = {};
  char bytes[kBlock];
  std::copy_n(values + c, n - c, rest);
  round_block<kByChance>(rest, scale.inverse, key, c, bytes);
  std::memset(bytes + (n - c), 0, kBlock - (n - c));
  std::memcpy(to + c, bytes, row_size(RowType::kInt8, n) - kInt8Start - c);
}

}  // namespace int8_rows

// Columns of a row of 8 bits as floats, from `column` on.
inline void widen_int8(const char* row, int32_t column, int32_t n, float* __restrict__ to) {
  float scale;
  std::memcpy(&scale, row, sizeof(scale));
  const auto* const from = reinterpret_cast<const int8_t*>(row + kInt8Start + column);
  for (int32_t c = 0; c < n; ++c) to[c] = scale * static_cast<float>(from[c]);
}

// A row of n floats becomes one of 8 bits, rounded to the nearest.
inline void narrow_int8(const float* values, int32_t n, char* row) {
  int8_rows::store_row<false>(values, n, 0, row);
}
// The same, rounded at random: key as of rounding_key, the columns from the table's first on.
inline void narrow_int8_by_chance(const float* values, int32_t n, uint64_t key, char* row) {
  int8_rows::store_row<true>(values, n, key, row);
}

}  // namespace torchrec_hkv
