#include "bindings/serving/id_lists.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <vector>

namespace py = pybind11;

namespace torchrec_hkv::bindings {
namespace {

// A list or tuple of the elements of any iterable.
py::object as_list(const py::handle& given) {
  PyObject* const made = PySequence_Fast(given.ptr(), "ids of a sample must be a list.");
  if (made == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(made);
}

int64_t as_int64(PyObject* number) {
  if (PyLong_CheckExact(number)) return PyLong_AsLongLong(number);
  // Keeps the number alive: the next call runs code of its class, which may change the list.
  const auto item = py::reinterpret_borrow<py::object>(number);
  const auto whole = py::reinterpret_steal<py::object>(PyNumber_Index(item.ptr()));
  return whole ? PyLong_AsLongLong(whole.ptr()) : -1;
}

}  // namespace

at::Tensor int64_of_lists(const py::sequence& lists) {
  std::vector<int64_t> numbers;
  for (const py::handle given : lists) {
    const py::object list = as_list(given);
    for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(list.ptr()); ++i) {
      const int64_t number = as_int64(PySequence_Fast_GET_ITEM(list.ptr(), i));
      if (number == -1 && PyErr_Occurred() != nullptr) throw py::error_already_set();
      numbers.push_back(number);
    }
  }
  at::Tensor tensor = at::empty({static_cast<int64_t>(numbers.size())}, at::kLong);
  std::copy(numbers.begin(), numbers.end(), tensor.data_ptr<int64_t>());
  return tensor;
}

}  // namespace torchrec_hkv::bindings
