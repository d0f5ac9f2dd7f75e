// Columns of rows of read-only tables, read on the CPU.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "common/initial_rows_cpu.h"
#include "common/vectors_cpu.h"
#include "serving/table.h"

#ifdef __AVX2__
#include <immintrin.h>
#endif

namespace torchrec_hkv::serving::cpu {

// Reads columns of a row. A vector of a row of 4 bits begins at an even column.
template <RowFormat kFormat>
class RowReader {
 public:
  RowReader(const char* row, float unit) : row_(row) {
    if constexpr (kFormat == RowFormat::kInt8 || kFormat == RowFormat::kInt4) {
      scale_ = unit * load_element(RowType::kFloat16, row, 0);
      offset_ = unit * load_element(RowType::kFloat16, row, 1);
      row_ += kQuantizedHeaderBytes;
    }
  }

  template <typename Vector>
  void load(int32_t c, Vector& columns) const {
    if constexpr (kFormat == RowFormat::kInt8) {
      if constexpr (sizeof(Vector) == sizeof(float)) {
        columns = offset_ + scale_ * static_cast<uint8_t>(row_[c]);
      } else {
#ifdef __AVX2__  // GCC processes one byte at a time in the conversion below
        const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(row_ + c));
        dequantize((Codes)_mm256_cvtepu8_epi32(bytes), columns);
#else
        typedef uint8_t Bytes __attribute__((vector_size(8)));
        Bytes bytes;
        std::memcpy(&bytes, row_ + c, sizeof(bytes));
        dequantize(__builtin_convertvector(bytes, Codes), columns);
#endif
      }
    } else if constexpr (kFormat == RowFormat::kInt4) {
      if constexpr (sizeof(Vector) == sizeof(float)) {
        columns = offset_ + scale_ * (static_cast<uint8_t>(row_[c / 2]) >> c % 2 * 4 & 15);
      } else {
        uint32_t bytes;
        std::memcpy(&bytes, row_ + c / 2, sizeof(bytes));
        typedef uint32_t Wide __attribute__((vector_size(32)));
        dequantize((Codes)(bytes >> Wide{0, 4, 8, 12, 16, 20, 24, 28} & 15), columns);
      }
    } else {
      constexpr auto kType = static_cast<RowType>(kFormat);
      load_columns<kType>(row_ + c * element_size(kType), columns);
    }
  }

 private:
  typedef int32_t Codes __attribute__((vector_size(32)));

  template <typename Vector>
  void dequantize(const Codes& codes, Vector& columns) const {
    columns = offset_ + scale_ * __builtin_convertvector(codes, Vector);
  }

  const char* row_;
  float scale_ = 1.0f, offset_ = 0.0f;
};

// Columns of the row of an id that the table lacks.
[[gnu::noinline]] inline void unknown_columns(const Table& table, int64_t id, int32_t c, int32_t n,
                                              float* out) {
  if (table.default_row != nullptr) {
    std::copy_n(table.default_row + c, n, out);
  } else {
    initial_row(table.initial_rows, id, static_cast<uint32_t>(c), n, out);
  }
}

// Calls run.operator()<kFormat>().
template <typename Run>
void with_format(RowFormat format, const Run& run) {
  switch (format) {
    case RowFormat::kFloat32:
      return run.template operator()<RowFormat::kFloat32>();
    case RowFormat::kFloat16:
      return run.template operator()<RowFormat::kFloat16>();
    case RowFormat::kBFloat16:
      return run.template operator()<RowFormat::kBFloat16>();
    case RowFormat::kInt8:
      return run.template operator()<RowFormat::kInt8>();
    case RowFormat::kInt4:
      return run.template operator()<RowFormat::kInt4>();
  }
}

}  // namespace torchrec_hkv::serving::cpu
