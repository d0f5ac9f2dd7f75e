// Growing GPU memory, by CUDA's virtual memory management. The driver's functions are looked up at
// run time, so that no additional library is linked.
#include "runtime/growing_host_memory.h"

#ifdef TORCHREC_HKV_CUDA

#include <c10/core/DeviceGuard.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/util/Exception.h>
#include <cuda.h>
#include <cuda_runtime.h>

#include <vector>

#include "common/cuda_check.h"

namespace torchrec_hkv::runtime {
namespace {

template <typename Function>
void look_up(Function& function, const char* name) {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSymbolNotFound;
#if CUDART_VERSION >= 12050
  HKV_CUDA_CHECK(cudaGetDriverEntryPointByVersion(name, &found, 11020, cudaEnableDefault, &result));
#else
  HKV_CUDA_CHECK(cudaGetDriverEntryPoint(name, &found, cudaEnableDefault, &result));
#endif
  TORCH_CHECK(result == cudaDriverEntryPointSuccess && found != nullptr, "the CUDA driver has no ",
              name,
              ", which tables that grow need: leave "
              "initial_capacity None, or update the driver.");
  function = reinterpret_cast<Function>(found);
}

struct Driver {
  decltype(&cuMemGetAllocationGranularity) granularity;
  decltype(&cuMemAddressReserve) reserve;
  decltype(&cuMemAddressFree) free_addresses;
  decltype(&cuMemCreate) create;
  decltype(&cuMemRelease) release;
  decltype(&cuMemMap) map;
  decltype(&cuMemUnmap) unmap;
  decltype(&cuMemSetAccess) set_access;
  decltype(&cuGetErrorString) error_string;

  Driver() {
    look_up(granularity, "cuMemGetAllocationGranularity");
    look_up(reserve, "cuMemAddressReserve");
    look_up(free_addresses, "cuMemAddressFree");
    look_up(create, "cuMemCreate");
    look_up(release, "cuMemRelease");
    look_up(map, "cuMemMap");
    look_up(unmap, "cuMemUnmap");
    look_up(set_access, "cuMemSetAccess");
    look_up(error_string, "cuGetErrorString");
  }

  void check(CUresult status, const char* what, int64_t bytes) const {
    if (status == CUDA_SUCCESS) return;
    const char* why = nullptr;
    error_string(status, &why);
    TORCH_CHECK(false, "could not ", what, " ", bytes,
                " bytes of GPU memory: ", why != nullptr ? why : "an unknown error", ".");
  }
};

const Driver& driver() {
  static const Driver instance;
  return instance;
}

class GrowingDeviceMemory : public GrowingMemory {
 public:
  GrowingDeviceMemory(int64_t max_bytes, c10::Device device) : GrowingMemory(device) {
    const c10::OptionalDeviceGuard guard(device);
    HKV_CUDA_CHECK(cudaFree(nullptr));  // creates the device's context, if necessary
    properties_.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    properties_.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    properties_.location.id = device.index();
    driver().check(
        driver().granularity(&chunk_bytes_, &properties_, CU_MEM_ALLOC_GRANULARITY_MINIMUM),
        "learn the granularity of", max_bytes);
    reserved_ = to_chunks(max_bytes);
    if (reserved_ == 0) return;
    driver().check(driver().reserve(&address_, static_cast<size_t>(reserved_), 0, 0, 0),
                   "reserve addresses for", reserved_);
    data_ = reinterpret_cast<char*>(address_);
  }

  ~GrowingDeviceMemory() override {
    if (reserved_ == 0 || data_ == nullptr) return;
    after_device(device_, [this] {
      for (const MappedChunk& piece : chunks_) {
        driver().unmap(address_ + piece.first, piece.bytes);
        driver().release(piece.handle);
      }
      driver().free_addresses(address_, static_cast<size_t>(reserved_));
    });
  }

  void grow(int64_t bytes) override {
    const int64_t wanted = to_chunks(bytes);
    if (wanted <= bytes_) return;
    TORCH_CHECK(wanted <= reserved_, "memory grows to ", wanted, " bytes, but ", reserved_,
                " were reserved.");
    const c10::OptionalDeviceGuard guard(device_);
    chunks_.reserve(chunks_.size() +
                    1);  // nothing may fail between the mapping and its registration
    MappedChunk piece{0, static_cast<CUdeviceptr>(bytes_), static_cast<size_t>(wanted - bytes_)};
    CUresult status = driver().create(&piece.handle, piece.bytes, &properties_, 0);
    if (status == CUDA_ERROR_OUT_OF_MEMORY) {
      c10::cuda::CUDACachingAllocator::emptyCache();  // PyTorch may hold unused memory
      status = driver().create(&piece.handle, piece.bytes, &properties_, 0);
    }
    driver().check(status, "get", static_cast<int64_t>(piece.bytes));
    status = driver().map(address_ + piece.first, piece.bytes, 0, piece.handle, 0);
    if (status != CUDA_SUCCESS) {
      driver().release(piece.handle);
      driver().check(status, "map", static_cast<int64_t>(piece.bytes));
    }
    CUmemAccessDesc access{};
    access.location = properties_.location;
    access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    status = driver().set_access(address_ + piece.first, piece.bytes, &access, 1);
    if (status != CUDA_SUCCESS) {
      driver().unmap(address_ + piece.first, piece.bytes);
      driver().release(piece.handle);
      driver().check(status, "open", static_cast<int64_t>(piece.bytes));
    }
    chunks_.push_back(piece);
    bytes_ = wanted;
  }

 private:
  struct MappedChunk {
    CUmemGenericAllocationHandle handle;
    CUdeviceptr first;  // from the beginning
    size_t bytes;
  };

  int64_t to_chunks(int64_t bytes) const {
    const auto piece = static_cast<int64_t>(chunk_bytes_);
    return (bytes + piece - 1) / piece * piece;
  }

  CUmemAllocationProp properties_{};
  size_t chunk_bytes_ = 0;
  int64_t reserved_ = 0;
  CUdeviceptr address_ = 0;
  std::vector<MappedChunk> chunks_;
};

}  // namespace

std::shared_ptr<GrowingMemory> make_growing_device_memory(int64_t max_bytes, c10::Device device) {
  return std::make_shared<GrowingDeviceMemory>(max_bytes, device);
}

}  // namespace torchrec_hkv::runtime

#endif
