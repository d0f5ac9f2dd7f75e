// The two kinds of growing memory on the host; see growing_memory.h.
#pragma once

#include <cstdint>
#include <memory>

#include "runtime/growing_memory.h"

#ifdef TORCHREC_HKV_CUDA
#include <cuda_runtime.h>
#endif

namespace torchrec_hkv::runtime {

// Addresses of several arrays, one after the other. They are in huge pages if the system grants
// them: ids access pages at random, and with small pages nearly every access to a large table would
// miss the TLB. A huge page may hold parts of several arrays, so that small arrays are in huge
// pages, too.
class HostAddresses {
 public:
  explicit HostAddresses(int64_t bytes);
  ~HostAddresses();
  HostAddresses(const HostAddresses&) = delete;
  HostAddresses& operator=(const HostAddresses&) = delete;

  // Takes the next `bytes` addresses, in pages of their own. They are not backed yet.
  char* take(int64_t bytes);
  // Number of bytes that suffices for arrays of `bytes` in total.
  static int64_t bytes_for(int64_t bytes, int64_t arrays);

 private:
  int64_t bytes_ = 0;
  int64_t taken_ = 0;
  char* data_ = nullptr;
  char* mapped_ = nullptr;  // begin of the mapping; data_ may be aligned to a huge page
  size_t mapped_bytes_ = 0;
};

class GrowingHostMemory : public GrowingMemory {
 public:
  // The memory has its own addresses, or the next addresses for several arrays.
  explicit GrowingHostMemory(int64_t max_bytes);
  GrowingHostMemory(std::shared_ptr<HostAddresses> addresses, int64_t max_bytes);
  void grow(int64_t bytes) override;

 private:
  const std::shared_ptr<HostAddresses> addresses_;
  const int64_t reserved_ = 0;
};

// Maps the pages of memory like their first use. If the system does not support this, their first
// use maps them.
void populate_host(char* data, int64_t bytes);

#ifdef TORCHREC_HKV_CUDA
// Pinned memory. It is registered with CUDA as one range, because copies must not cross the border
// of two registrations. It is registered again when it grows; sizes double, so this doubles the
// total cost.
class GrowingPinnedMemory : public GrowingMemory {
 public:
  GrowingPinnedMemory(int64_t max_bytes, c10::Device device);
  ~GrowingPinnedMemory() override;
  void grow(int64_t bytes) override;

 private:
  GrowingHostMemory host_;
  const c10::Device gpu_;
};

// For destructors, which must not throw: waits for a device, calls the function and restores the
// current device. Errors are ignored, because CUDA may be gone at exit.
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

// In growing_managed_memory.cpp: managed memory, or pinned memory if the host must not touch the
// GPU's managed memory while kernels run.
std::shared_ptr<GrowingMemory> make_growing_memory_for_gpu(int64_t max_bytes, c10::Device gpu);

// In growing_device_memory.cpp.
std::shared_ptr<GrowingMemory> make_growing_device_memory(int64_t max_bytes, c10::Device device);
#endif

}  // namespace torchrec_hkv::runtime
