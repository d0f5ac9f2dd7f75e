// Zeroed memory for sums of gradients and other results within a call. Up to 256 MiB are kept from
// one call to the next, because the operating system takes longer to provide a page than a call
// takes to fill it.
#pragma once

#include <cstdint>
#include <utility>

namespace torchrec_hkv::tensor_train::cpu {

// Floats that are zero at first. Fresh pages are allocated when they are touched.
class ZeroedBuffer {
 public:
  // Takes a block that was kept, or allocates one. Throws std::bad_alloc.
  explicit ZeroedBuffer(int64_t size);
  ZeroedBuffer(ZeroedBuffer&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)),
        size_(other.size_),
        capacity_(other.capacity_) {}
  ZeroedBuffer& operator=(ZeroedBuffer&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
    std::swap(capacity_, other.capacity_);
    return *this;
  }
  // Frees the block unless it was kept.
  ~ZeroedBuffer();

  float* data() const { return data_; }

  // Keeps the block for a later call. The caller has set all floats that are not zero to zero.
  void keep();
  // Sets all floats to zero, and keeps the block.
  void clear_and_keep();

 private:
  float* data_;
  int64_t size_;
  int64_t capacity_;  // of the block
};

}  // namespace torchrec_hkv::tensor_train::cpu
