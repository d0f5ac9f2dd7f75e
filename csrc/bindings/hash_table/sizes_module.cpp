#include <torch/csrc/utils/pybind.h>

#include "bindings/hash_table/hash_table_module.h"
#include "runtime/table_group.h"

namespace py = pybind11;

namespace torchrec_hkv::bindings {
using namespace runtime;
namespace {

constexpr int64_t kMaxPlannedRows = int64_t{1} << 58;

hash_table::Geometry checked_geometry(int64_t capacity, std::optional<int64_t> initial_capacity) {
  TORCH_CHECK_VALUE(capacity >= 1, "capacity is ", capacity, ", but must be at least 1.");
  // The bytes of an index then fit in 64 bits. A table on one rank is smaller (check_config), but
  // sharding plans also ask for the size of a table over many ranks.
  TORCH_CHECK_VALUE(capacity <= kMaxPlannedRows, "capacity is ", capacity,
                    ", but must be at most 2^58.");
  const int64_t initial = initial_capacity.value_or(capacity);
  TORCH_CHECK_VALUE(initial >= 1 && initial <= capacity, "initial_capacity is ", initial,
                    ", but must be from 1 to the capacity, ", capacity, ".");
  return hash_table::geometry_of(capacity, initial);
}

}  // namespace

void define_table_sizes(py::module_& m) {
  m.def(
      "geometry",
      [](int64_t capacity, std::optional<int64_t> initial_capacity) {
        const hash_table::Geometry geometry = checked_geometry(capacity, initial_capacity);
        return py::make_tuple(geometry.num_buckets, geometry.bucket_slots);
      },
      py::arg("capacity"), py::arg("initial_capacity") = py::none(),
      "(buckets, slots per bucket) of a table of this capacity.");
  m.def(
      "initial_slots",
      [](int64_t capacity, std::optional<int64_t> initial_capacity) {
        const hash_table::Geometry geometry = checked_geometry(capacity, initial_capacity);
        return geometry.initial_buckets() * geometry.bucket_slots;
      },
      py::arg("capacity"), py::arg("initial_capacity"), "Initial number of slots.");
  m.def(
      "hbm_capacity",
      [](int64_t num_slots, int64_t bucket_slots, int64_t row_bytes, int64_t state_bytes,
         int64_t bytes) {
        const hash_table::HbmCapacity share =
            hash_table::hbm_capacity(num_slots, bucket_slots, row_bytes, state_bytes, bytes);
        const int frames_per_set =
            share.slots == 0 || share.slots == num_slots
                ? 0
                : hash_table::frames_of_set(num_slots, bucket_slots, share.slots);
        return py::make_tuple(share.slots, frames_per_set == 0 ? 0 : share.slots / frames_per_set,
                              share.all_states);
      },
      py::arg("num_slots"), py::arg("bucket_slots"), py::arg("row_bytes"), py::arg("state_bytes"),
      py::arg("bytes"),
      "(number of rows that fit in `bytes` of HBM: all slots, or frames (frames.h); number of sets "
      "of frames; whether the states of all slots are in HBM although not all rows are).");
  m.attr("SET_BYTES") = hash_table::kSetBytes;
  m.def(
      "index_bytes",
      [](int64_t capacity, bool scores, std::optional<int64_t> initial_capacity, bool packed) {
        return hash_table::index_bytes(checked_geometry(capacity, initial_capacity), scores,
                                       packed);
      },
      py::arg("capacity"), py::arg("scores"), py::arg("initial_capacity") = py::none(),
      py::arg("packed") = false,
      "Bytes of a table's index: everything except rows and states. A packed index "
      "(hash_table/packed_entries.h) is smaller, unless it has few slots.");
  m.def(
      "miniature_bytes",
      [](int64_t capacity, std::optional<int64_t> initial_capacity) {
        const int64_t slots = checked_geometry(capacity, initial_capacity).num_slots();
        return hash_table::MiniatureSize::of(slots).bytes();
      },
      py::arg("capacity"), py::arg("initial_capacity") = py::none(),
      "Bytes of a table's miniatures, whose hit rates choose the half-life of counts.");
  m.attr("MINIATURES") = [] {
    py::list cs;
    for (int k = 0; k < hash_table::kMiniatures; ++k) cs.append(hash_table::c_of_miniature(k));
    return py::tuple(cs);
  }();
  m.def("set_packed_from", &set_packed_from, py::arg("slots"),
        "For tests: sets the number of slots from which tables of new groups pack ids and last "
        "steps, "
        "where they can be packed. Returns the previous number.");
}

}  // namespace torchrec_hkv::bindings
