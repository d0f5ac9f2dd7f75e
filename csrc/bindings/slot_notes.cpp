#include "bindings/slot_notes.h"

#include <utility>

#include "bindings/capture.h"

namespace torchrec_hkv::bindings {

void SlotNotes::keep(const at::Tensor& slots, at::Tensor notes) {
  if (slots.is_inference()) return;  // nothing tells who writes to it
  Kept kept{slots.storage().getWeakStorageImpl(),    slots.const_data_ptr(),     slots.numel(),
            static_cast<uint32_t>(slots._version()), capture_id(slots.device()), std::move(notes)};
  std::lock_guard<std::mutex> lock(mutex_);
  kept_.emplace(std::move(kept));
}

at::Tensor SlotNotes::take(const at::Tensor& slots) {
  std::optional<Kept> kept;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    kept.swap(kept_);
  }
  if (!kept || slots.is_inference()) return {};
  const auto storage = kept->storage.lock();
  const bool same = storage && storage.get() == slots.storage().unsafeGetStorageImpl() &&
                    kept->data == slots.const_data_ptr() && kept->number == slots.numel() &&
                    kept->version == static_cast<uint32_t>(slots._version()) &&
                    kept->capture == capture_id(slots.device());
  if (!same) return {};
#ifdef TORCHREC_HKV_CUDA
  if (slots.is_cuda()) {
    kept->notes.record_stream(c10::cuda::getCurrentCUDAStream(slots.device().index()));
  }
#endif
  return kept->notes;
}

}  // namespace torchrec_hkv::bindings
