#include "bindings/serving/input_checks.h"

#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <sstream>

namespace torchrec_hkv::bindings {
namespace {

// Dtypes and shapes as Python prints them.
std::string text_of(at::ScalarType dtype) { return pybind11::str(pybind11::cast(dtype)); }

std::string text_of(at::IntArrayRef shape) {
  std::ostringstream text;
  text << '(';
  for (size_t k = 0; k < shape.size(); ++k) text << (k == 0 ? "" : ", ") << shape[k];
  text << (shape.size() == 1 ? ",)" : ")");
  return text.str();
}

// Returns, for example, [4, *] for a size of 4 and a named size.
std::string pattern_of(const std::vector<int64_t>& dims) {
  std::ostringstream text;
  text << '[';
  for (size_t k = 0; k < dims.size(); ++k) {
    text << (k == 0 ? "" : ", ");
    if (dims[k] < 0) {
      text << '*';
    } else {
      text << dims[k];
    }
  }
  text << ']';
  return text.str();
}

}  // namespace

InputChecks::InputChecks(const std::vector<Given>& inputs) {
  std::vector<std::string> names;
  for (const auto& [name, dtype, dims] : inputs) {
    Input made{name, dtype, {}};
    for (const Dim& dim : dims) {
      if (const auto* const size = std::get_if<int64_t>(&dim)) {
        made.dims.push_back(*size);
        continue;
      }
      const auto& named = std::get<std::string>(dim);
      const auto at = std::find(names.begin(), names.end(), named);
      made.dims.push_back(-1 - (at - names.begin()));
      if (at == names.end()) names.push_back(named);
    }
    inputs_.push_back(std::move(made));
  }
  names_ = names.size();
}

void InputChecks::check(const pybind11::list& tensors) const {
  struct Size {
    const std::string* of = nullptr;
    int64_t value = 0;
  };
  TORCH_CHECK_VALUE(tensors.size() == inputs_.size(), "the program takes ", inputs_.size(),
                    " tensors, but is given ", tensors.size(), ".");
  c10::SmallVector<Size, 16> sizes(names_);
  for (size_t i = 0; i < inputs_.size(); ++i) {
    const Input& input = inputs_[i];
    PyObject* const given = PyList_GET_ITEM(tensors.ptr(), i);
    TORCH_CHECK_TYPE(THPVariable_Check(given), input.name, " must be a tensor.");
    const at::Tensor& tensor = THPVariable_Unpack(given);
    TORCH_CHECK_TYPE(tensor.scalar_type() == input.dtype, input.name, " is of dtype ",
                     text_of(tensor.scalar_type()), ", but must be of ", text_of(input.dtype), ".");
    const at::IntArrayRef shape = tensor.sizes();
    bool fits = shape.size() == input.dims.size();
    for (size_t k = 0; fits && k < shape.size(); ++k) {
      if (input.dims[k] >= 0) {
        fits = shape[k] == input.dims[k];
        continue;
      }
      Size& size = sizes[-1 - input.dims[k]];
      if (size.of == nullptr) size = {&input.name, shape[k]};
      TORCH_CHECK_VALUE(size.value == shape[k], *size.of, " and ", input.name,
                        " don't fit: the sizes ", size.value, " and ", shape[k], " must be equal.");
    }
    TORCH_CHECK_VALUE(fits, input.name, " has shape ", text_of(shape), ", but must have shape ",
                      pattern_of(input.dims), ", where * is any size.");
  }
}

}  // namespace torchrec_hkv::bindings
