// Where the tables are: torchrec_hkv::serving_memory gives memory of this process, serving_resident
// a copy of a table in it, and serving_expect_random prepares a mapped table.
#include <ATen/ops/empty.h>
#include <sys/mman.h>
#include <torch/library.h>
#include <unistd.h>

#include <cstring>

#include "runtime/checks.h"
#include "runtime/growing_memory.h"

namespace torchrec_hkv::bindings {
using namespace runtime;
namespace {

// In huge pages where the system grants them: ids hit pages at random, and with small ones nearly
// every row would first have to find its page. Pages are backed when they are first touched.
at::Tensor serving_memory(int64_t bytes) {
  TORCH_CHECK_VALUE(bytes >= 0, "bytes is ", bytes, ", but must not be negative.");
  if (bytes == 0) return at::empty({0}, at::dtype(at::kByte));
  std::shared_ptr<GrowingMemory> memory = make_growing_memory(Place::kHost, bytes, at::kCPU);
  memory->grow(bytes);
  return at::from_blob(memory->data(), {bytes}, [memory](void*) {}, at::dtype(at::kByte));
}

at::Tensor serving_resident(const at::Tensor& data) {
  check_dtype(data, "data", at::kByte);
  TORCH_CHECK_VALUE(data.is_contiguous(), "data must be contiguous.");
  at::Tensor copy = serving_memory(data.numel());
  if (data.numel() > 0) {
    std::memcpy(copy.data_ptr<uint8_t>(), data.const_data_ptr<uint8_t>(), data.numel());
  }
  return copy.view(data.sizes());
}

// A page that is not in memory is then read by itself, not with those around it, which may be some
// megabytes.
void serving_expect_random(const at::Tensor& data) {
  TORCH_CHECK_VALUE(data.is_cpu(), "data must be in host memory, but are on ", data.device(), ".");
  const auto begin = reinterpret_cast<uintptr_t>(data.storage().data());
  const uintptr_t page = begin / sysconf(_SC_PAGESIZE) * sysconf(_SC_PAGESIZE);
  // Advice: a system that does not take it is only slower.
  (void)madvise(reinterpret_cast<void*>(page), begin - page + data.storage().nbytes(), MADV_RANDOM);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(torchrec_hkv, m) {
  m.def("serving_memory(int bytes) -> Tensor", &serving_memory);
  m.def("serving_resident(Tensor data) -> Tensor");
  m.def("serving_expect_random(Tensor data) -> ()", &serving_expect_random);
}

TORCH_LIBRARY_IMPL(torchrec_hkv, CPU, m) { m.impl("serving_resident", &serving_resident); }

}  // namespace torchrec_hkv::bindings
