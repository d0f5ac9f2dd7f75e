// Initial rows on a CPU, a row at a time and in vectors.
// The values are those of initial_value, bit for bit.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "common/dtypes.h"
#include "common/initial_rows.h"

namespace torchrec_hkv {

constexpr int32_t kMostDraws = 64;

// Four lanes of GCC's and Clang's vector extension: no machine must have them.
typedef uint64_t Lanes __attribute__((vector_size(32)));

inline void mix_lanes(Lanes& x) {  // mix64
  x ^= x >> 30;
  x *= 0xbf58476d1ce4e5b9ull;
  x ^= x >> 27;
  x *= 0x94d049bb133111ebull;
  x ^= x >> 31;
}

// n draws of consecutive columns, from the first column of `block` on; n is rounded up to 16.
inline void draw_columns(uint64_t of_id, uint64_t block, uint32_t n, uint32_t* draws) {
  for (uint32_t done = 0; done < n; done += 16, block += 4) {
    const Lanes blocks = {block, block + 1, block + 2, block + 3};
    Lanes first = of_id ^ (blocks << 1);
    mix_lanes(first);
    Lanes second = first ^ 0xd1b54a32d192ed03ull;
    mix_lanes(second);
    const Lanes low = __builtin_shufflevector(first, second, 0, 4, 1, 5);
    const Lanes high = __builtin_shufflevector(first, second, 2, 6, 3, 7);
    std::memcpy(draws + done, &low, sizeof(low));
    std::memcpy(draws + done + 8, &high, sizeof(high));
  }
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
  uint32_t draws[kMostDraws];
  for (uint32_t c = column; c < end;) {
    const uint32_t skip = c & 3;
    const uint32_t count = std::min<uint32_t>(kMostDraws - skip, end - c);
    draw_columns(of_id, c >> 2, skip + count, draws);
    float* to = out + (c - column);
    if (uniform) {
      for (uint32_t k = 0; k < count; ++k) to[k] = scale_uniform(init, draws[skip + k]);
    } else {
      for (uint32_t k = 0; k < count; ++k) to[k] = scale_normal(init, draws[skip + k]);
    }
    c += count;
  }
}

// The same in a row's own type.
inline void store_initial_row(const InitialRows& init, int64_t id, uint32_t column, int32_t n,
                              RowType type, char* row) {
  if (type == RowType::kFloat32) {
    initial_row(init, id, column, n, reinterpret_cast<float*>(row));
    return;
  }
  float values[kMostDraws];
  for (int32_t c = 0; c < n; c += kMostDraws) {
    const int32_t count = std::min(kMostDraws, n - c);
    initial_row(init, id, column + static_cast<uint32_t>(c), count, values);
    for (int32_t k = 0; k < count; ++k) store_element(type, row, c + k, values[k]);
  }
}

}  // namespace torchrec_hkv
