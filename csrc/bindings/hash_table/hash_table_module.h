// The parts of the extension module for hash tables.
#pragma once

#include <pybind11/pybind11.h>

namespace torchrec_hkv::bindings {

// Slots and bytes of tables that need not exist.
void define_table_sizes(pybind11::module_& m);
void define_optimizers(pybind11::module_& m);
// Configuration of tables: policy, type of rows, initial rows, admission.
void define_table_config(pybind11::module_& m);
void define_table_group(pybind11::module_& m);

}  // namespace torchrec_hkv::bindings
