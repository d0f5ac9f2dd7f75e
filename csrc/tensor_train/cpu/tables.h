// Tensor-Train tables for the CPU kernels.
//
// In a table of d cores (2, 3 or 4), the row of id = (((i_1 p_2) + i_2) p_3 + i_3) ... is the
// product of slice i_k of each core. Core k has the layout [p_k][r_k][q_k][r_{k+1}], and the last
// core [p_d][q_d][r_d], with r_1 = r_{d+1} = 1, like on the GPU. In these formulas, cores are
// counted from 1.
//
// For any d, kernels use three parts of a table. The head is the product of the cores before the
// middle: core 1 of two or three cores, cores 1 and 2 of four. The middle is the core before the
// last; a table of two cores has none. So id = (head * middles + middle) * lasts + last. A pair
// (head, middle) is a prefix.
#pragma once

#include <cstdint>

#include "common/dtypes.h"

namespace torchrec_hkv::tensor_train {

constexpr int32_t kMaxCores = 4;

struct TableCpu {
  int64_t rows;   // ids are 0 .. rows - 1
  int32_t cores;  // 2, 3 or 4
  int64_t p[kMaxCores];
  int32_t q[kMaxCores];
  int32_t r[kMaxCores + 1];  // r[0] = r[cores] = 1
  RowType type;
  const char* core[kMaxCores];

  int32_t dim() const {
    int32_t product = 1;
    for (int32_t k = 0; k < cores; ++k) product *= q[k];
    return product;
  }
  // Elements of one slice of a core.
  int64_t slice(int32_t k) const { return static_cast<int64_t>(r[k]) * q[k] * r[k + 1]; }

  bool has_middle() const { return cores > 2; }
  int32_t middle_core() const { return cores - 2; }
  int32_t last_core() const { return cores - 1; }
  int64_t heads() const { return cores == 4 ? p[0] * p[1] : p[0]; }
  int64_t middles() const { return has_middle() ? p[middle_core()] : 1; }
  int64_t lasts() const { return p[last_core()]; }
  // A head is [head_q][head_r], a prefix [head_q * middle_q][last_r], a last slice
  // [last_q][last_r].
  int32_t head_q() const { return cores == 4 ? q[0] * q[1] : q[0]; }
  int32_t head_r() const { return cores == 4 ? r[2] : r[1]; }
  int32_t middle_q() const { return has_middle() ? q[middle_core()] : 1; }
  int32_t last_q() const { return q[last_core()]; }
  int32_t last_r() const { return r[last_core()]; }
};

// A batch for a group of tables: feature-major bags of ids.
struct BatchCpu {
  int32_t features;
  int32_t tables;
  const int32_t* feature_tables;  // [features]
  const int64_t* ids;             // [n]
  const int64_t* offsets;         // [features * batch_size + 1]
  const float* weights;           // [n], or null
  int64_t batch_size;
  bool mean;    // whether pooled rows are divided by the number of ids of the bag
  bool pooled;  // one output row per bag, features side by side; otherwise one row per id
  int64_t n() const { return offsets[static_cast<int64_t>(features) * batch_size]; }
};

}  // namespace torchrec_hkv::tensor_train
