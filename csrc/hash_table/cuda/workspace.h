// Divides scratch memory into parts.
#pragma once

#include <cstddef>

namespace torchrec_hkv::hash_table::cuda {

// The bytes that a part takes. Each part begins at a multiple of 256 bytes.
constexpr size_t aligned(size_t bytes) { return (bytes + 255) / 256 * 256; }

// Takes parts one after the other from memory that begins at such a multiple. If `base` is null, it
// only counts bytes.
class WorkspaceAllocator {
 public:
  explicit WorkspaceAllocator(char* base) : base_(base) {}
  template <typename T>
  T* take(size_t number) {
    char* const part = base_ == nullptr ? nullptr : base_ + used_;
    used_ += aligned(number * sizeof(T));
    return reinterpret_cast<T*>(part);
  }
  size_t used() const { return used_; }

 private:
  char* base_;
  size_t used_ = 0;
};

}  // namespace torchrec_hkv::hash_table::cuda
