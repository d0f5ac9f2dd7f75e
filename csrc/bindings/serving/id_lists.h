// Ids in Python's lists.
#pragma once

#include <ATen/core/Tensor.h>
#include <pybind11/pybind11.h>

namespace torchrec_hkv::bindings {

// The numbers of all lists, one list after the other, int64. Throws Python's TypeError or
// OverflowError where one is not an integer of 64 bits.
at::Tensor int64_of_lists(const pybind11::sequence& lists);

}  // namespace torchrec_hkv::bindings
