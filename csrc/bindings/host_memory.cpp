#include "bindings/host_memory.h"

#include <sys/mman.h>

#include <cstdint>

#ifdef TORCHREC_HKV_CUDA
#include <cuda_runtime.h>
#endif

namespace torchrec_hkv::bindings {

at::Tensor table_memory(at::IntArrayRef sizes, at::ScalarType dtype, at::Device device) {
  at::Tensor tensor = at::empty(sizes, at::dtype(dtype).device(device));
  constexpr uintptr_t kHugePage = uintptr_t{1} << 21;
  const auto begin = reinterpret_cast<uintptr_t>(tensor.data_ptr());
  const uintptr_t first = (begin + kHugePage - 1) / kHugePage * kHugePage;
  const uintptr_t last = (begin + tensor.nbytes()) / kHugePage * kHugePage;
  // Advice: a system that does not take it is only slower.
  if (device.is_cpu() && first < last) {
    madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
  }
  return tensor;
}

at::Tensor pinned_matrix(int64_t rows, int64_t columns, at::ScalarType dtype, at::Device device) {
  const int64_t elements = rows * columns;
  if (device.is_cpu() || elements == 0) return at::empty({rows, columns}, dtype);
#ifdef TORCHREC_HKV_CUDA
  const size_t bytes = elements * at::elementSize(dtype);
  void* memory = nullptr;
  const cudaError_t status = cudaHostAlloc(&memory, bytes, cudaHostAllocDefault);
  if (status != cudaSuccess) {
    cudaGetLastError();  // an allocation that failed must not fail the next launch check
    TORCH_CHECK(false, "could not pin ", bytes,
                " bytes of host memory: ", cudaGetErrorString(status), ".");
  }
  return at::from_blob(memory, {rows, columns}, [](void* p) { cudaFreeHost(p); }, dtype);
#else
  TORCH_CHECK(false, "this build of torchrec_hkv has no CUDA kernels.");
#endif
}

}  // namespace torchrec_hkv::bindings
