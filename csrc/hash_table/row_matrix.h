// Rows that a call takes or returns. Row i belongs to the i-th id of the call, of any table.
#pragma once

#include <cstdint>

#include "common/dtypes.h"
#include "common/global_pointer.h"
#include "common/macros.h"

namespace torchrec_hkv::hash_table {

// A matrix as wide as the widest table of the group. A narrower table uses the first columns; the
// others are not read, and are returned as zeros. The elements have the tables' type, or float32 if
// the tables have several types or rows of 8 bits.
struct RowMatrix {
  GlobalPointer<char> data;  // null: no matrix
  int32_t columns;           // of a row
  RowType type;

  HKV_HOST_DEVICE int64_t bytes() const {
    return static_cast<int64_t>(columns) * element_size(type);
  }
  HKV_HOST_DEVICE char* at(int64_t row) const { return data + row * bytes(); }
};

}  // namespace torchrec_hkv::hash_table
