// Sorted slots, for writes whose results must equal those of a single thread.
#pragma once

#include <tuple>

#include "runtime/tensor.h"

namespace torchrec_hkv::runtime {

// Slots in ascending order, and their original positions; the sort is stable.
struct SortedSlots {
  explicit SortedSlots(const at::Tensor& given) {
    std::tie(slots, positions) = at::sort(given, /*stable=*/true, /*dim=*/0, /*descending=*/false);
  }
  const int64_t* slot() const { return slots.const_data_ptr<int64_t>(); }
  const int64_t* position() const { return positions.const_data_ptr<int64_t>(); }

  at::Tensor slots, positions;
};

}  // namespace torchrec_hkv::runtime
