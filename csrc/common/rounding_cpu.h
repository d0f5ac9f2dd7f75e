// Stochastic rounding of rows of 16 bits on the CPU, sixteen columns at a time: the values of
// narrow_by_chance.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "common/int8_rows_cpu.h"
#include "common/rounding.h"
#include "common/vectors_cpu.h"

namespace torchrec_hkv {
namespace chance {

using int8_rows::Draws;
using int8_rows::Ints;
using int8_rows::kBlock;
using int8_rows::RowDraws;
typedef uint32_t Words __attribute__((vector_size(32)));
typedef uint16_t Halves __attribute__((vector_size(16)));

// Whether any of eight masks is set.
inline bool any_of(const Ints& masks) {
#ifdef __AVX2__
  return !_mm256_testz_si256((__m256i)masks, (__m256i)masks);
#else
  int32_t any = 0;
  for (int k = 0; k < 8; ++k) any |= masks[k];
  return any != 0;
#endif
}

// The low halves of sixteen words, none of which is above 0xffff.
inline void store_halves(const Words& first, const Words& second, uint16_t* to) {
#ifdef __AVX2__
  const __m256i packed = _mm256_packus_epi32((__m256i)first, (__m256i)second);
  const __m256i ordered = _mm256_permute4x64_epi64(packed, 0xd8);
  std::memcpy(to, &ordered, sizeof(ordered));
#else
  const Halves halves[2] = {__builtin_convertvector(first, Halves),
                            __builtin_convertvector(second, Halves)};
  std::memcpy(to, halves, sizeof(halves));
#endif
}

// narrow_by_chance of eight columns. draws: 16 bits each. In `rounded`, one word a column.
template <RowType kType>
inline void round_one_by_one(const float* from, const Ints& draws, Words& rounded) {
  for (int k = 0; k < 8; ++k) {
    rounded[k] = narrow_by_chance(kType, from[k], static_cast<uint32_t>(draws[k]) * 0x10001u);
  }
}

template <RowType kType>
void round_columns(const float* from, const Ints& draws, Words& rounded);

template <>
inline void round_columns<RowType::kBFloat16>(const float* from, const Ints& draws,
                                              Words& rounded) {
  Words bits;
  std::memcpy(&bits, from, sizeof(bits));
  const Words sums = (bits + (Words)draws) >> 16;
  // An infinity keeps its bits, and so does a NaN with one more bit set.
  const Ints magnitude = (Ints)bits & 0x7fffffff;
  const Words special = (Words)(magnitude > 0x7f7fffff), is_nan = (Words)(magnitude > 0x7f800000);
  rounded = (sums & ~special) | (((bits >> 16) | (is_nan & 0x40)) & special);
}

template <>
inline void round_columns<RowType::kFloat16>(const float* from, const Ints& draws, Words& rounded) {
#if defined(__AVX2__) && defined(__F16C__)
  Words bits;
  std::memcpy(&bits, from, sizeof(bits));
  const Ints magnitude = (Ints)bits & 0x7fffffff;
  const Words sign = bits >> 16 & 0x8000u;
  rounded = (((Words)magnitude + ((Words)draws & 0x1fffu)) >> 13) - (112u << 10);
  const Ints small = magnitude < 0x38800000;
  if (any_of(small)) {
    // The shifts and sums of to_float16_by_chance. A shift by 32 bits and more gives 0, and one by
    // less than none counts as more. From 32 bits on, `above` is the part of the fraction that is
    // compared with the draw.
    const Words shift = 126 - ((Words)magnitude >> 23);
    const Words draw = (Words)draws | (Words)draws << 16;
    const Words fraction = ((Words)magnitude & 0x7fffffu) | 0x800000u;
    const auto right = [](const Words& words, const Words& by) {
      return (Words)_mm256_srlv_epi32((__m256i)words, (__m256i)by);
    };
    const Words near = right(fraction + right(draw, 32 - shift), shift);
    const Words above = right(fraction, shift - 32);
    // above > ~draw, unsigned; `above` is less than 2^24.
    const Words far = (Words)(((Ints)draw < 0) & ((Ints)above > (Ints)~draw)) & 1;
    const Words is_far = (Words)((Ints)shift > 31);
    const Words tiny = (near & ~is_far) | (far & is_far);
    rounded = (rounded & ~(Words)small) | (tiny & (Words)small);
  }
  rounded |= sign;
  const Ints large = magnitude >= 0x47800000;
  if (any_of(large)) {
    const __m128i nearest = _mm256_cvtps_ph((__m256)bits, _MM_FROUND_TO_NEAREST_INT);
    const Words words = (Words)_mm256_cvtepu16_epi32(nearest);
    rounded = (rounded & ~(Words)large) | (words & (Words)large);
  }
#else
  round_one_by_one<RowType::kFloat16>(from, draws, rounded);
#endif
}

// Draws from a column on that is no multiple of four.
class ShiftedDraws {
 public:
  ShiftedDraws(uint64_t key, int32_t column) : draws_(key, column >> 2), skipped_(column & 3) {
    draws_.next(ahead_[1]);
  }

  void next(Draws& draws) {
    ahead_[0] = ahead_[1];
    draws_.next(ahead_[1]);
    std::memcpy(&draws, reinterpret_cast<const uint16_t*>(ahead_) + skipped_, sizeof(draws));
  }

 private:
  RowDraws draws_;
  const int32_t skipped_;
  Draws ahead_[2];
};

template <RowType kType, typename Source>
inline void round_row(const float* from, int32_t n, Source draws, uint16_t* to) {
  const auto round = [&](int32_t c, uint16_t* rounded) {
    Draws of_block;
    draws.next(of_block);
    Ints first, second;
    int8_rows::widen_draws(of_block, first, second);
    Words low, high;
    round_columns<kType>(from + c, first, low);
    round_columns<kType>(from + c + 8, second, high);
    store_halves(low, high, rounded);
  };
  int32_t c = 0;
  for (; c + kBlock <= n; c += kBlock) round(c, to + c);
  if (c == n) return;
  uint16_t rest[kBlock];
  round(c, rest);
  const uint16_t* at = rest;
  // By sizes that the compiler knows: a call of memcpy would take longer than the rounding.
  const auto copy = [&]<int kColumns>() {
    if (!((n - c) & kColumns)) return;
    std::memcpy(to + c + (at - rest), at, kColumns * sizeof(uint16_t));
    at += kColumns;
  };
  copy.template operator()<8>();
  copy.template operator()<4>();
  copy.template operator()<2>();
  copy.template operator()<1>();
}

template <RowType kType>
inline void round_row(const float* from, int32_t n, uint64_t key, int32_t column, uint16_t* to) {
  if (column % 4 == 0) return round_row<kType>(from, n, RowDraws(key, column >> 2), to);
  round_row<kType>(from, n, ShiftedDraws(key, column), to);
}

}  // namespace chance

// narrow_by_chance of n columns to 16 bits. key: of rounding_key; column: the first one's number in
// the table. `from` is readable up to a multiple of kRoundedTogether columns.
constexpr int32_t kRoundedTogether = chance::kBlock;
inline void narrow_elements_by_chance(RowType type, const float* from, int32_t n, uint64_t key,
                                      int32_t column, char* to) {
  auto* const halves = reinterpret_cast<uint16_t*>(to);
  if (type == RowType::kFloat16) {
    chance::round_row<RowType::kFloat16>(from, n, key, column, halves);
  } else {
    chance::round_row<RowType::kBFloat16>(from, n, key, column, halves);
  }
}

}  // namespace torchrec_hkv
