// The part of the extension module for Tensor-Train tables.
#pragma once

#include <pybind11/pybind11.h>

namespace torchrec_hkv::bindings {

void define_tensor_train(pybind11::module_& m);

}  // namespace torchrec_hkv::bindings
