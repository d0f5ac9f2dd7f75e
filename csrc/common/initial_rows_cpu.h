// Initial rows on a CPU, a row at a time and in vectors.
// The values are those of initial_value, bit for bit.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "common/dtypes.h"
#include "common/initial_rows.h"
#include "common/initial_rows_avx512.h"
#include "common/int8_rows_cpu.h"

namespace torchrec_hkv {

// Four lanes of GCC's and Clang's vector extension, which works on any machine.
typedef uint64_t Lanes __attribute__((vector_size(32)));

inline void mix_lanes(Lanes& x) {  // mix64
  x ^= x >> 30;
  x *= 0xbf58476d1ce4e5b9ull;
  x ^= x >> 27;
  x *= 0x94d049bb133111ebull;
  x ^= x >> 31;
}

typedef uint32_t Draws __attribute__((vector_size(32)));
typedef float Values __attribute__((vector_size(32)));

// The draws of 16 columns, from the first column of `block` on.
inline void draw_columns(uint64_t of_id, uint64_t block, Draws& low, Draws& high) {
  const Lanes blocks = {block, block + 1, block + 2, block + 3};
  Lanes first = of_id ^ (blocks << 1);
  mix_lanes(first);
  Lanes second = first ^ 0xd1b54a32d192ed03ull;
  mix_lanes(second);
  low = (Draws)__builtin_shufflevector(first, second, 0, 4, 1, 5);
  high = (Draws)__builtin_shufflevector(first, second, 2, 6, 3, 7);
}

// scale_uniform of eight draws.
inline void store_uniform(const InitialRows& init, const Draws& draws, float* out) {
  typedef int32_t Ints __attribute__((vector_size(32)));
  const Values unit = __builtin_convertvector((Ints)(draws >> 8), Values) * (1.0f / 16777216.0f);
  const Values values = init.low + (init.high - init.low) * unit;
  std::memcpy(out, &values, sizeof(values));
}

// out[i] = the value of column `column` + i, for n columns.
inline void initial_row(const InitialRows& init, int64_t id, uint32_t column, int32_t n,
                        float* out) {
  const bool uniform = init.distribution == Distribution::kUniform;
  if (uniform && init.low == init.high) {
    std::fill_n(out, n, scale_uniform(init, 0));
    return;
  }
  const uint64_t of_id = id_bits(init, id);
  const uint32_t end = column + static_cast<uint32_t>(n);
  Draws draws[2];
  uint32_t c = column;
#ifdef __x86_64__
  if (uniform && c % 4 == 0 && has_avx512())
    c += uniform_columns_avx512(init, of_id, c >> 2, n, out);
#endif
  // The draws stay in registers: stores to memory would queue after those to rows.
  for (; uniform && c % 4 == 0 && end - c >= 16; c += 16) {
    draw_columns(of_id, c >> 2, draws[0], draws[1]);
    store_uniform(init, draws[0], out + (c - column));
    store_uniform(init, draws[1], out + (c - column) + 8);
  }
  while (c < end) {
    draw_columns(of_id, c >> 2, draws[0], draws[1]);
    const auto* bits = reinterpret_cast<const uint32_t*>(draws);
    for (uint32_t k = c & 3; k < 16 && c < end; ++k, ++c) {
      out[c - column] = uniform ? scale_uniform(init, bits[k]) : scale_normal(init, bits[k]);
    }
  }
}

constexpr int32_t kMaxColumns = 2048;  // of a row; runtime/table_config.cpp refuses more

// As initial_row, in a row's own type.
inline void store_initial_row(const InitialRows& init, int64_t id, uint32_t column, int32_t n,
                              RowType type, char* row) {
  if (type == RowType::kFloat32) {
    initial_row(init, id, column, n, reinterpret_cast<float*>(row));
    return;
  }
  if (type == RowType::kInt8) {
    float values[kMaxColumns];
    initial_row(init, id, column, n, values);
    narrow_int8(values, n, row);
    return;
  }
  constexpr int32_t kPart = 64;
  float values[kPart];
  for (int32_t c = 0; c < n; c += kPart) {
    const int32_t count = std::min(kPart, n - c);
    initial_row(init, id, column + static_cast<uint32_t>(c), count, values);
    for (int32_t k = 0; k < count; ++k) store_element(type, row, c + k, values[k]);
  }
}

}  // namespace torchrec_hkv
