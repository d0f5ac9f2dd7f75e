// Host memory that a GPU reads and writes in place, by CUDA's managed memory.
//
// Pages stay on the host (preferred location) and are mapped for the GPU in pieces of 2 MiB. Random
// rows then move at the rate of the link: 51 GB/s read and 44 GB/s written on an H200. Pinned
// memory (cudaHostAlloc, cudaHostRegister of huge pages, cuMemCreate) reaches 8 to 15 GB/s and 30
// million rows a second, because its mapping has too many pieces for the GPU's TLB.
#include "runtime/growing_host_memory.h"

#ifdef TORCHREC_HKV_CUDA

#include <ATen/Parallel.h>
#include <c10/core/DeviceGuard.h>
#include <c10/util/Exception.h>
#include <cuda_runtime.h>
#include <unistd.h>

#include <algorithm>

#include "common/cuda_check.h"

namespace torchrec_hkv::runtime {
namespace {

constexpr int64_t kPiece = int64_t{1} << 21;

cudaError_t advise(char* data, int64_t bytes, cudaMemoryAdvise advice, bool host, int gpu) {
#if CUDART_VERSION >= 13000
  const cudaMemLocation where{host ? cudaMemLocationTypeHost : cudaMemLocationTypeDevice,
                              host ? 0 : gpu};
  return cudaMemAdvise(data, static_cast<size_t>(bytes), advice, where);
#else
  return cudaMemAdvise(data, static_cast<size_t>(bytes), advice, host ? cudaCpuDeviceId : gpu);
#endif
}

class GrowingManagedMemory : public GrowingMemory {
 public:
  GrowingManagedMemory(int64_t max_bytes, c10::Device gpu)
      : GrowingMemory(c10::kCPU), reserved_((max_bytes + kPiece - 1) / kPiece * kPiece), gpu_(gpu) {
    if (reserved_ == 0) return;
    const c10::OptionalDeviceGuard guard(gpu_);
    void* data = nullptr;
    const cudaError_t status = cudaMallocManaged(&data, static_cast<size_t>(reserved_));
    if (status != cudaSuccess) {
      cudaGetLastError();  // must not fail the next launch check
      TORCH_CHECK(false, "could not reserve ", reserved_,
                  " bytes of managed memory: ", cudaGetErrorString(status), ".");
    }
    data_ = static_cast<char*>(data);
    HKV_CUDA_CHECK(
        advise(data_, reserved_, cudaMemAdviseSetPreferredLocation, /*host=*/true, gpu_.index()));
  }

  ~GrowingManagedMemory() override {
    if (data_ == nullptr) return;
    after_device(gpu_, [this] { cudaFree(data_); });
  }

  void grow(int64_t bytes) override {
    const int64_t wanted = (bytes + kPiece - 1) / kPiece * kPiece;
    if (wanted <= bytes_) return;
    TORCH_CHECK(wanted <= reserved_, "memory grows to ", wanted, " bytes, but ", reserved_,
                " were reserved.");
    const c10::OptionalDeviceGuard guard(gpu_);
    // Pages are allocated when the host touches them; many threads share this work.
    const int64_t page = sysconf(_SC_PAGESIZE);
    at::parallel_for(bytes_ / kPiece, wanted / kPiece, 1, [&](int64_t begin, int64_t end) {
      for (int64_t at = begin * kPiece; at < end * kPiece; at += page) {
        *static_cast<volatile char*>(data_ + at) = 0;
      }
    });
    HKV_CUDA_CHECK(advise(data_ + bytes_, wanted - bytes_, cudaMemAdviseSetAccessedBy,
                          /*host=*/false, gpu_.index()));
    bytes_ = wanted;
  }

 private:
  const int64_t reserved_;
  const c10::Device gpu_;
};

}  // namespace

std::shared_ptr<GrowingMemory> make_growing_memory_for_gpu(int64_t max_bytes, c10::Device gpu) {
  int managed = 0;
  HKV_CUDA_CHECK(cudaDeviceGetAttribute(&managed, cudaDevAttrConcurrentManagedAccess, gpu.index()));
  if (managed) return std::make_shared<GrowingManagedMemory>(max_bytes, gpu);
  return std::make_shared<GrowingPinnedMemory>(max_bytes, gpu);
}

}  // namespace torchrec_hkv::runtime

#endif
