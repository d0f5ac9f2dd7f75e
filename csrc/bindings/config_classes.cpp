// The configurations of optimizers, admission and tables, as Python sees them.
#include <torch/csrc/utils/pybind.h>

#include "bindings/classes.h"
#include "runtime/optimizer_config.h"
#include "runtime/table_config.h"

namespace py = pybind11;

namespace torchrec_hkv::bindings {
using namespace runtime;
namespace {

TableConfig make_config(std::string name, int64_t capacity, int64_t initial_capacity, int64_t dim,
                        int64_t column_offset, Eviction eviction, double aging, bool adaptive,
                        RowType row_type, int64_t seed, std::string distribution, double low,
                        double high, double mean, double std, int64_t hbm_slots,
                        bool all_states_in_hbm, const AdmissionConfig& admission,
                        int64_t expire_after, int64_t remember_evicted, bool restore_counts,
                        bool deterministic) {
  return TableConfig{std::move(name),
                     capacity,
                     initial_capacity,
                     dim,
                     column_offset,
                     eviction,
                     aging,
                     adaptive,
                     row_type,
                     static_cast<uint64_t>(seed),
                     InitialConfig{std::move(distribution), low, high, mean, std},
                     hbm_slots,
                     all_states_in_hbm,
                     admission,
                     expire_after,
                     remember_evicted,
                     restore_counts,
                     deterministic};
}

void define_optimizer_config(py::module_& m) {
  py::class_<OptimizerConfig>(m, "OptimizerConfig")
      .def(
          py::init([](Optimizer kind, double eps, double coupled_decay, double decoupled_decay,
                      double lamb_decay, double momentum, bool nesterov, double beta1, double beta2,
                      bool own_steps, double initial_accumulator, double ftrl_beta, double l1,
                      double l2, std::optional<double> clip_value, std::optional<double> clip_norm,
                      std::optional<double> clip_output, std::optional<double> max_norm,
                      bool stochastic_rounding, int64_t rounding_seed) {
            OptimizerArguments its;
            its.kind = kind, its.eps = eps;
            its.coupled_decay = coupled_decay, its.decoupled_decay = decoupled_decay;
            its.lamb_decay = lamb_decay, its.momentum = momentum, its.nesterov = nesterov;
            its.beta1 = beta1, its.beta2 = beta2, its.own_steps = own_steps;
            its.initial_accumulator = initial_accumulator;
            its.ftrl_beta = ftrl_beta, its.l1 = l1, its.l2 = l2;
            its.clip_value = clip_value, its.clip_norm = clip_norm, its.clip_output = clip_output;
            its.max_norm = max_norm;
            its.stochastic_rounding = stochastic_rounding, its.rounding_seed = rounding_seed;
            return make_optimizer_config(its);
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
          py::arg("dim"), "fp32 values of optimizer state that a row of this dim keeps.")
      .def_property_readonly("layout", &state_layout,
                             "What the columns of the state are, as a number.");
}

}  // namespace

void define_configs(py::module_& m) {
  py::enum_<Eviction>(m, "Eviction")
      .value("LRU", Eviction::kLru)
      .value("LFU", Eviction::kLfu)
      .value("EPOCH_LRU", Eviction::kEpochLru)
      .value("EPOCH_LFU", Eviction::kEpochLfu)
      .value("CUSTOMIZED", Eviction::kCustomized)
      .value("AGED_LFU", Eviction::kAgedLfu);
  py::enum_<RowType>(m, "RowType")
      .value("FLOAT32", RowType::kFloat32)
      .value("FLOAT16", RowType::kFloat16)
      .value("BFLOAT16", RowType::kBFloat16)
      .value("INT8", RowType::kInt8);
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
  define_optimizer_config(m);

  using hash_table::AdmissionKind;
  py::enum_<AdmissionKind>(m, "AdmissionKind")
      .value("EVERY", AdmissionKind::kEvery)
      .value("COUNTED", AdmissionKind::kCounted)
      .value("SKETCHED", AdmissionKind::kSketched)
      .value("PROBABILITY", AdmissionKind::kProbability);
  py::class_<AdmissionConfig>(m, "AdmissionConfig")
      .def(py::init<>())
      .def_readwrite("kind", &AdmissionConfig::kind)
      .def_readwrite("count", &AdmissionConfig::count)
      .def_readwrite("entries", &AdmissionConfig::entries)
      .def_readwrite("sketch_bytes", &AdmissionConfig::sketch_bytes)
      .def_readwrite("halve_every", &AdmissionConfig::halve_every)
      .def_readwrite("probability", &AdmissionConfig::probability);

  py::class_<TableConfig>(m, "TableConfig")
      .def(py::init(&make_config), py::kw_only(), py::arg("name"), py::arg("capacity"),
           py::arg("initial_capacity"), py::arg("dim"), py::arg("column_offset"),
           py::arg("eviction"), py::arg("aging"), py::arg("adaptive"), py::arg("row_type"),
           py::arg("seed"), py::arg("distribution"), py::arg("low"), py::arg("high"),
           py::arg("mean"), py::arg("std"), py::arg("hbm_slots"), py::arg("all_states_in_hbm"),
           py::arg("admission"), py::arg("expire_after"), py::arg("remember_evicted"),
           py::arg("restore_counts"), py::arg("deterministic"))
      .def_readonly("eviction", &TableConfig::eviction)
      .def_readonly("hbm_slots", &TableConfig::hbm_slots)
      .def_readonly("all_states_in_hbm", &TableConfig::all_states_in_hbm);
}

}  // namespace torchrec_hkv::bindings
