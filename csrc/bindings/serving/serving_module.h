// The part of the extension module for serving.
#pragma once

#include <pybind11/pybind11.h>

namespace torchrec_hkv::bindings {

void define_serving(pybind11::module_& m);

}  // namespace torchrec_hkv::bindings
