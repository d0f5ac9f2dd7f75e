// Rows that a call is given or gives back: row i belongs to its i-th id, whichever table that is
// of.
#pragma once

#include <cstdint>

#include "common/dtypes.h"
#include "common/macros.h"

namespace torchrec_hkv::hash_table {

// As wide as the widest table of the group. Of a narrower table's rows the first columns count;
// the others are not read, and are given back as zeros. The elements are of the tables' type, or
// float32 where the tables of a group have several or rows of 8 bits.
struct RowMatrix {
  char* data;       // null: there is none
  int32_t columns;  // of a row
  RowType type;

  HKV_HOST_DEVICE int64_t bytes() const {
    return static_cast<int64_t>(columns) * element_size(type);
  }
  HKV_HOST_DEVICE char* at(int64_t row) const { return data + row * bytes(); }
};

}  // namespace torchrec_hkv::hash_table
