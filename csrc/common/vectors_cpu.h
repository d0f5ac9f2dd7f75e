// Columns of rows as vectors of floats, on the CPU, by GCC's and Clang's vector extension, which
// works on any machine. 16-bit columns are widened when loaded and rounded to the nearest, ties to
// even, when stored. Columns of 8 bits are only loaded: they are stored a row at a time
// (common/int8_rows_cpu.h).
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#include "common/dtypes.h"

#ifdef __SSE4_1__
#include <immintrin.h>
#endif

namespace torchrec_hkv {

typedef float Columns __attribute__((vector_size(32)));      // eight
typedef float FourColumns __attribute__((vector_size(16)));  // and `float` is one

// The number of columns of a vector, or of `float`.
template <typename Vector>
constexpr int kColumnsOf = sizeof(Vector) / sizeof(float);

namespace vectors {

// Vectors of as many integers as Columns or FourColumns have floats.
template <typename Vector>
struct Integers;
template <>
struct Integers<Columns> {
  typedef int8_t Byte __attribute__((vector_size(8)));
  typedef int32_t Signed __attribute__((vector_size(32)));
  typedef uint16_t Narrow __attribute__((vector_size(16)));
  typedef uint32_t Wide __attribute__((vector_size(32)));
};
template <>
struct Integers<FourColumns> {
  typedef int8_t Byte __attribute__((vector_size(4)));
  typedef int32_t Signed __attribute__((vector_size(16)));
  typedef uint16_t Narrow __attribute__((vector_size(8)));
  typedef uint32_t Wide __attribute__((vector_size(16)));
};

template <typename Vector>
void widen_bfloat16(const char* from, Vector& columns) {
  typename Integers<Vector>::Narrow bits;
  std::memcpy(&bits, from, sizeof(bits));
#ifdef __AVX2__  // GCC 12 converts the halves of these vectors one by one
  if constexpr (sizeof(Vector) == 32) {
    columns = (Vector)_mm256_slli_epi32(_mm256_cvtepu16_epi32((__m128i)bits), 16);
    return;
  }
#endif
  columns = (Vector)(__builtin_convertvector(bits, typename Integers<Vector>::Wide) << 16);
}

// to_bfloat16 of each column.
template <typename Vector>
void narrow_bfloat16(const Vector& columns, char* to) {
  using Wide = typename Integers<Vector>::Wide;
  const Wide bits = (Wide)columns;
  const Wide rounded = (bits + 0x7fffu + (bits >> 16 & 1)) >> 16;
  const Wide is_nan = (Wide)((bits & 0x7fffffffu) > 0x7f800000u);
  const Wide both = (rounded & ~is_nan) | ((bits >> 16 | 0x40) & is_nan);
  const auto narrow = __builtin_convertvector(both, typename Integers<Vector>::Narrow);
  std::memcpy(to, &narrow, sizeof(narrow));
}

template <typename Vector>
void widen_float16(const char* from, Vector& columns) {
#ifdef __F16C__
  __m128i bits{};
  std::memcpy(&bits, from, sizeof(Vector) / 2);
  if constexpr (sizeof(Vector) == 32) {
    columns = (Vector)_mm256_cvtph_ps(bits);
  } else {
    columns = (Vector)_mm_cvtph_ps(bits);
  }
#else
  for (int k = 0; k < kColumnsOf<Vector>; ++k) {
    columns[k] = load_element(RowType::kFloat16, from, k);
  }
#endif
}

template <typename Vector>
void narrow_float16(const Vector& columns, char* to) {
#ifdef __F16C__
  if constexpr (sizeof(Vector) == 32) {
    const __m128i bits = _mm256_cvtps_ph((__m256)columns, _MM_FROUND_TO_NEAREST_INT);
    std::memcpy(to, &bits, 16);
  } else {
    const __m128i bits = _mm_cvtps_ph((__m128)columns, _MM_FROUND_TO_NEAREST_INT);
    std::memcpy(to, &bits, 8);
  }
#else
  for (int k = 0; k < kColumnsOf<Vector>; ++k) {
    store_element(RowType::kFloat16, to, k, columns[k]);
  }
#endif
}

// Converts the int8 alone, without the scale.
template <typename Vector>
void widen_int8(const char* from, Vector& columns) {
  // GCC 12 converts these vectors byte by byte.
#ifdef __AVX2__
  if constexpr (sizeof(Vector) == 32) {
    const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from));
    columns = (Vector)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes));
    return;
  }
#endif
#ifdef __SSE4_1__
  if constexpr (sizeof(Vector) == 16) {
    int32_t word;
    std::memcpy(&word, from, sizeof(word));
    columns = (Vector)_mm_cvtepi32_ps(_mm_cvtepi8_epi32(_mm_cvtsi32_si128(word)));
    return;
  }
#endif
  typename Integers<Vector>::Byte bytes;
  std::memcpy(&bytes, from, sizeof(bytes));
  columns = __builtin_convertvector(
      __builtin_convertvector(bytes, typename Integers<Vector>::Signed), Vector);
}

}  // namespace vectors

// Loads a vector's columns, stored as kType. Vectors are passed by reference: how they are passed
// by value depends on what the compiler may assume of the machine.
template <RowType kType, typename Vector>
inline void load_columns(const char* from, Vector& columns) {
  if constexpr (sizeof(Vector) == sizeof(float)) {
    columns = load_element(kType, from, 0);
  } else if constexpr (kType == RowType::kFloat16) {
    vectors::widen_float16(from, columns);
  } else if constexpr (kType == RowType::kBFloat16) {
    vectors::widen_bfloat16(from, columns);
  } else {
    std::memcpy(&columns, from, sizeof(columns));
  }
}

// Loads columns of a stored row, from `column` on.
template <RowType kType>
class StoredColumns {
 public:
  StoredColumns(const char* row, int32_t column) : from_(row + column * element_size(kType)) {}

  // column: relative to that of the constructor.
  template <typename Vector>
  void load(int32_t column, Vector& columns) const {
    load_columns<kType>(from_ + column * element_size(kType), columns);
  }

 private:
  const char* const from_;
};
template <>
class StoredColumns<RowType::kInt8> {
 public:
  StoredColumns(const char* row, int32_t column) : from_(row + kInt8Start + column) {
    std::memcpy(&scale_, row, sizeof(scale_));
  }

  template <typename Vector>
  void load(int32_t column, Vector& columns) const {
    if constexpr (sizeof(Vector) == sizeof(float)) {
      columns = scale_ * static_cast<float>(reinterpret_cast<const int8_t*>(from_)[column]);
    } else {
      vectors::widen_int8(from_ + column, columns);
      columns *= scale_;
    }
  }

 private:
  const char* const from_;
  float scale_;
};

// The inverse of load_columns.
template <RowType kType, typename Vector>
inline void store_columns(const Vector& columns, char* to) {
  if constexpr (sizeof(Vector) == sizeof(float)) {
    store_element(kType, to, 0, columns);
  } else if constexpr (kType == RowType::kFloat16) {
    vectors::narrow_float16(columns, to);
  } else if constexpr (kType == RowType::kBFloat16) {
    vectors::narrow_bfloat16(columns, to);
  } else {
    std::memcpy(to, &columns, sizeof(columns));
  }
}

// Calls visit(0) to visit(n - 1) with constants, so that an array that is indexed only by them can
// stay in registers.
template <int n, typename Visit>
inline void unrolled(const Visit& visit) {
  [&]<int... k>(std::integer_sequence<int, k...>) {
    (visit(std::integral_constant<int, k>()), ...);
  }(std::make_integer_sequence<int, n>());
}

// Calls visit.operator()<Vector, kVectors>(first column) for all columns of a row, as many vectors
// at a time as fit registers. If the number of columns is not a multiple of eight, some columns are
// visited twice, with the same result.
template <typename Visit>
inline void for_vectors(int32_t dim, const Visit& visit) {
  int32_t c = 0;
  for (; dim - c >= 64; c += 64) visit.template operator()<Columns, 8>(c);
  if (dim < 8) {
    if (dim - c >= 4) visit.template operator()<FourColumns, 1>(c), c += 4;
    for (; c < dim; ++c) visit.template operator()<float, 1>(c);
    return;
  }
  int32_t vectors = (dim - c) / 8;
  const bool rest = dim % 8 != 0;
  const bool overlaps = rest && 8 * (vectors + 1) <= dim;  // one call, which begins earlier
  vectors += overlaps;
  if (overlaps) c = dim - 8 * vectors;
  unrolled<7>([&](auto k) {
    if (vectors == k + 1) visit.template operator()<Columns, k + 1>(c);
  });
  if (vectors == 8) visit.template operator()<Columns, 8>(c);
  if (rest && !overlaps) visit.template operator()<Columns, 1>(dim - 8);
}

// As for_vectors, with visit.operator()<Vector, kVectors>(first column, offset of the last vector),
// for work that goes through memory once for each call: rows of 9 to 63 columns take one call.
// offset_of gives the offset of each vector, in columns; the last one may overlap the one before
// it.
template <typename Visit>
inline void for_vectors_once(int32_t dim, const Visit& visit) {
  if (dim < 8 || dim >= 64 || dim % 8 == 0) {
    for_vectors(dim, [&]<typename Vector, int kVectors>(int32_t c) {
      visit.template operator()<Vector, kVectors>(c, (kVectors - 1) * kColumnsOf<Vector>);
    });
    return;
  }
  unrolled<7>([&](auto k) {
    if (dim / 8 == k + 1) visit.template operator()<Columns, k + 2>(0, dim - 8);
  });
}
template <typename Vector, int kVectors>
inline int32_t offset_of(int v, int32_t last) {
  return v == kVectors - 1 ? last : v * kColumnsOf<Vector>;
}

// Calls visit.operator()<type>() with the type as a constant: a type of outputs and gradients.
template <typename Visit>
inline void with_type(RowType type, const Visit& visit) {
  switch (type) {
    case RowType::kFloat16:
      return visit.template operator()<RowType::kFloat16>();
    case RowType::kBFloat16:
      return visit.template operator()<RowType::kBFloat16>();
    default:
      return visit.template operator()<RowType::kFloat32>();
  }
}
// The same for the types of stored rows.
template <typename Visit>
inline void with_row_type(RowType type, const Visit& visit) {
  if (type == RowType::kInt8) return visit.template operator()<RowType::kInt8>();
  with_type(type, visit);
}

}  // namespace torchrec_hkv
