#include "common/crc32.h"

#include <array>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace torchrec_hkv {
namespace {

constexpr uint32_t kPolynomial = 0xedb88320u;
constexpr size_t kTables = 8;

// kTable[k][b]: what byte b adds to a checksum if k bytes follow it.
constexpr auto kTable = [] {
  std::array<std::array<uint32_t, 256>, kTables> table{};
  for (uint32_t b = 0; b < 256; ++b) {
    uint32_t value = b;
    for (int bit = 0; bit < 8; ++bit) value = value >> 1 ^ (value & 1 ? kPolynomial : 0);
    table[0][b] = value;
  }
  for (size_t k = 1; k < kTables; ++k) {
    for (size_t b = 0; b < 256; ++b) {
      const uint32_t before = table[k - 1][b];
      table[k][b] = before >> 8 ^ table[0][before & 0xff];
    }
  }
  return table;
}();

// `value` is inverted here, unlike in the functions of the header.
uint32_t by_tables(uint32_t value, const uint8_t* data, size_t size) {
  for (; size >= kTables; data += kTables, size -= kTables) {
    uint64_t word;
    std::memcpy(&word, data, sizeof(word));
    word ^= value;
    value = 0;
    for (size_t k = 0; k < kTables; ++k) value ^= kTable[kTables - 1 - k][word >> 8 * k & 0xff];
  }
  for (; size > 0; ++data, --size) value = value >> 8 ^ kTable[0][(value ^ *data) & 0xff];
  return value;
}

#if defined(__x86_64__)
// x^n modulo the polynomial, reflected and shifted by one, as products of reflected numbers need.
constexpr int64_t power_of_x(int n) {
  uint32_t value = 0x80000000u;  // x^0
  for (int i = 0; i < n; ++i) value = value >> 1 ^ (value & 1 ? kPolynomial : 0);
  return static_cast<int64_t>(value) << 1;
}

#define HKV_CLMUL __attribute__((target("pclmul,sse4.1")))

HKV_CLMUL inline __m128i load(const uint8_t* from) {
  return _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
}
// Replaces 128 bits by 128 bits with the same remainder, further on in the data, and adds `next`.
HKV_CLMUL inline __m128i fold(__m128i x, __m128i by, __m128i next) {
  const __m128i low = _mm_clmulepi64_si128(x, by, 0x00), high = _mm_clmulepi64_si128(x, by, 0x11);
  return _mm_xor_si128(_mm_xor_si128(low, high), next);
}

// Source: V. Gopal et al., "Fast CRC Computation for Generic Polynomials Using PCLMULQDQ
// Instruction", Intel, 2009. The last 128 bits are reduced by tables. size: at least 64.
HKV_CLMUL uint32_t by_multiplication(uint32_t value, const uint8_t* data, size_t size) {
  constexpr int kLanes = 4;
  const __m128i over_lanes =
      _mm_set_epi64x(power_of_x(kLanes * 128 - 32), power_of_x(kLanes * 128 + 32));
  const __m128i over_one = _mm_set_epi64x(power_of_x(128 - 32), power_of_x(128 + 32));
  __m128i lanes[kLanes];
  for (int k = 0; k < kLanes; ++k) lanes[k] = load(data + 16 * k);
  lanes[0] = _mm_xor_si128(lanes[0], _mm_cvtsi32_si128(static_cast<int>(value)));
  for (data += 64, size -= 64; size >= 64; data += 64, size -= 64) {
    for (int k = 0; k < kLanes; ++k) lanes[k] = fold(lanes[k], over_lanes, load(data + 16 * k));
  }
  __m128i folded = lanes[0];
  for (int k = 1; k < kLanes; ++k) folded = fold(folded, over_one, lanes[k]);
  for (; size >= 16; data += 16, size -= 16) folded = fold(folded, over_one, load(data));
  uint8_t rest[16];
  _mm_storeu_si128(reinterpret_cast<__m128i*>(rest), folded);
  return by_tables(by_tables(0, rest, sizeof(rest)), data, size);
}
#undef HKV_CLMUL
#endif

}  // namespace

uint32_t crc32(uint32_t value, const void* data, size_t size) {
#if defined(__x86_64__)
  static const bool multiplies =
      __builtin_cpu_supports("pclmul") && __builtin_cpu_supports("sse4.1");
  if (multiplies && size >= 64) {
    return ~by_multiplication(~value, static_cast<const uint8_t*>(data), size);
  }
#endif
  return crc32_by_tables(value, data, size);
}

uint32_t crc32_by_tables(uint32_t value, const void* data, size_t size) {
  return ~by_tables(~value, static_cast<const uint8_t*>(data), size);
}

}  // namespace torchrec_hkv
