// Memory of tables: torchrec_hkv::serving_memory allocates memory; serving_expect_random and
// serving_read_pages prepare a table that is mapped from a file.
#include <ATen/ops/empty.h>
#include <sys/mman.h>
#include <torch/library.h>
#include <unistd.h>

#include "runtime/growing_memory.h"

namespace torchrec_hkv::bindings {
using namespace runtime;
namespace {

// Allocates memory in huge pages if the system grants them: ids access pages at random, and with
// small pages nearly every row would miss the TLB. Pages are backed when they are first touched.
at::Tensor serving_memory(int64_t bytes) {
  TORCH_CHECK_VALUE(bytes >= 0, "bytes is ", bytes, ", but must not be negative.");
  if (bytes == 0) return at::empty({0}, at::dtype(at::kByte));
  std::shared_ptr<GrowingMemory> memory =
      make_growing_memory(MemoryLocation::kHost, bytes, at::kCPU);
  memory->grow(bytes);
  return at::from_blob(memory->data(), {bytes}, [memory](void*) {}, at::dtype(at::kByte));
}

// Gives advice about a range of bytes of a mapped file, extended to the begin of its first page.
// Returns whether the system accepts the advice.
bool advise(const at::Tensor& data, int64_t begin, int64_t end, int advice) {
  const auto first = reinterpret_cast<uintptr_t>(data.storage().data()) + begin;
  const auto page_bytes = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  const uintptr_t page = first / page_bytes * page_bytes;
  return madvise(reinterpret_cast<void*>(page), first - page + end - begin, advice) == 0;
}

int64_t mapped_bytes(const at::Tensor& data) {
  TORCH_CHECK_VALUE(data.is_cpu(), "data must be in host memory, but are on ", data.device(), ".");
  return static_cast<int64_t>(data.storage().nbytes());
}

// The system then reads only the page that is accessed, without its neighbours, which may be
// several megabytes. A huge page is 2 MB, or of the size that the system uses for files.
void serving_expect_random(const at::Tensor& data, bool huge) {
  const int64_t bytes = mapped_bytes(data);
  // Advice only; if the system ignores it, accesses are slower.
  (void)advise(data, 0, bytes, MADV_RANDOM);
  if (huge) (void)advise(data, 0, bytes, MADV_HUGEPAGE);
}

// Reads pages of a file, as huge pages if the system supports this; see serving_memory. Returns
// whether the system read them.
bool serving_read_pages(const at::Tensor& data, int64_t begin, int64_t end) {
  const int64_t bytes = mapped_bytes(data);
  TORCH_CHECK_VALUE(0 <= begin && begin < end && end <= bytes, "the range is [", begin, ", ", end,
                    "), but must be within the ", bytes, " bytes of the file.");
#ifdef MADV_POPULATE_READ
  (void)advise(data, begin, end, MADV_NORMAL);  // reads ahead, on any kernel
  (void)advise(data, begin, end, MADV_HUGEPAGE);
  return advise(data, begin, end, MADV_POPULATE_READ);
#else
  return false;
#endif
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(torchrec_hkv, m) {
  m.def("serving_memory(int bytes) -> Tensor");
  m.def("serving_expect_random(Tensor data, bool huge) -> ()");
  m.def("serving_read_pages(Tensor data, int begin, int end) -> bool", &serving_read_pages);
}

// Registered for tensors of any device, so that tensors on a GPU are refused with a clear message.
TORCH_LIBRARY_IMPL(torchrec_hkv, CompositeExplicitAutograd, m) {
  m.impl("serving_memory", &serving_memory);
  m.impl("serving_expect_random", &serving_expect_random);
}

}  // namespace torchrec_hkv::bindings
