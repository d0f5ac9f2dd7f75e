// Rows and optimizer states of float32 tables, side by side in one matrix.
#pragma once

#include <cstdint>

#include "common/macros.h"

namespace torchrec_hkv::hash_table {

// Row i: the row of an entry, then its state. Further columns are others'.
struct ValueMatrix {
  float* data;
  int64_t stride;  // columns from one row to the next
  bool states;     // whether states are there

  HKV_HOST_DEVICE float* at(int64_t i) const { return data + i * stride; }
};

}  // namespace torchrec_hkv::hash_table
