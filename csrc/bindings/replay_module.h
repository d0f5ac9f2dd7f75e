// The part of the extension module for replays of logs, on the CPU.
#pragma once

#include <pybind11/pybind11.h>

namespace torchrec_hkv::bindings {

void define_replay(pybind11::module_& m);

}  // namespace torchrec_hkv::bindings
