#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

#include "bindings/hash_table/hash_table_module.h"
#include "runtime/growing_host_memory.h"
#include "runtime/table_group.h"

namespace py = pybind11;

namespace torchrec_hkv::bindings {
using namespace runtime;
namespace {

// A method of a group for Python, which runs in order with the group's other calls.
template <typename Result, typename... Arguments>
auto in_order(const AccessSet& use, Result (TableGroup::*method)(Arguments...) const) {
  return [use, method](const TableGroup& group, Arguments... arguments) -> Result {
    const py::gil_scoped_release released;
    return group.order().run(use, [&] { return (group.*method)(arguments...); });
  };
}
template <typename Result, typename... Arguments>
auto in_order(const AccessSet& use, Result (TableGroup::*method)(Arguments...)) {
  return [use, method](TableGroup& group, Arguments... arguments) -> Result {
    const py::gil_scoped_release released;
    return group.order().run(use, [&] { return (group.*method)(arguments...); });
  };
}
// The same for methods of the group's clock.
template <typename Result, typename... Arguments>
auto clock_in_order(const AccessSet& use, Result (GroupClock::*method)(Arguments...)) {
  return [use, method](const TableGroup& group, Arguments... arguments) -> Result {
    const py::gil_scoped_release released;
    return group.order().run(use, [&] { return (group.clock().*method)(arguments...); });
  };
}

// Maps the memory pages of slots of a table on a CPU. Changes nothing, so it waits for no other
// call; the caller ensures that the table does not grow meanwhile.
void populate_slots(int64_t handle, int64_t table, int64_t first, int64_t end) {
  const std::shared_ptr<TableGroup> group = TableGroup::from_handle(handle);
  TORCH_CHECK_VALUE(group->device().is_cpu(), "the table is on ", group->device(),
                    ", but must be on a CPU.");
  const hash_table::TableView& view = group->view(table);
  TORCH_CHECK_VALUE(first >= 0 && first <= end && end <= view.num_slots, "slots from ", first,
                    " to ", end, " were asked for, but the table has ", view.num_slots, ".");
  const auto populate = [&](void* array, int64_t slot_bytes) {
    if (array == nullptr) return;
    populate_host(static_cast<char*>(array) + first * slot_bytes, (end - first) * slot_bytes);
  };
  populate(view.rows.backing, view.rows.bytes());
  if (view.states.width > 0) populate(view.states.backing, view.states.bytes());
  populate(view.ids, sizeof(*view.ids));
  populate(view.last_steps, sizeof(*view.last_steps));
  populate(view.scores, sizeof(*view.scores));
  populate(view.counted.words, sizeof(*view.counted.words));
}

// Properties of a group for the fake ops, which have only its handle.
void define_group_shape(py::module_& m) {
  m.def(
      "group_state_dim",
      [](int64_t handle) { return TableGroup::from_handle(handle)->widest_state(); },
      py::arg("handle"), "The state width of the table with the widest states.");
  m.def(
      "group_row_dtype",
      [](int64_t handle) {
        return py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(
            torch::getTHPDtype(TableGroup::from_handle(handle)->matrix_dtype())));
      },
      py::arg("handle"), "The dtype of rows that calls take and return.");
  m.def(
      "group_row_width",
      [](int64_t handle) { return TableGroup::from_handle(handle)->shape().widest; },
      py::arg("handle"), "The number of columns of rows that calls take and return.");
  m.def(
      "table_layout",
      [](int64_t handle, int64_t table) {
        const std::shared_ptr<TableGroup> group = TableGroup::from_handle(handle);
        const hash_table::TableView& view = group->view(table);
        const auto dtype = py::reinterpret_borrow<py::object>(
            reinterpret_cast<PyObject*>(torch::getTHPDtype(group->row_dtype(table))));
        return py::make_tuple(view.dim(), dtype, view.states.width, keeps_scores(view.eviction),
                              view.num_buckets, view.bucket_slots);
      },
      py::arg("handle"), py::arg("table"),
      "(dim, dtype of rows, width of states, whether scores are stored, buckets, slots per "
      "bucket).");
  m.def("populate_slots", torch::wrap_pybind_function_no_gil(populate_slots),
        "Maps the memory pages of slots [first, end) of a table: handle, table, first, end.");
  m.def(
      "group_feature_dims",
      [](int64_t handle) {
        const std::shared_ptr<TableGroup> group = TableGroup::from_handle(handle);
        std::vector<int64_t> dims;
        for (int64_t f = 0; f < group->num_features(); ++f) dims.push_back(group->feature_dim(f));
        return dims;
      },
      py::arg("handle"));
  m.def(
      "group_total_dim",
      [](int64_t handle) { return TableGroup::from_handle(handle)->total_dim(); },
      py::arg("handle"));
}

}  // namespace

void define_table_group(py::module_& m) {
  py::class_<TableState>(m, "TableState")
      .def(py::init<>())
      .def_readwrite("occupied", &TableState::occupied)
      .def_readwrite("ids", &TableState::ids)
      .def_readwrite("rows", &TableState::rows)
      .def_readwrite("states", &TableState::states)
      .def_readwrite("last_steps", &TableState::last_steps)
      .def_readwrite("scores", &TableState::scores)
      .def_readwrite("optimizer_step", &TableState::optimizer_step);

  py::class_<Pin, std::shared_ptr<Pin>>(m, "Pin")
      .def_property_readonly("number", &Pin::number)
      .def_property_readonly("growths", &Pin::growths);

  py::enum_<Hold>(m, "Hold").value("UNCHANGED", Hold::kUnchanged).value("ALONE", Hold::kExclusive);
  m.attr("MAX_PINS") = hash_table::kMaxPins;
  py::class_<TableGroup, std::shared_ptr<TableGroup>>(m, "TableGroup")
      .def(py::init([](std::vector<TableConfig> configs, std::vector<int64_t> feature_tables,
                       const OptimizerConfig& optimizer, std::optional<int64_t> state_dim,
                       at::Device device, std::array<int64_t, 4> available) {
             return TableGroup::make(
                 std::move(configs), std::move(feature_tables), optimizer, state_dim, device,
                 AvailableMemory{available[0], available[1], available[2], available[3]});
           }),
           py::arg("configs"), py::arg("feature_tables"), py::arg("optimizer"),
           py::arg("state_dim"), py::arg("device"), py::arg("available"))
      .def_property_readonly("handle", &TableGroup::handle)
      .def_property_readonly("total_dim", &TableGroup::total_dim)
      .def_property_readonly("num_features", &TableGroup::num_features)
      .def_property_readonly("num_slots", &TableGroup::num_slots)
      .def_property_readonly("counters", &TableGroup::counters)
      .def_property_readonly("optimizer_steps", &TableGroup::optimizer_steps)
      .def_property_readonly("aged_lfu", &TableGroup::aged_lfu)
      .def_property_readonly("miniature_counters", &TableGroup::miniature_counters)
      .def_property_readonly("miniature_entries", &TableGroup::miniature_entries)
      .def("restart_aging", in_order(kWriteIndex, &TableGroup::restart_aging), py::arg("table"),
           py::arg("lookups"), py::arg("steps"), py::arg("c"))
      .def("set_aging", in_order(kWriteIndex, &TableGroup::set_aging), py::arg("table"),
           py::arg("c"))
      .def("pin", &TableGroup::pin)
      .def(
          "hold",
          [](const TableGroup& group, Hold kind) {
            const py::gil_scoped_release released;
            group.order().hold(kind);
          },
          py::arg("kind"), "Holds the group over several calls of this thread.")
      .def(
          "release", [](const TableGroup& group, Hold kind) { group.order().release(kind); },
          py::arg("kind"), "Ends a hold of this thread.")
      .def("entries_at", in_order(kReadIndex, &TableGroup::entries_at), py::arg("slots"))
      .def("counts", in_order(kReadIndex, &TableGroup::counts), py::arg("table"))
      .def("load_counts", in_order(kWriteIndex, &TableGroup::load_counts), py::arg("table"),
           py::arg("counts"))
      .def("evicted_marks", in_order(kReadIndex, &TableGroup::evicted_marks), py::arg("table"))
      .def("load_evicted_marks", in_order(kWriteIndex, &TableGroup::load_evicted_marks),
           py::arg("table"), py::arg("marks"))
      .def("splitting", in_order(kReadIndex, &TableGroup::splitting))
      .def("finish_growth", in_order(kWriteAll, &TableGroup::finish_growth))
      .def("export_table", in_order(kReadAll, &TableGroup::export_table), py::arg("table"))
      .def("load_table", in_order(kWriteAll, &TableGroup::load_table), py::arg("table"),
           py::arg("state"))
      .def("clear_table", in_order(kWriteAll, &TableGroup::clear_table), py::arg("table"))
      .def("occupied", in_order(kReadIndex, &TableGroup::occupied), py::arg("table"))
      .def(
          "scores",
          [](const TableGroup& group, int64_t table) {
            const py::gil_scoped_release released;
            return group.order().run(kReadIndex, [&] { return group.scores(table).clone(); });
          },
          py::arg("table"))
      .def("last_steps", in_order(kReadIndex, &TableGroup::last_steps), py::arg("table"))
      .def_property_readonly("clock", clock_in_order(kReadIndex, &GroupClock::now))
      .def_property_readonly("first_open_step",
                             clock_in_order(kReadIndex, &GroupClock::first_open_step))
      .def("ids_and_steps", in_order(kReadIndex, &TableGroup::ids_and_steps), py::arg("table"),
           py::arg("slots"))
      .def("set_clock", in_order(kWriteIndex, &TableGroup::set_clock), py::arg("clock"))
      .def("set_epoch", clock_in_order(kWriteIndex, &GroupClock::set_epoch), py::arg("epoch"))
      .def("fill_frames", in_order(kWriteAll, &TableGroup::fill_frames), py::arg("table"))
      .def(
          "read_admission",
          [](const TableGroup& group, int64_t table, int64_t first, int64_t n) {
            const py::gil_scoped_release released;
            return group.order().run(kReadIndex, [&] {
              return group.admission().counts(table).narrow(0, first, n).clone();
            });
          },
          py::arg("table"), py::arg("first"), py::arg("n"))
      .def(
          "write_admission",
          [](const TableGroup& group, int64_t table, int64_t first, const at::Tensor& counts) {
            const py::gil_scoped_release released;
            group.order().run(kWriteIndex, [&] {
              group.admission().counts(table).narrow(0, first, counts.numel()).copy_(counts);
            });
          },
          py::arg("table"), py::arg("first"), py::arg("counts"))
      .def("sizes", in_order(kReadIndex, &TableGroup::sizes))
      .def("reserve", in_order(kWriteAll, &TableGroup::reserve), py::arg("table"), py::arg("rows"))
      .def("reserve_buckets", in_order(kWriteAll, &TableGroup::reserve_buckets), py::arg("table"),
           py::arg("num_buckets"), py::arg("bucket_slots"))
      .def("check_offsets", &TableGroup::check_bad_offsets)
      .def("present_slots", &TableGroup::present_slots, py::arg("table"))
      .def("full_slots", &TableGroup::full_slots, py::arg("table"))
      .def_property_readonly("growths", &TableGroup::growths)
      .def_property_readonly("removals", &TableGroup::removals)
      .def("hbm_bytes", &TableGroup::hbm_bytes, py::arg("table"))
      .def("host_bytes", &TableGroup::host_bytes, py::arg("table"));
  define_group_shape(m);
}

}  // namespace torchrec_hkv::bindings
