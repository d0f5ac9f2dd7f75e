// Writes memory past the caches: the written lines are not read first and do not evict others.
#pragma once

#include <cstdint>
#include <cstring>

#ifdef __SSE2__
#include <immintrin.h>
#endif

namespace torchrec_hkv {

constexpr int64_t kLineBytes = 64;

inline bool whole_lines(const void* to, int64_t bytes) {
  return bytes % kLineBytes == 0 && reinterpret_cast<uintptr_t>(to) % kLineBytes == 0;
}

// stream_copy and stream_zeros need whole lines. Other threads may read the data after
// finish_streams.
inline void stream_copy(void* to, const void* from, int64_t bytes) {
#if defined(__AVX__)
  auto* out = static_cast<__m256i*>(to);
  const auto* in = static_cast<const __m256i*>(from);
  for (int64_t i = 0; i < bytes / 32; ++i) _mm256_stream_si256(out + i, _mm256_loadu_si256(in + i));
#elif defined(__SSE2__)
  auto* out = static_cast<__m128i*>(to);
  const auto* in = static_cast<const __m128i*>(from);
  for (int64_t i = 0; i < bytes / 16; ++i) _mm_stream_si128(out + i, _mm_loadu_si128(in + i));
#else
  std::memcpy(to, from, bytes);
#endif
}

inline void stream_zeros(void* to, int64_t bytes) {
#ifdef __SSE2__
  auto* out = static_cast<__m128i*>(to);
  for (int64_t i = 0; i < bytes / 16; ++i) _mm_stream_si128(out + i, _mm_setzero_si128());
#else
  std::memset(to, 0, bytes);
#endif
}

inline void finish_streams() {
#ifdef __SSE2__
  _mm_sfence();
#endif
}

}  // namespace torchrec_hkv
