#include "runtime/growing_host_memory.h"

#include <c10/util/Exception.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstring>
#include <utility>

#ifdef TORCHREC_HKV_CUDA
#include <c10/core/DeviceGuard.h>
#include <cuda_runtime.h>

#include "common/cuda_check.h"
#endif

namespace torchrec_hkv::runtime {
namespace {

int64_t to_pages(int64_t bytes) {
  static const int64_t page = sysconf(_SC_PAGESIZE);
  return (bytes + page - 1) / page * page;
}

constexpr int64_t kHugePage = int64_t{1} << 21;

}  // namespace

HostAddresses::HostAddresses(int64_t bytes) : bytes_(to_pages(bytes)) {
  if (bytes_ == 0) return;
  mapped_bytes_ = static_cast<size_t>(bytes_ < kHugePage ? bytes_ : bytes_ + kHugePage);
  void* data =
      mmap(nullptr, mapped_bytes_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  TORCH_CHECK(data != MAP_FAILED, "could not reserve addresses for ", bytes,
              " bytes of host memory: ", std::strerror(errno), ".");
  data_ = mapped_ = static_cast<char*>(data);
  if (bytes_ >= kHugePage) {
    data_ += (kHugePage - 1) - (reinterpret_cast<uintptr_t>(mapped_) + kHugePage - 1) % kHugePage;
    // Advice only; if the system ignores it, accesses are slower.
    (void)madvise(data_, static_cast<size_t>(bytes_), MADV_HUGEPAGE);
  }
}

HostAddresses::~HostAddresses() {
  if (mapped_ != nullptr) munmap(mapped_, mapped_bytes_);
}

char* HostAddresses::take(int64_t bytes) {
  char* const first = data_ + taken_;
  taken_ += to_pages(bytes);
  TORCH_INTERNAL_ASSERT(taken_ <= bytes_);
  return first;
}

int64_t HostAddresses::bytes_for(int64_t bytes, int64_t arrays) {
  return bytes + arrays * to_pages(1);
}

GrowingHostMemory::GrowingHostMemory(std::shared_ptr<HostAddresses> addresses, int64_t max_bytes)
    : GrowingMemory(c10::kCPU), addresses_(std::move(addresses)), reserved_(to_pages(max_bytes)) {
  if (reserved_ > 0) data_ = addresses_->take(max_bytes);
}

GrowingHostMemory::GrowingHostMemory(int64_t max_bytes)
    : GrowingHostMemory(std::make_shared<HostAddresses>(max_bytes), max_bytes) {}

void GrowingHostMemory::grow(int64_t bytes) {
  const int64_t wanted = to_pages(bytes);
  if (wanted <= bytes_) return;
  TORCH_CHECK(wanted <= reserved_, "memory grows to ", wanted, " bytes, but ", reserved_,
              " were reserved.");
  TORCH_CHECK(
      mprotect(data_ + bytes_, static_cast<size_t>(wanted - bytes_), PROT_READ | PROT_WRITE) == 0,
      "could not get ", wanted - bytes_, " more bytes of host memory: ", std::strerror(errno), ".");
  bytes_ = wanted;
}

void discard_host(char* data, int64_t bytes) {
  if (bytes == 0) return;
  TORCH_CHECK(madvise(data, static_cast<size_t>(bytes), MADV_DONTNEED) == 0, "could not give back ",
              bytes, " bytes of host memory: ", std::strerror(errno), ".");
}

void populate_host(char* data, int64_t bytes) {
#ifdef MADV_POPULATE_WRITE
  if (bytes <= 0) return;
  const auto before = static_cast<int64_t>(reinterpret_cast<uintptr_t>(data) % to_pages(1));
  (void)madvise(data - before, static_cast<size_t>(before + bytes), MADV_POPULATE_WRITE);
#endif
}

#ifdef TORCHREC_HKV_CUDA

GrowingPinnedMemory::GrowingPinnedMemory(int64_t max_bytes, c10::Device device)
    : GrowingMemory(c10::kCPU), host_(max_bytes), gpu_(device) {
  data_ = host_.data();
  int same_address = 0;
  HKV_CUDA_CHECK(cudaDeviceGetAttribute(&same_address, cudaDevAttrCanUseHostPointerForRegisteredMem,
                                        device.index()));
  TORCH_CHECK(same_address, "a table with rows in host memory can't grow on ", device,
              ", which reads host memory at other addresses than the host: leave initial_capacity "
              "None.");
}

GrowingPinnedMemory::~GrowingPinnedMemory() {
  if (bytes_ == 0) return;
  after_device(gpu_, [this] { cudaHostUnregister(data_); });
}

void GrowingPinnedMemory::grow(int64_t bytes) {
  if (bytes <= bytes_) return;
  const c10::OptionalDeviceGuard guard(gpu_);
  host_.grow(bytes);
  constexpr unsigned kFlags = cudaHostRegisterPortable | cudaHostRegisterMapped;
  if (bytes_ != 0) HKV_CUDA_CHECK(cudaHostUnregister(data_));
  const cudaError_t status = cudaHostRegister(data_, static_cast<size_t>(host_.bytes()), kFlags);
  if (status != cudaSuccess) {
    cudaGetLastError();  // must not fail the next launch check
    if (bytes_ != 0) {
      HKV_CUDA_CHECK(cudaHostRegister(data_, static_cast<size_t>(bytes_), kFlags));
    }
    TORCH_CHECK(false, "could not pin ", host_.bytes(),
                " bytes of host memory: ", cudaGetErrorString(status), ".");
  }
  bytes_ = host_.bytes();
}

#endif

std::shared_ptr<GrowingMemory> make_growing_memory(MemoryLocation location, int64_t max_bytes,
                                                   c10::Device device) {
  switch (location) {
#ifdef TORCHREC_HKV_CUDA
    case MemoryLocation::kShared:
      return make_growing_memory_for_gpu(max_bytes, device);
    case MemoryLocation::kDevice:
      return make_growing_device_memory(max_bytes, device);
#endif
    case MemoryLocation::kHost:
      return std::make_shared<GrowingHostMemory>(max_bytes);
    default:
      TORCH_CHECK(false, "this build of torchrec_hkv has no CUDA kernels, but memory for ", device,
                  " was asked for.");
  }
}

}  // namespace torchrec_hkv::runtime
