// Selects one of two values without a branch. A mispredicted branch costs about 15 cycles, too much
// for unpredictable conditions. Compilers may turn `condition ? a : b` into a branch.
#pragma once

#include <cstdint>

namespace torchrec_hkv {

inline uint64_t select(bool condition, uint64_t then, uint64_t otherwise) {
  uint64_t all = -static_cast<uint64_t>(condition);
  asm("" : "+r"(all));  // hides the value's origin from the compiler
  return otherwise ^ ((then ^ otherwise) & all);
}

template <typename T>
T* select(bool condition, T* then, T* otherwise) {
  return reinterpret_cast<T*>(
      select(condition, reinterpret_cast<uint64_t>(then), reinterpret_cast<uint64_t>(otherwise)));
}

}  // namespace torchrec_hkv
