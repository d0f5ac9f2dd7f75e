// The extension module torchrec_hkv._C. Importing it also registers the ops.

#include <torch/csrc/utils/pybind.h>

#include <cstdint>

#include "bindings/hash_table/hash_table_module.h"
#include "bindings/planner_module.h"
#include "bindings/replay_module.h"
#include "bindings/serving/serving_module.h"
#include "bindings/tensor_train/tensor_train_module.h"
#include "common/crc32.h"
#include "hash_table/table_view.h"
#include "runtime/torch_threads.h"

namespace py = pybind11;

namespace torchrec_hkv::bindings {

namespace {

template <uint32_t (*kFunction)(uint32_t, const void*, size_t)>
uint32_t checksum_of(const py::buffer& data, uint32_t value) {
  const py::buffer_info memory = data.request();
  if (PyBuffer_IsContiguous(memory.view(), 'C') == 0) {
    throw py::value_error("The data of a checksum must be contiguous.");
  }
  const auto size = static_cast<size_t>(memory.size * memory.itemsize);
  const py::gil_scoped_release release;
  return kFunction(value, memory.ptr, size);
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  runtime::use_torch_threads();
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
      py::arg("id"), "Packs an id like a table on a GPU and unpacks it. Returns the id.");

  m.def("crc32", checksum_of<crc32>, py::arg("data"), py::arg("value"),
        "Returns the CRC-32 of a buffer, continued from `value`.");
  m.def("crc32_by_tables", checksum_of<crc32_by_tables>, py::arg("data"), py::arg("value"),
        "Like crc32, but without instructions that some processors lack.");

  define_table_sizes(m);
  define_optimizers(m);
  define_table_config(m);
  define_table_group(m);
  define_tensor_train(m);
  define_planner(m);
  define_replay(m);
  define_serving(m);
}

}  // namespace torchrec_hkv::bindings
