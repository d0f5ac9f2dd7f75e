// Classes and enumerations of the extension module.
#pragma once

#include <torch/csrc/utils/pybind.h>

namespace torchrec_hkv::bindings {

// Policies, data types, and the configurations of optimizers, admission and tables.
void define_configs(pybind11::module_& m);
// Groups of tables, their states and pins. Called after define_configs.
void define_table_group(pybind11::module_& m);

}  // namespace torchrec_hkv::bindings
