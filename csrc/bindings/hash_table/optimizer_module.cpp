#include <torch/csrc/utils/pybind.h>

#include "bindings/hash_table/hash_table_module.h"
#include "runtime/optimizer_config.h"

namespace py = pybind11;

namespace torchrec_hkv::bindings {
using namespace runtime;

void define_optimizers(py::module_& m) {
  py::enum_<Optimizer>(m, "Optimizer")
      .value("NONE", Optimizer::kNone)
      .value("SGD", Optimizer::kSgd)
      .value("MOMENTUM", Optimizer::kMomentum)
      .value("ADAGRAD", Optimizer::kAdagrad)
      .value("ROWWISE_ADAGRAD", Optimizer::kRowWiseAdagrad)
      .value("ADAM", Optimizer::kAdam)
      .value("ROWWISE_ADAM", Optimizer::kRowWiseAdam)
      .value("LAMB", Optimizer::kLamb)
      .value("FTRL", Optimizer::kFtrl);
  py::class_<OptimizerConfig>(m, "OptimizerConfig")
      .def(
          py::init([](Optimizer kind, double eps, double coupled_decay, double decoupled_decay,
                      double lamb_decay, double momentum, bool nesterov, double beta1, double beta2,
                      bool own_steps, double initial_accumulator, double ftrl_beta, double l1,
                      double l2, std::optional<double> clip_value, std::optional<double> clip_norm,
                      std::optional<double> clip_output, std::optional<double> max_norm,
                      bool stochastic_rounding, int64_t rounding_seed) {
            OptimizerArguments arguments;
            arguments.kind = kind, arguments.eps = eps;
            arguments.coupled_decay = coupled_decay, arguments.decoupled_decay = decoupled_decay;
            arguments.lamb_decay = lamb_decay, arguments.momentum = momentum,
            arguments.nesterov = nesterov;
            arguments.beta1 = beta1, arguments.beta2 = beta2, arguments.own_steps = own_steps;
            arguments.initial_accumulator = initial_accumulator;
            arguments.ftrl_beta = ftrl_beta, arguments.l1 = l1, arguments.l2 = l2;
            arguments.clip_value = clip_value, arguments.clip_norm = clip_norm,
            arguments.clip_output = clip_output;
            arguments.max_norm = max_norm;
            arguments.stochastic_rounding = stochastic_rounding,
            arguments.rounding_seed = rounding_seed;
            return make_optimizer_config(arguments);
          }),
          py::kw_only(), py::arg("kind"), py::arg("eps") = 0.0, py::arg("coupled_decay") = 0.0,
          py::arg("decoupled_decay") = 0.0, py::arg("lamb_decay") = 0.0, py::arg("momentum") = 0.0,
          py::arg("nesterov") = false, py::arg("beta1") = 0.0, py::arg("beta2") = 0.0,
          py::arg("own_steps") = false, py::arg("initial_accumulator") = 0.0,
          py::arg("ftrl_beta") = 0.0, py::arg("l1") = 0.0, py::arg("l2") = 0.0,
          py::arg("clip_value") = py::none(), py::arg("clip_norm") = py::none(),
          py::arg("clip_output") = py::none(), py::arg("max_norm") = py::none(),
          py::arg("stochastic_rounding") = false, py::arg("rounding_seed") = 0)
      .def(
          "state_width",
          [](const OptimizerConfig& config, int32_t dim) { return state_width(config, dim); },
          py::arg("dim"), "Number of float32 state values of a row of this dim.")
      .def_property_readonly("layout", &state_layout,
                             "A number for the layout of the state's columns.");
}

}  // namespace torchrec_hkv::bindings
