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
typedef int32_t Ints __attribute__((vector_size(32)));
typedef int8_t Bytes __attribute__((vector_size(8)));

// The draws of a row's columns, sixteen at a time, in the order of columns. quad: as in
// rounding_bits, where they begin.
class RowDraws {
 public:
  explicit RowDraws(uint64_t key, uint32_t quad = 0) {
    const Quads steps = uint64_t{quad} + Quads{1, 2, 3, 4};
    quads_ = key + steps * kStep;
  }

  void next(Draws& draws) {
    Quads x = quads_;
    quads_ += 4 * kStep;
    x ^= x >> 30;  // mix64
    x *= 0xbf58476d1ce4e5b9ull;
    x ^= x >> 27;
    x *= 0x94d049bb133111ebull;
    x ^= x >> 31;
    draws = (Draws)x;
  }

 private:
  static constexpr uint64_t kStep = 0xd1b54a32d192ed03ull;  // as in rounding_bits
  Quads quads_;
};

// Sixteen draws as integers.
inline void widen_draws(const Draws& draws, Ints& first, Ints& second) {
#ifdef __AVX2__
  first = (Ints)_mm256_cvtepu16_epi32(_mm256_castsi256_si128((__m256i)draws));
  second = (Ints)_mm256_cvtepu16_epi32(_mm256_extracti128_si256((__m256i)draws, 1));
#else
  first =
      __builtin_convertvector(__builtin_shufflevector(draws, draws, 0, 1, 2, 3, 4, 5, 6, 7), Ints);
  second = __builtin_convertvector(
      __builtin_shufflevector(draws, draws, 8, 9, 10, 11, 12, 13, 14, 15), Ints);
#endif
}

// int8_sum of eight columns.
inline Ints sums_of(const float* from, float inverse, float magic) {
  Columns x;
  std::memcpy(&x, from, sizeof(x));
  return (Ints)(x * inverse + magic);
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

// Converts sixteen columns to bytes.
template <bool kByChance>
inline void round_block(const float* from, float inverse, RowDraws& draws, char* to) {
  const float magic = kByChance ? kInt8ChanceMagic : kInt8Magic;
  Ints sums = sums_of(from, inverse, magic), more_sums = sums_of(from + 8, inverse, magic);
  if constexpr (kByChance) {
    Draws of_block;
    draws.next(of_block);
    Ints first, second;
    widen_draws(of_block, first, second);
    sums = ((sums << 1) + first) >> 16 ^ 0x80;
    more_sums = ((more_sums << 1) + second) >> 16 ^ 0x80;
  }
  store_bytes(sums, more_sums, to);
}

// magnitude_bits of the largest of n values.
inline uint32_t largest_magnitude(const float* values, int32_t n) {
  Ints largest = {}, more_largest = {};
  int32_t c = 0;
  for (; c + kBlock <= n; c += kBlock) {
    Ints bits, more_bits;
    std::memcpy(&bits, values + c, sizeof(bits));
    std::memcpy(&more_bits, values + c + 8, sizeof(more_bits));
    bits &= 0x7fffffff;
    more_bits &= 0x7fffffff;
    largest = bits > largest ? bits : largest;
    more_largest = more_bits > more_largest ? more_bits : more_largest;
  }
  largest = largest > more_largest ? largest : more_largest;
  uint32_t of_all = 0;
  for (int k = 0; k < 8; ++k) of_all = std::max(of_all, static_cast<uint32_t>(largest[k]));
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
  RowDraws draws(key);
  int32_t c = 0;
  for (; c + kBlock <= n; c += kBlock) {
    round_block<kByChance>(values + c, scale.inverse, draws, to + c);
  }
  if (c == n) return;
  float rest[kBlock] = {};
  char bytes[kBlock];
  std::copy_n(values + c, n - c, rest);
  round_block<kByChance>(rest, scale.inverse, draws, bytes);
  std::memset(bytes + (n - c), 0, kBlock - (n - c));
  std::memcpy(to + c, bytes, row_size(RowType::kInt8, n) - kInt8Start - c);
}

}  // namespace int8_rows

// Converts columns of a row of 8 bits to floats, from `column` on.
inline void widen_int8(const char* row, int32_t column, int32_t n, float* __restrict__ to) {
  float scale;
  std::memcpy(&scale, row, sizeof(scale));
  const auto* const from = reinterpret_cast<const int8_t*>(row + kInt8Start + column);
  for (int32_t c = 0; c < n; ++c) to[c] = scale * static_cast<float>(from[c]);
}

// Converts n floats to a row of 8 bits, rounded to nearest.
inline void narrow_int8(const float* values, int32_t n, char* row) {
  int8_rows::store_row<false>(values, n, 0, row);
}
// The same with stochastic rounding. key: of rounding_key; columns from the table's first on.
inline void narrow_int8_by_chance(const float* values, int32_t n, uint64_t key, char* row) {
  int8_rows::store_row<true>(values, n, key, row);
}

}  // namespace torchrec_hkv
