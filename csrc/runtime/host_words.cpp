#include "runtime/host_words.h"

#include <mutex>
#include <vector>

#ifdef TORCHREC_HKV_CUDA
#include <c10/core/DeviceGuard.h>
#include <cuda_runtime.h>

#include "common/cuda_check.h"
#endif

namespace torchrec_hkv::runtime {
namespace {

// Never destroyed, because groups may be destroyed after static objects.
struct FreeHostWords {
  std::mutex mutex;
  std::vector<HostWords*> words;
  uint32_t last_number = 0;

  static FreeHostWords& get() {
    static auto* free = new FreeHostWords;
    return *free;
  }
};

}  // namespace

GroupHostWords::GroupHostWords([[maybe_unused]] c10::Device device) {
#ifdef TORCHREC_HKV_CUDA
  if (!device.is_cuda()) return;
  const c10::OptionalDeviceGuard guard(device);
  constexpr size_t kWordsOfPage = 64;
  FreeHostWords& free = FreeHostWords::get();
  const std::lock_guard<std::mutex> lock(free.mutex);
  if (free.words.empty()) {
    void* page = nullptr;
    HKV_CUDA_CHECK(cudaHostAlloc(&page, kWordsOfPage * sizeof(HostWords), cudaHostAllocPortable));
    for (size_t i = 0; i < kWordsOfPage; ++i) {
      free.words.push_back(static_cast<HostWords*>(page) + i);
    }
  }
  words_ = free.words.back();
  free.words.pop_back();
  *words_ = HostWords{};
  number_ = ++free.last_number;
#endif
}

GroupHostWords::~GroupHostWords() {
  if (words_ == nullptr) return;
  FreeHostWords& free = FreeHostWords::get();
  const std::lock_guard<std::mutex> lock(free.mutex);
  free.words.push_back(words_);
}

}  // namespace torchrec_hkv::runtime
