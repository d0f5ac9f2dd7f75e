#include "bindings/host_memory.h"

#ifdef TORCHREC_HKV_CUDA
#include <cuda_runtime.h>
#endif

namespace torchrec_hkv::bindings {

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
