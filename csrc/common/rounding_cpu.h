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

// Eight columns and their draws, 16 bits each.
struct Eight {
  Eight(const float* from, const Ints& draws_of) : draws((Words)draws_of) {
    std::memcpy(&bits, from, sizeof(bits));
  }

  Words bits;
  Words draws;
};

// Rounds eight columns in few operations. `others` marks the columns for which `rounded` is wrong:
// those with large or infinite values, or NaN.
template <RowType kType>
struct Rounding;

template <>
struct Rounding<RowType::kBFloat16> {
  explicit Rounding(const Eight& columns)
      : rounded((columns.bits + columns.draws) >> 16),
        others(((Ints)columns.bits & 0x7f800000) == 0x7f800000) {}  // infinite or NaN

  Words rounded;
  Ints others;
};

template <>
struct Rounding<RowType::kFloat16> {
  explicit Rounding(const Eight& columns) {
    const Ints magnitude = (Ints)columns.bits & 0x7fffffff;
    const Ints small = magnitude < 0x38800000;
    // As float16_by_chance. The float16 is the upper bits of the sum, less an offset of the
    // exponent.
    const Columns raised = (Columns)magnitude + (Columns)(small & 0x38800000);
    rounded = ((Words)raised + (columns.draws & 0x1fffu)) >> 13;
    rounded -= (112u << 10) + ((Words)small & 0x400u);
    rounded |= columns.bits >> 16 & 0x8000u;
    others = magnitude > 0x477fffff;
  }

  Words rounded;
  Ints others;
};

template <RowType kType>
[[gnu::noinline]] void round_one_by_one(const Eight& columns, Words& rounded) {
  for (int k = 0; k < 8; ++k) {
    rounded[k] = narrow_by_chance(kType, bits_float(columns.bits[k]), columns.draws[k]);
  }
}

// narrow_by_chance of sixteen columns, or of the first eight.
template <RowType kType, bool kSixteen>
inline void round_block(const float* from, const Draws& draws, uint16_t* to) {
  Ints first, second;
  int8_rows::widen_draws(draws, first, second);
  const Eight columns(from, first), more_columns(kSixteen ? from + 8 : from, second);
  Rounding<kType> rounding(columns), more(more_columns);
  if (any_of(kSixteen ? rounding.others | more.others : rounding.others)) {
    round_one_by_one<kType>(columns, rounding.rounded);
    if (kSixteen) round_one_by_one<kType>(more_columns, more.rounded);
  }
  store_halves(rounding.rounded, more.rounded, to);
}

// The draws of a row from a column on that is not a multiple of four.
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
inline void round_row(const float* from, int32_t n, Source source, uint16_t* to) {
  Draws draws;
  int32_t c = 0;
  for (; c + kBlock <= n; c += kBlock) {
    source.next(draws);
    round_block<kType, true>(from + c, draws, to + c);
  }
  if (c == n) return;
  source.next(draws);
  uint16_t rest[kBlock];
  if (n - c > 8) {
    round_block<kType, true>(from + c, draws, rest);
  } else {
    round_block<kType, false>(from + c, draws, rest);
  }
  const uint16_t* at = rest;
  // Copies of constant size. A call of memcpy would take longer than the rounding.
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
