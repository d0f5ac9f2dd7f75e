#include <torch/csrc/utils/pybind.h>

#include "bindings/hash_table/hash_table_module.h"
#include "runtime/table_group.h"

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

void define_table_sizes(py::module_& m) {
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
}

}  // namespace torchrec_hkv::bindings
