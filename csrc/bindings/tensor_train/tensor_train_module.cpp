#include "bindings/tensor_train/tensor_train_module.h"

#include <torch/csrc/utils/pybind.h>

#include "runtime/tensor_train/group.h"

namespace py = pybind11;

namespace torchrec_hkv::bindings {
using namespace runtime;

void define_tensor_train(py::module_& m) {
  py::class_<TensorTrainGroup, std::shared_ptr<TensorTrainGroup>>(m, "TensorTrainGroup")
      .def(py::init([](const std::vector<std::string>& names, const std::vector<int64_t>& rows,
                       const std::vector<std::vector<int64_t>>& p,
                       const std::vector<std::vector<int64_t>>& q,
                       const std::vector<std::vector<int64_t>>& ranks,
                       std::vector<int64_t> feature_tables, const OptimizerConfig& optimizer,
                       bool tf32) {
             std::vector<TensorTrainShape> shapes;
             for (size_t t = 0; t < names.size(); ++t) {
               shapes.push_back({names.at(t), rows.at(t), p.at(t), q.at(t), ranks.at(t)});
             }
             return TensorTrainGroup::make(std::move(shapes), std::move(feature_tables), optimizer,
                                           tf32);
           }),
           py::kw_only(), py::arg("names"), py::arg("rows"), py::arg("p"), py::arg("q"),
           py::arg("ranks"), py::arg("feature_tables"), py::arg("optimizer"), py::arg("tf32"))
      .def(
          "outside",
          [](TensorTrainGroup& group, const at::Device& device) { return group.outside(device); },
          py::arg("device"))
      .def_property_readonly("handle", &TensorTrainGroup::handle)
      .def_property_readonly("total_dim", &TensorTrainGroup::total_dim)
      .def_property_readonly("common_dim", &TensorTrainGroup::common_dim);
  m.def(
      "tensor_train_dims",
      [](int64_t handle) {
        const auto group = TensorTrainGroup::from_handle(handle);
        return std::make_tuple(group->total_dim(), group->common_dim(), group->num_prefixes());
      },
      py::arg("handle"),
      "(columns of the pooled output, columns of unpooled outputs or -1, prefixes of all tables).");
  m.def(
      "tensor_train_flat_size",
      [](int64_t handle) {
        const auto group = TensorTrainGroup::from_handle(handle);
        return std::make_tuple(group->num_elements(), group->num_slices());
      },
      py::arg("handle"), "(elements, slices) of all cores of all tables.");
}

}  // namespace torchrec_hkv::bindings
