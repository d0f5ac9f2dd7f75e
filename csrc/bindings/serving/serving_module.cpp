#include "bindings/serving/serving_module.h"

#include <ATen/record_function.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

#include "bindings/serving/id_lists.h"
#include "bindings/serving/input_checks.h"
#include "bindings/serving/lookups.h"
#include "bindings/serving/open_tables.h"
#include "bindings/serving/served_calls.h"

namespace py = pybind11;

namespace torchrec_hkv::bindings {
namespace {

// The profiler shows these calls like ops.
at::Tensor call_pool(const at::Tensor& handle, const at::Tensor& ids, const at::Tensor& lengths,
                     const std::optional<at::Tensor>& weights, at::IntArrayRef features,
                     at::IntArrayRef tables, at::IntArrayRef kinds, int64_t columns,
                     at::ScalarType dtype) {
  RECORD_FUNCTION("torchrec_hkv::serving_pool", c10::ArrayRef<const c10::IValue>{});
  return serving_pool(handle, ids, lengths, weights, features, tables, kinds, columns, dtype);
}

std::vector<at::Tensor> call_rows(const at::Tensor& handle, const at::Tensor& ids,
                                  const at::Tensor& lengths, at::IntArrayRef features,
                                  at::IntArrayRef tables, at::IntArrayRef dims,
                                  at::ScalarType dtype) {
  RECORD_FUNCTION("torchrec_hkv::serving_rows", c10::ArrayRef<const c10::IValue>{});
  return serving_rows(handle, ids, lengths, features, tables, dims, dtype);
}

at::Tensor call_table_rows(const at::Tensor& handle, const at::Tensor& ids, int64_t table,
                           at::ScalarType dtype) {
  RECORD_FUNCTION("torchrec_hkv::serving_table_rows", c10::ArrayRef<const c10::IValue>{});
  return serving_table_rows(handle, ids, table, dtype);
}

}  // namespace

void define_serving(py::module_& m) {
  // Arguments by position only: matching names takes time.
  m.def("serving_pool", torch::wrap_pybind_function_no_gil(call_pool),
        "Like torch.ops.torchrec_hkv.serving_pool, but not through the dispatcher.");
  m.def("serving_rows", torch::wrap_pybind_function_no_gil(call_rows),
        "Like torch.ops.torchrec_hkv.serving_rows, but not through the dispatcher.");
  m.def("serving_table_rows", torch::wrap_pybind_function_no_gil(call_table_rows),
        "The rows of ids in one table. Unlike serving_rows, it does not wait for a GPU.");
  m.def("int64_of_lists", torch::wrap_pybind_function(int64_of_lists),
        "Concatenates lists of integers to an int64 tensor. Raises TypeError or OverflowError if\n"
        "a number is not an integer of 64 bits.");
  py::class_<InputChecks>(m, "InputChecks", "Required dtypes and shapes of a program's tensors.")
      .def(py::init<const std::vector<InputChecks::Given>&>())
      .def("check", torch::wrap_pybind_function(&InputChecks::check),
           "Raises TypeError or ValueError unless a list of tensors meets the requirements.");
  // In C++, because a context manager in Python takes as long as the lookup of a few dozen ids.
  py::class_<ServedCalls>(m, "ServedCalls", "Calls of a served model, and their times.")
      .def(py::init<std::vector<double>>())
      .def("call", &ServedCalls::call, "Calls function(*arguments) in inference mode.")
      .def("histogram", &ServedCalls::histogram,
           "(number of calls in each interval of the bounds, sum of their seconds).");
  m.def("serving_close", torch::wrap_pybind_function_no_gil(close_tables),
        "Closes the tables with a handle of torch.ops.torchrec_hkv.serving_open.");
}

}  // namespace torchrec_hkv::bindings
