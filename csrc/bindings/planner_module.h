// The part of the extension module for the planner.
#pragma once

#include <pybind11/pybind11.h>

namespace torchrec_hkv::bindings {

void define_planner(pybind11::module_& m);

}  // namespace torchrec_hkv::bindings
