// Converts Python's lists of ids.
#pragma once

#include <ATen/core/Tensor.h>
#include <pybind11/pybind11.h>

namespace torchrec_hkv::bindings {

// The numbers of all lists, concatenated, int64. Throws TypeError or OverflowError if a number is
// not an integer of 64 bits.
at::Tensor int64_of_lists(const pybind11::sequence& lists);

}  // namespace torchrec_hkv::bindings
