// Properties of a group of tables that select kernels: widths and types of rows.
#pragma once

#include <cstdint>

#include "common/dtypes.h"
#include "common/macros.h"
#include "common/scores.h"

namespace torchrec_hkv::hash_table {

// Classes of row widths that have kernels of their own.
enum class WidthClass : int32_t { k32, k64, k128, k256, k512, k1024, kWider };
constexpr int32_t kWidthClasses = 7;

// Columns of the widest row of a class.
HKV_HOST_DEVICE constexpr int32_t max_columns(WidthClass width) {
  return width == WidthClass::kWider ? INT32_MAX : 32 << static_cast<int32_t>(width);
}
HKV_HOST_DEVICE constexpr WidthClass width_class_of(int32_t dim) {
  int32_t width = 0;
  while (width + 1 < kWidthClasses && (32 << width) < dim) ++width;
  return static_cast<WidthClass>(width);
}

// Tables of one width class with the same number of bytes a column are updated by the same kernel.
// Each class is a bit of GroupShape::row_classes.
constexpr int32_t kRowClasses = 3 * kWidthClasses;
constexpr int32_t kAllRowClasses = -1;

// The first class of rows of this type.
HKV_HOST_DEVICE constexpr int32_t first_row_class(RowType type) {
  return type == RowType::kFloat32 ? 0 : type == RowType::kInt8 ? 2 * kWidthClasses : kWidthClasses;
}
HKV_HOST_DEVICE constexpr int32_t row_class_of(int32_t dim, RowType type) {
  return first_row_class(type) + static_cast<int32_t>(width_class_of(dim));
}

// Properties of a group that select kernels.
struct GroupShape {
  int32_t widest;  // columns of the widest table
  bool four_wide;  // dims and state widths are multiples of four, or states have one value or none
  bool float32_rows;       // of all tables
  bool int8_rows = false;  // of some table
  // Number of features if each has a table of its own; 0: some features share a table.
  int32_t num_unshared_features = 0;
  int64_t max_slots = 0;                      // of one table, at its full capacity
  StoredScores scores = StoredScores::kNone;  // what some table stores
  uint32_t row_classes = 0;                   // of its tables, one bit for each row_class_of

  // Whether the rows of all tables have 16 bits a column, or 8.
  bool rows_of_16_bits() const { return has_only_rows_of(RowType::kFloat16); }
  bool rows_of_8_bits() const { return has_only_rows_of(RowType::kInt8); }
  // Whether all tables have rows of many columns.
  bool all_wide() const {
    constexpr int32_t kWide = 384;
    constexpr auto kClass = static_cast<uint32_t>(WidthClass::k512);
    constexpr uint32_t kNarrow = (1u << kClass) - 1;
    constexpr uint32_t kOfAnyType =
        kNarrow | kNarrow << kWidthClasses | kNarrow << 2 * kWidthClasses;
    return widest > kWide && (row_classes & kOfAnyType) == 0;
  }

 private:
  bool has_only_rows_of(RowType type) const {
    const uint32_t classes = ((1u << kWidthClasses) - 1) << first_row_class(type);
    return row_classes != 0 && (row_classes & ~classes) == 0;
  }
};

}  // namespace torchrec_hkv::hash_table
