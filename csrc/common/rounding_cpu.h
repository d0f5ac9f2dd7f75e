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

// Most columns take few operations. A rounding has their result, and says which columns it is wrong
// for; round_others gives the results of all.
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
    rounded = (((Words)magnitude + (columns.draws & 0x1fffu)) >> 13) - (112u << 10);
    rounded |= columns.bits >> 16 & 0x8000u;
    others = (magnitude < 0x38800000) | (magnitude > 0x477fffff);
  }

  Words rounded;
  Ints others;
};

template <RowType kType>
[[gnu::noinline]] void round_one_by_one(const Eight& columns, Words& rounded) {
  for (int k = 0; k < 8; ++k) {
    rounded[k] = narrow_by_chance(kType, bits_float(columns.bits[k]), columns.draws[k] * 0x10001u);
  }
}

template <RowType kType>
inline void round_others(const Eight& columns, Words& rounded) {
  round_one_by_one<kType>(columns, rounded);
}

#ifdef __AVX2__
// Subnormal values too, which are common in rows of small values.
template <>
inline void round_others<RowType::kFloat16>(const Eight& columns, Words& rounded) {
  const Ints magnitude = (Ints)columns.bits & 0x7fffffff;
  if (any_of(magnitude > 0x477fffff)) {
    return round_one_by_one<RowType::kFloat16>(columns, rounded);
  }
  // A shift by 32 bits or more, or by less than none, gives 0.
  const auto right = [](const Words& words, const Words& by) {
    return (Words)_mm256_srlv_epi32((__m256i)words, (__m256i)by);
  };
  const Words draw = columns.draws | columns.draws << 16;
  const Words fraction = ((Words)magnitude & 0x7fffffu) | 0x800000u;
  const Words shift = 126 - ((Words)magnitude >> 23);
  const Words near = right(fraction + right(draw, 32 - shift), shift);
  // From a shift of 32 bits on, the sum reaches 1 if the fraction's upper part is above ~draw. It
  // has 24 bits, so the draw is then negative as a signed number.
  const Words upper = right(fraction, shift - 32);
  const Words far = (Words)(((Ints)draw < 0) & ((Ints)upper > (Ints)~draw)) & 1;
  const Words is_far = (Words)((Ints)shift > 31), small = (Words)(magnitude < 0x38800000);
  const Words subnormal = (near & ~is_far) | (far & is_far) | (columns.bits >> 16 & 0x8000u);
  rounded = (rounded & ~small) | (subnormal & small);
}
#endif

// narrow_by_chance of sixteen columns, or of the first eight.
template <RowType kType, bool kSixteen>
inline void round_block(const float* from, const Draws& draws, uint16_t* to) {
  Ints first, second;
  int8_rows::widen_draws(draws, first, second);
  const Eight columns(from, first), more_columns(kSixteen ? from + 8 : from, second);
  Rounding<kType> rounding(columns), more(more_columns);
  if (any_of(kSixteen ? rounding.others | more.others : rounding.others)) {
    round_others<kType>(columns, rounding.rounded);
    if (kSixteen) round_others<kType>(more_columns, more.rounded);
  }
  store_halves(rounding.rounded, more.rounded, to);
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
