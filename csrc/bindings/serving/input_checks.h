// Checks of the tensors that a served program takes.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/utils/pybind.h>

#include <string>
#include <tuple>
#include <variant>
#include <vector>

namespace torchrec_hkv::bindings {

// The required dtype and shape of each tensor. Immutable; several threads may use it.
class InputChecks {
 public:
  // A size, or the name of a size. Dimensions with the same name may have any size, but the same.
  using Dim = std::variant<int64_t, std::string>;
  // (name of a tensor in messages, its dtype, its sizes).
  using Given = std::tuple<std::string, at::ScalarType, std::vector<Dim>>;

  explicit InputChecks(const std::vector<Given>& inputs);

  // Refuses tensors that differ. tensors: a list.
  void check(const pybind11::list& tensors) const;

 private:
  struct Input {
    std::string name;
    at::ScalarType dtype;
    // Sizes; -1 - i for the name with number i.
    std::vector<int64_t> dims;
  };

  std::vector<Input> inputs_;
  size_t names_ = 0;
};

}  // namespace torchrec_hkv::bindings
