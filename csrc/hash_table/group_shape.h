// Properties of a group of tables that select kernels: widths and types of rows.
#pragma once

#include <cstdint>

#include "common/dtypes.h"
#include "common/macros.h"

namespace torchrec_hkv::hash_table {

// Classes of row widths that have kernels of their own.
enum class WidthClass : int32_t { k32, k64, k128, k256, k512, k1024, kWider };
constexpr int32_t kWidthClasses = 7;

// Columns of the widest row of a class.
HKV_HOST_DEVICE constexpr int32_t most_columns(WidthClass width) {
  return width == WidthClass::kWider ? INT32_MAX : 32 << static_cast<int32_t>(width);
}
HKV_HOST_DEVICE constexpr WidthClass width_class_of(int32_t dim) {
  int32_t width = 0;
  while (width + 1 < kWidthClasses && (32 << width) < dim) ++width;
  return static_cast<WidthClass>(width);
}

// Tables of one width class with the same number of bytes a column are updated by the same kernel.
// Their number is a bit of GroupShape::row_classes.
constexpr int32_t kRowClasses = 2 * kWidthClasses;
constexpr int32_t kAllRowClasses = -1;

// Rows of 8 bits belong to the class of the widest 16-bit rows, whose kernel reads rows of any
// type.
HKV_HOST_DEVICE constexpr int32_t row_class_of(int32_t dim, RowType type) {
  const WidthClass width = type == RowType::kInt8 ? WidthClass::kWider : width_class_of(dim);
  return static_cast<int32_t>(width) + (type == RowType::kFloat32 ? 0 : kWidthClasses);
}

// Properties of a group that select kernels.
struct GroupShape {
  int32_t widest;  // columns of the widest table
  bool four_wide;  // dims and state widths are multiples of four, or states have one value or none
  bool float32_rows;       // of all tables
  bool int8_rows = false;  // of some table
  // Number of features if each has a table of its own; 0: some features share a table.
  int32_t features_apart = 0;
  int64_t most_slots = 0;     // of one table, at its full capacity
  bool keeps_scores = false;  // whether some table has scores; the others evict by LRU
  uint32_t row_classes = 0;   // of its tables, one bit for each row_class_of

  bool rows_of_16_bits() const {  // of all tables
    return !int8_rows && row_classes != 0 && (row_classes & ((1u << kWidthClasses) - 1)) == 0;
  }
  // Whether all tables have rows of many columns.
  bool all_wide() const {
    constexpr int32_t kWide = 384;
    constexpr auto kClass = static_cast<uint32_t>(WidthClass::k512);
    constexpr uint32_t kNarrow = (1u << kClass) - 1;
    return widest > kWide && (row_classes & (kNarrow | kNarrow << kWidthClasses)) == 0;
  }
};

}  // namespace torchrec_hkv::hash_table
