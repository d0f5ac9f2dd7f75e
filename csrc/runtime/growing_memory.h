// Memory that grows in place: addresses are reserved for the maximum, and memory backs them as
// needed.
#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <memory>

namespace torchrec_hkv::runtime {

enum class MemoryLocation {
  kHost,    // pages are zeroed when they are first touched
  kShared,  // host memory that a GPU reads and writes in place
  kDevice,  // GPU memory
};

class GrowingMemory {
 public:
  virtual ~GrowingMemory() = default;
  GrowingMemory(const GrowingMemory&) = delete;
  GrowingMemory& operator=(const GrowingMemory&) = delete;

  // Constant. Null if `max_bytes` is 0.
  char* data() const { return data_; }
  // Backed bytes: the requested number, rounded up.
  int64_t bytes() const { return bytes_; }
  // Device of tensors in this memory; the host if it is shared.
  c10::Device device() const { return device_; }
  // Backs the first `bytes`, at most the reserved number. Memory is never given back. On failure
  // nothing has changed. On a GPU no running work may use the memory.
  virtual void grow(int64_t bytes) = 0;

 protected:
  explicit GrowingMemory(c10::Device device) : device_(device) {}
  const c10::Device device_;
  char* data_ = nullptr;
  int64_t bytes_ = 0;
};

// Reserves addresses for `max_bytes` without backing them. No running work may use the memory when
// it is destroyed; the destructor of GPU memory waits for such work.
std::shared_ptr<GrowingMemory> make_growing_memory(MemoryLocation location, int64_t max_bytes,
                                                   c10::Device device);

// Makes whole pages of MemoryLocation::kHost read as zeros again, without writing to them.
void discard_host(char* data, int64_t bytes);

}  // namespace torchrec_hkv::runtime
