// Memory that grows where it is: addresses are reserved for all there may be, and what backs them
// comes as it is needed.
#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <memory>

namespace torchrec_hkv::runtime {

enum class Place {
  kHost,    // pages come when they are first touched, as zeros
  kShared,  // host memory that a GPU reads and writes in place
  kDevice,  // a GPU's
};

class GrowingMemory {
 public:
  virtual ~GrowingMemory() = default;
  GrowingMemory(const GrowingMemory&) = delete;
  GrowingMemory& operator=(const GrowingMemory&) = delete;

  // Never changes. Null where `most_bytes` is 0.
  char* data() const { return data_; }
  // What is backed: as much as was asked for, rounded up.
  int64_t bytes() const { return bytes_; }
  // Of tensors over it: the host where it is shared.
  c10::Device device() const { return device_; }
  // Backs the first `bytes`, at most what was reserved. Never gives back. Where it fails, nothing
  // has changed. On a GPU nothing may be running that uses the memory.
  virtual void grow(int64_t bytes) = 0;

 protected:
  explicit GrowingMemory(c10::Device device) : device_(device) {}
  const c10::Device device_;
  char* data_ = nullptr;
  int64_t bytes_ = 0;
};

// Reserves addresses for `most_bytes`; backs none of them. When it is destroyed nothing may be
// running that uses it: on a GPU it waits for that.
std::shared_ptr<GrowingMemory> make_growing_memory(Place place, int64_t most_bytes,
                                                   c10::Device device);

// Makes whole pages of host memory of Place::kHost read as zeros again, without touching them.
void discard_host(char* data, int64_t bytes);

}  // namespace torchrec_hkv::runtime
