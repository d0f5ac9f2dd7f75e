// Converts torch's dtypes to types of rows and outputs.
#pragma once

#include "common/dtypes.h"
#include "runtime/tensor.h"

namespace torchrec_hkv::runtime {

// Throws TypeError unless the dtype is float32, float16 or bfloat16. name: the tensor's.
inline RowType row_type_of(at::ScalarType dtype, const char* name) {
  switch (dtype) {
    case at::kFloat:
      return RowType::kFloat32;
    case at::kHalf:
      return RowType::kFloat16;
    case at::kBFloat16:
      return RowType::kBFloat16;
    default:
      TORCH_CHECK_TYPE(false, name, " must be of dtype Float, Half or BFloat16, but is of dtype ",
                       dtype, ".");
  }
}

}  // namespace torchrec_hkv::runtime
