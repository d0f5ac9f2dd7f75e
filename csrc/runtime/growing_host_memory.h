// The two kinds of growing memory that lie on the host; see growing_memory.h.
#pragma once

#include "runtime/growing_memory.h"

#ifdef TORCHREC_HKV_CUDA
#include <cuda_runtime.h>
#endif

namespace torchrec_hkv::runtime {

// In huge pages where the system grants them: ids hit pages at random, and with small ones nearly
// every access to a large table would first have to find its page.
class GrowingHostMemory : public GrowingMemory {
 public:
  explicit GrowingHostMemory(int64_t most_bytes);
  ~GrowingHostMemory() override;
  void grow(int64_t bytes) override;

 private:
  int64_t reserved_ = 0;
  char* mapped_ = nullptr;  // data_, and what is before it up to a huge page's border
  size_t mapped_bytes_ = 0;
};

#ifdef TORCHREC_HKV_CUDA
// Registered with CUDA as one piece: copies must not run over the border of two registrations. So
// it is registered anew when it grows, which costs as much again in all, since sizes double.
class GrowingPinnedMemory : public GrowingMemory {
 public:
  GrowingPinnedMemory(int64_t most_bytes, c10::Device device);
  ~GrowingPinnedMemory() override;
  void grow(int64_t bytes) override;

 private:
  GrowingHostMemory host_;
  const c10::Device gpu_;
};

// For destructors, which must not throw: waits for a device, does what is given and leaves the
// current device as it was. Errors are passed over, since at exit CUDA may be gone.
template <typename Release>
void after_device(c10::Device device, const Release& release) {
  int before = 0;
  const bool known = cudaGetDevice(&before) == cudaSuccess;
  cudaSetDevice(device.index());
  cudaDeviceSynchronize();
  release();
  if (known) cudaSetDevice(before);
  cudaGetLastError();
}

// In growing_managed_memory.cpp: managed memory, or pinned where the GPU has no managed memory that
// the host may touch while kernels run.
std::shared_ptr<GrowingMemory> make_growing_memory_for_gpu(int64_t most_bytes, c10::Device gpu);

// In growing_device_memory.cpp.
std::shared_ptr<GrowingMemory> make_growing_device_memory(int64_t most_bytes, c10::Device device);
#endif

}  // namespace torchrec_hkv::runtime
