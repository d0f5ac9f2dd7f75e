// What a lookup has noted of its positions, beside the slots that it gave: for the grouping of
// these positions, if that is of the same slots.
#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <mutex>
#include <optional>

namespace torchrec_hkv::bindings {

class SlotNotes {
 public:
  // `notes` say something of `slots` as they are now.
  void keep(const at::Tensor& slots, at::Tensor notes);
  // They, if these are the same slots, and nobody has written to them; undefined otherwise, and
  // always if one of both calls is captured in a CUDA graph in which the other is not. They are
  // given once, for kernels of the device's current stream.
  at::Tensor take(const at::Tensor& slots);

 private:
  struct Kept {
    // The memory itself, which another tensor may have later.
    c10::weak_intrusive_ptr<c10::StorageImpl> storage;
    const void* data;
    int64_t number;
    uint32_t version;
    unsigned long long capture;
    at::Tensor notes;
  };
  std::mutex mutex_;
  std::optional<Kept> kept_;
};

}  // namespace torchrec_hkv::bindings
