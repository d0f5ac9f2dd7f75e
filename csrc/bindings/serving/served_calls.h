// Calls of a served model, and a histogram of their times.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <mutex>
#include <utility>
#include <vector>

namespace torchrec_hkv::bindings {

// Several threads may use it.
class ServedCalls {
 public:
  // bounds: upper bounds of the histogram in seconds, ascending.
  explicit ServedCalls(std::vector<double> bounds);

  // Calls function(*arguments) in inference mode. Adds its time to the histogram unless it throws.
  pybind11::object call(const pybind11::function& function, const pybind11::tuple& arguments);

  // (number of calls in each interval up to a bound and beyond the last bound, sum of their
  // seconds).
  std::pair<std::vector<int64_t>, double> histogram() const;

 private:
  const std::vector<double> bounds_;
  mutable std::mutex mutex_;
  std::vector<int64_t> counts_;
  double seconds_ = 0.0;
};

}  // namespace torchrec_hkv::bindings
