// The extension module torchrec_hkv._C: table objects. Importing it registers the ops too.

#include "bindings/serving/module.h"

#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/utils/pybind.h>

#include "bindings/planner_module.h"
#include "bindings/replay_module.h"
#include "bindings/tensor_train/module.h"
#include "runtime/optimizer_config.h"
#include "runtime/table_group.h"
#include "runtime/torch_threads.h"

namespace py = pybind11;

namespace torchrec_hkv::bindings {
using namespace runtime;
namespace {

constexpr int64_t kMostPlannedRows = int64_t{1} << 58;

hash_table::Geometry checked_geometry(int64_t capacity, std::optional<int64_t> initial_capacity) {
  TORCH_CHECK_VALUE(capacity >= 1, "capacity is ", capacity, ", but must be at least 1.");
  // Bytes of an index then fit in 64 bits. Tables themselves are smaller (check_config); plans of
  // tables over many ranks ask for more than one rank can hold.
  TORCH_CHECK_VALUE(capacity <= kMostPlannedRows, "capacity is ", capacity,
                    ", but must be at most 2^58.");
  const int64_t initial = initial_capacity.value_or(capacity);
  TORCH_CHECK_VALUE(initial >= 1 && initial <= capacity, "initial_capacity is ", initial,
                    ", but must be from 1 to the capacity, ", capacity, ".");
  return hash_table::geometry_of(capacity, initial);
}

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

// A method of a group as Python calls it: in order with its other calls.
template <typename Result, typename... Arguments>
auto in_order(const Use& use, Result (TableGroup::*method)(Arguments...) const) {
  return [use, method](const TableGroup& group, Arguments... arguments) -> Result {
    const py::gil_scoped_release released;
    return group.order().run(use, [&] { return (group.*method)(arguments...); });
  };
}
template <typename Result, typename... Arguments>
auto in_order(const Use& use, Result (TableGroup::*method)(Arguments...)) {
  return [use, method](TableGroup& group, Arguments... arguments) -> Result {
    const py::gil_scoped_release released;
    return group.order().run(use, [&] { return (group.*method)(arguments...); });
  };
}
// The same for the group's clock.
template <typename Result, typename... Arguments>
auto clock_in_order(const Use& use, Result (GroupClock::*method)(Arguments...)) {
  return [use, method](const TableGroup& group, Arguments... arguments) -> Result {
    const py::gil_scoped_release released;
    return group.order().run(use, [&] { return (group.clock().*method)(arguments...); });
  };
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

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  torchrec_hkv::bindings::use_torch_threads();
#ifdef TORCHREC_HKV_CUDA
  m.attr("has_cuda") = true;
#else
  m.attr("has_cuda") = false;
#endif

  m.def(
      "mix64", [](uint64_t x) { return mix64(x); }, py::arg("x"),
      "SplitMix64's finaliser, a bijection of 64 bits.");
  m.def(
      "packed_again",
      [](int64_t id) {
        const uint64_t hash = hash_of_id(id);
        return id_of_hash(hash_table::unpack_hash(hash_table::pack_hash(hash),
                                                  choose_buckets_of_hash(hash, 1).digest));
      },
      py::arg("id"), "An id, packed as a GPU's table does and unpacked: the same.");
  m.def(
      "geometry",
      [](int64_t capacity, std::optional<int64_t> initial_capacity) {
        const hash_table::Geometry geometry = checked_geometry(capacity, initial_capacity);
        return py::make_tuple(geometry.num_buckets, geometry.bucket_slots);
      },
      py::arg("capacity"), py::arg("initial_capacity") = py::none(),
      "(buckets, slots a bucket) of a table of this capacity.");
  m.def(
      "initial_slots",
      [](int64_t capacity, std::optional<int64_t> initial_capacity) {
        const hash_table::Geometry geometry = checked_geometry(capacity, initial_capacity);
        return geometry.initial_buckets() * geometry.bucket_slots;
      },
      py::arg("capacity"), py::arg("initial_capacity"), "Slots that a table begins with.");
  m.def(
      "share_that_fits",
      [](int64_t num_slots, int64_t bucket_slots, int64_t row_bytes, int64_t state_bytes,
         int64_t bytes) {
        const hash_table::HbmShare share =
            hash_table::share_that_fits(num_slots, bucket_slots, row_bytes, state_bytes, bytes);
        const int of_set = share.slots == 0 || share.slots == num_slots
                               ? 0
                               : hash_table::frames_of_set(num_slots, bucket_slots, share.slots);
        return py::make_tuple(share.slots, of_set == 0 ? 0 : share.slots / of_set,
                              share.all_states);
      },
      py::arg("num_slots"), py::arg("bucket_slots"), py::arg("row_bytes"), py::arg("state_bytes"),
      py::arg("bytes"),
      "(slots whose rows fit in so many bytes of HBM: all, or how many frames (frames.h); in how "
      "many sets; whether the states of all slots are there, though not all rows).");
  m.attr("SET_BYTES") = hash_table::kSetBytes;
  m.def(
      "index_bytes",
      [](int64_t capacity, bool scores, std::optional<int64_t> initial_capacity, bool packed) {
        return hash_table::index_bytes(checked_geometry(capacity, initial_capacity), scores,
                                       packed);
      },
      py::arg("capacity"), py::arg("scores"), py::arg("initial_capacity") = py::none(),
      py::arg("packed") = false,
      "Bytes of a table's index: all it takes beside rows and states. One that is packed "
      "(hash_table/packed_entries.h) takes less, unless it has few slots.");
  m.def(
      "miniature_bytes",
      [](int64_t capacity, std::optional<int64_t> initial_capacity) {
        const int64_t slots = checked_geometry(capacity, initial_capacity).num_slots();
        return hash_table::MiniatureSize::of(slots).bytes();
      },
      py::arg("capacity"), py::arg("initial_capacity") = py::none(),
      "Bytes that the miniatures of a table take, whose hit rates choose the half-life of counts.");
  m.attr("MINIATURES") = [] {
    py::list cs;
    for (int k = 0; k < hash_table::kMiniatures; ++k) cs.append(hash_table::c_of_miniature(k));
    return py::tuple(cs);
  }();
  m.def(
      "set_packed_from", &set_packed_from, py::arg("slots"),
      "For tests: from how many slots on ids and last steps of a table are packed, where they can "
      "be; of groups that are made later. Returns the number before.");

  py::enum_<Eviction>(m, "Eviction")
      .value("LRU", Eviction::kLru)
      .value("LFU", Eviction::kLfu)
      .value("EPOCH_LRU", Eviction::kEpochLru)
      .value("EPOCH_LFU", Eviction::kEpochLfu)
      .value("CUSTOMIZED", Eviction::kCustomized)
      .value("AGED_LFU", Eviction::kAgedLfu);
  m.def("keeps_scores", &keeps_scores, py::arg("eviction"),
        "Whether a policy keeps 8 bytes of score a slot.");
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
  define_tensor_train(m);
  define_planner(m);
  define_replay(m);
  define_serving(m);

  m.attr("LEAST_NORMAL_MASS") = kLeastMass;
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
        "Bytes that a table's counts of ids that are not admitted take.");

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

  py::enum_<Hold>(m, "Hold").value("UNCHANGED", Hold::kUnchanged).value("ALONE", Hold::kAlone);
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
      .def_property_readonly("miniature_tally", &TableGroup::miniature_tally)
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
      .def("hbm_bytes", &TableGroup::hbm_bytes, py::arg("table"))
      .def("host_bytes", &TableGroup::host_bytes, py::arg("table"));
  m.def(
      "group_state_dim",
      [](int64_t handle) { return TableGroup::from_handle(handle)->widest_state(); },
      py::arg("handle"), "Of the table with the widest states.");
  m.def(
      "group_row_dtype",
      [](int64_t handle) {
        return py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(
            torch::getTHPDtype(TableGroup::from_handle(handle)->matrix_dtype())));
      },
      py::arg("handle"), "Of rows that calls are given and give back.");
  m.def(
      "group_row_width",
      [](int64_t handle) { return TableGroup::from_handle(handle)->shape().widest; },
      py::arg("handle"), "Columns of rows that calls are given and give back.");
  m.def(
      "table_layout",
      [](int64_t handle, int64_t table) {
        const std::shared_ptr<TableGroup> group = TableGroup::from_handle(handle);
        const hash_table::TableView& view = group->view(table);
        const auto dtype = py::reinterpret_borrow<py::object>(
            reinterpret_cast<PyObject*>(torch::getTHPDtype(group->row_dtype(table))));
        return py::make_tuple(view.dim(), dtype, view.states.width, view.scores != nullptr,
                              view.num_buckets, view.bucket_slots);
      },
      py::arg("handle"), py::arg("table"),
      "(dim, dtype of rows, width of states, whether it keeps scores, buckets, slots a bucket).");
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

}  // namespace torchrec_hkv::bindings
