// The extension module torchrec_hkv._C: its functions. classes.h declares its classes. Importing it
// registers the ops too.
#include "bindings/tensor_train/module.h"

#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/utils/pybind.h>

#include "bindings/classes.h"
#include "runtime/optimizer_config.h"
#include "runtime/sampled_aging.h"
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

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  torchrec_hkv::bindings::use_torch_threads();
  define_configs(m);
  define_table_group(m);
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

  m.def("keeps_scores", &keeps_scores, py::arg("eviction"),
        "Whether a policy keeps 8 bytes of score a slot.");
  define_tensor_train(m);

  m.attr("LEAST_NORMAL_MASS") = kLeastMass;
  m.def(
      "normal_mass",
      [](double mean, double std, double low, double high) {
        return normal_rows(0, mean, std, low, high).mass;
      },
      py::arg("mean"), py::arg("std"), py::arg("low"), py::arg("high"),
      "The probability of a normal distribution between two bounds.");

  m.def("admission_bytes", &admission_bytes, py::arg("admission"),
        "Bytes that a table's counts of ids that are not admitted take.");

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
