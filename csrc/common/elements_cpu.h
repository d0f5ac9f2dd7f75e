// Rows of elements of any type and rows of floats, into each other, on the CPU. GCC vectorises
// loops over bfloat16 by itself, over float16 it does not.
#pragma once

#include <cstdint>
#include <cstring>

#include "common/dtypes.h"

#ifdef __F16C__
#include <immintrin.h>
#endif

namespace torchrec_hkv {

// to[c] = from[c], n of them. From 16 bits to float nothing is lost.
inline void widen_elements(RowType type, const char* from, int32_t n, float* __restrict__ to) {
  const auto* const narrow = reinterpret_cast<const uint16_t*>(from);
  switch (type) {
    case RowType::kFloat16: {
      int32_t c = 0;
#ifdef __F16C__
      for (; c + 8 <= n; c += 8) {
        __m128i bits;
        std::memcpy(&bits, narrow + c, sizeof(bits));
        const __m256 columns = _mm256_cvtph_ps(bits);
        std::memcpy(to + c, &columns, sizeof(columns));
      }
#endif
      for (; c < n; ++c) to[c] = from_float16(narrow[c]);
      break;
    }
    case RowType::kBFloat16:
      for (int32_t c = 0; c < n; ++c) to[c] = from_bfloat16(narrow[c]);
      break;
    default:
      std::memcpy(to, from, n * sizeof(float));
  }
}

// The same the other way round; rounds to the nearest, ties to even.
inline void narrow_elements(RowType type, const float* __restrict__ from, int32_t n, char* to) {
  auto* const narrow = reinterpret_cast<uint16_t*>(to);
  switch (type) {
    case RowType::kFloat16: {
      int32_t c = 0;
#ifdef __F16C__
      for (; c + 8 <= n; c += 8) {
        __m256 columns;
        std::memcpy(&columns, from + c, sizeof(columns));
        const __m128i bits = _mm256_cvtps_ph(columns, _MM_FROUND_TO_NEAREST_INT);
        std::memcpy(narrow + c, &bits, sizeof(bits));
      }
#endif
      for (; c < n; ++c) narrow[c] = to_float16(from[c]);
      break;
    }
    case RowType::kBFloat16:
      for (int32_t c = 0; c < n; ++c) narrow[c] = to_bfloat16(from[c]);
      break;
    default:
      std::memcpy(to, from, n * sizeof(float));
  }
}

}  // namespace torchrec_hkv
