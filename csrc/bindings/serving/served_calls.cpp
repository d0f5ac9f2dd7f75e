#include "bindings/serving/served_calls.h"

#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <chrono>

namespace py = pybind11;

namespace torchrec_hkv::bindings {

ServedCalls::ServedCalls(std::vector<double> bounds)
    : bounds_(std::move(bounds)), counts_(bounds_.size() + 1) {}

py::object ServedCalls::call(const py::function& function, const py::tuple& arguments) {
  const auto began = std::chrono::steady_clock::now();
  py::object out;
  {
    const c10::InferenceMode mode;
    out = py::reinterpret_steal<py::object>(PyObject_CallObject(function.ptr(), arguments.ptr()));
  }
  if (!out) throw py::error_already_set();
  const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - began;
  const double seconds = taken.count();
  const auto at = std::lower_bound(bounds_.begin(), bounds_.end(), seconds) - bounds_.begin();
  const std::lock_guard<std::mutex> guard(mutex_);
  ++counts_[at];
  seconds_ += seconds;
  return out;
}

std::pair<std::vector<int64_t>, double> ServedCalls::histogram() const {
  const std::lock_guard<std::mutex> guard(mutex_);
  return {counts_, seconds_};
}

}  // namespace torchrec_hkv::bindings
