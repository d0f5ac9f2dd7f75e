// Pointers to memory of a device. If a kernel loads a pointer from memory, the compiler doesn't
// know whether it refers to global or to shared memory. It then emits generic loads and stores,
// which it can't reorder with those of shared memory, and atomic operations with a branch for each
// of the two memories. These functions tell it. On a CPU they do nothing.
#pragma once

#include "common/macros.h"

namespace torchrec_hkv {

// Returns `pointer`, which refers to global memory (host memory that the device can access is a
// part of it) or is null.
template <typename T>
HKV_HOST_DEVICE T* in_global(T* pointer) {
#ifdef __CUDA_ARCH__
  __builtin_assume(__isGlobal(pointer));
#endif
  return pointer;
}

// A pointer to global memory, as a member of what kernels load from memory. Converts to T*.
template <typename T>
class GlobalPointer {
 public:
  GlobalPointer() = default;
  HKV_HOST_DEVICE GlobalPointer(T* pointer) : pointer_(pointer) {}

  HKV_HOST_DEVICE T* get() const { return in_global(pointer_); }
  HKV_HOST_DEVICE operator T*() const { return get(); }
  HKV_HOST_DEVICE T* operator->() const { return get(); }

 private:
  T* pointer_;
};

}  // namespace torchrec_hkv
