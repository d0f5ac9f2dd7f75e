// torchrec_hkv::serving_resident: a copy of a table in memory of this process.
#include <torch/library.h>

#include <cstring>

#include "runtime/checks.h"
#include "runtime/growing_memory.h"

namespace torchrec_hkv::bindings {
using namespace runtime;
namespace {

// In huge pages where the system grants them: ids hit pages at random, and with small ones nearly
// every row would first have to find its page.
at::Tensor serving_resident(const at::Tensor& data) {
  check_dtype(data, "data", at::kByte);
  TORCH_CHECK_VALUE(data.is_contiguous(), "data must be contiguous.");
  const int64_t bytes = data.numel();
  std::shared_ptr<GrowingMemory> memory = make_growing_memory(Place::kHost, bytes, at::kCPU);
  memory->grow(bytes);
  if (bytes > 0) std::memcpy(memory->data(), data.const_data_ptr<uint8_t>(), bytes);
  return at::from_blob(memory->data(), data.sizes(), [memory](void*) {}, data.options());
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(torchrec_hkv, m) { m.def("serving_resident(Tensor data) -> Tensor"); }

TORCH_LIBRARY_IMPL(torchrec_hkv, CPU, m) { m.impl("serving_resident", &serving_resident); }

}  // namespace torchrec_hkv::bindings
