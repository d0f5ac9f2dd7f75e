// One of two values, without a branch. A processor guesses where a branch goes, and pays some 15
// cycles for a wrong guess: too much where nothing tells which way it is. Compilers make branches
// of `condition ? a : b` as they see fit.
#pragma once

#include <cstdint>

namespace torchrec_hkv {

inline uint64_t select(bool condition, uint64_t then, uint64_t otherwise) {
  uint64_t all = -static_cast<uint64_t>(condition);
  asm("" : "+r"(all));  // hides where it comes from
  return otherwise ^ ((then ^ otherwise) & all);
}

template <typename T>
T* select(bool condition, T* then, T* otherwise) {
  return reinterpret_cast<T*>(
      select(condition, reinterpret_cast<uint64_t>(then), reinterpret_cast<uint64_t>(otherwise)));
}

}  // namespace torchrec_hkv
