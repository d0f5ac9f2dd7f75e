// Checks of the tensors that a served program takes.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/utils/pybind.h>

#include <string>
#include <tuple>
#include <variant>
#include <vector>

namespace torchrec_hkv::bindings {

// What each tensor must be. Immutable; several threads may use it.
class InputChecks {
 public:
  // A size, or the name of one: any size that is the same wherever the name is.
  using Dim = std::variant<int64_t, std::string>;
  // What messages call a tensor, its dtype, its sizes.
  using Given = std::tuple<std::string, at::ScalarType, std::vector<Dim>>;

  explicit InputChecks(const std::vector<Given>& inputs);

  // Refuses tensors that differ. tensors: a list.
  void check(const pybind11::list& tensors) const;

 private:
  struct Input {
    std::string name;
    at::ScalarType dtype;
    // A size, or -1 - i for name number i.
    std::vector<int64_t> dims;
  };

  std::vector<Input> inputs_;
  size_t names_ = 0;
};

}  // namespace torchrec_hkv::bindings
