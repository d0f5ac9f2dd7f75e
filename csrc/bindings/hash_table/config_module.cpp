#include <torch/csrc/utils/pybind.h>

#include "bindings/hash_table/hash_table_module.h"
#include "runtime/table_group.h"

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

}  // namespace

void define_table_config(py::module_& m) {
  py::enum_<Eviction>(m, "Eviction")
      .value("LRU", Eviction::kLru)
      .value("LFU", Eviction::kLfu)
      .value("EPOCH_LRU", Eviction::kEpochLru)
      .value("EPOCH_LFU", Eviction::kEpochLfu)
      .value("CUSTOMIZED", Eviction::kCustomized)
      .value("AGED_LFU", Eviction::kAgedLfu);
  m.def("keeps_scores", &keeps_scores, py::arg("eviction"),
        "Whether a policy stores a score of 8 bytes for each slot.");
  py::enum_<RowType>(m, "RowType")
      .value("FLOAT32", RowType::kFloat32)
      .value("FLOAT16", RowType::kFloat16)
      .value("BFLOAT16", RowType::kBFloat16)
      .value("INT8", RowType::kInt8);

  m.attr("MIN_NORMAL_MASS") = kMinMass;
  m.def(
      "normal_mass",
      [](double mean, double std, double low, double high) {
        return normal_rows(0, mean, std, low, high).mass;
      },
      py::arg("mean"), py::arg("std"), py::arg("low"), py::arg("high"),
      "The probability of a normal distribution between two bounds.");

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
  m.def("admission_bytes", &admission_bytes, py::arg("admission"),
        "Bytes of a table's counts of ids that are not admitted.");

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
