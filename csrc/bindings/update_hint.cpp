#include "bindings/update_hint.h"

#include <mutex>
#include <vector>

#ifdef TORCHREC_HKV_CUDA
#include <c10/core/DeviceGuard.h>
#include <cuda_runtime.h>

#include "common/cuda_check.h"
#endif

namespace torchrec_hkv::bindings {
namespace {

using hash_table::UpdateHint;

// Never destroyed, as groups may end after static objects.
struct FreeHints {
  std::mutex mutex;
  std::vector<UpdateHint*> hints;

  static FreeHints& get() {
    static auto* free = new FreeHints;
    return *free;
  }
};

}  // namespace

GroupUpdateHint::GroupUpdateHint([[maybe_unused]] c10::Device device) {
#ifdef TORCHREC_HKV_CUDA
  if (!device.is_cuda()) return;
  const c10::OptionalDeviceGuard guard(device);
  constexpr size_t kHintsOfPage = 64;
  FreeHints& free = FreeHints::get();
  const std::lock_guard<std::mutex> lock(free.mutex);
  if (free.hints.empty()) {
    void* page = nullptr;
    HKV_CUDA_CHECK(cudaHostAlloc(&page, kHintsOfPage * sizeof(UpdateHint), cudaHostAllocPortable));
    for (size_t i = 0; i < kHintsOfPage; ++i) {
      free.hints.push_back(static_cast<UpdateHint*>(page) + i);
    }
  }
  hint_ = free.hints.back();
  free.hints.pop_back();
  *hint_ = UpdateHint{0};
#endif
}

GroupUpdateHint::~GroupUpdateHint() {
  if (hint_ == nullptr) return;
  FreeHints& free = FreeHints::get();
  const std::lock_guard<std::mutex> lock(free.mutex);
  free.hints.push_back(hint_);
}

}  // namespace torchrec_hkv::bindings
