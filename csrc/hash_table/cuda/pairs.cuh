// Pairs of a key and a value for a sort by keys, in as few bytes as possible.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "common/macros.h"

namespace torchrec_hkv::hash_table::cuda {

// Storage of pairs: keys in 32 bits if they fit, values in 32. If key and value have at most 48
// bits together, the value's array has its lower 16 bits only. Its upper bits are stored below the
// key, so that a sort by the bits of the key moves them.
struct PairFormat {
  bool wide;      // keys of 64 bits
  bool packed;    // values of 16 bits
  int32_t shift;  // of the key; the bits below belong to the value

  static PairFormat of(int key_bits, int value_bits) {
    if (key_bits > 32) return PairFormat{true, false, 0};
    if (key_bits + value_bits > 48) return PairFormat{false, false, 0};
    return PairFormat{false, true, 32 - key_bits};
  }
  size_t key_bytes() const { return wide ? sizeof(uint64_t) : sizeof(uint32_t); }
  size_t value_bytes() const { return packed ? sizeof(uint16_t) : sizeof(uint32_t); }
};

struct Pair {
  uint64_t key;
  uint32_t value;
};

struct Pairs {
  void* keys;
  void* values;
  PairFormat format;

  // A stored pair, which a sort moves without interpreting it.
  HKV_HOST_DEVICE Pair load(int64_t i) const { return Pair{load_key(i), load_low(i)}; }
  HKV_HOST_DEVICE void store(int64_t i, const Pair& stored) const {
    if (format.wide) {
      static_cast<uint64_t*>(keys)[i] = stored.key;
    } else {
      static_cast<uint32_t*>(keys)[i] = static_cast<uint32_t>(stored.key);
    }
    if (format.packed) {
      static_cast<uint16_t*>(values)[i] = static_cast<uint16_t>(stored.value);
    } else {
      static_cast<uint32_t*>(values)[i] = stored.value;
    }
  }
  // Loads what value_of needs of a stored pair: the key only if it holds bits of the value.
  HKV_HOST_DEVICE Pair load_for_value(int64_t i) const {
    return Pair{format.packed ? static_cast<const uint32_t*>(keys)[i] : 0u, load_low(i)};
  }
  HKV_HOST_DEVICE uint64_t key_of(const Pair& stored) const { return stored.key >> format.shift; }
  HKV_HOST_DEVICE uint32_t value_of(const Pair& stored) const {
    if (!format.packed) return stored.value;
    const uint32_t upper = static_cast<uint32_t>(stored.key) & ((1u << format.shift) - 1);
    return upper << 16 | stored.value;
  }

  HKV_HOST_DEVICE uint64_t key(int64_t i) const { return load_key(i) >> format.shift; }
  HKV_HOST_DEVICE uint32_t value(int64_t i) const { return value_of(load_for_value(i)); }
  HKV_HOST_DEVICE void set(int64_t i, uint64_t key, uint32_t value) const {
    const uint32_t upper = format.packed ? value >> 16 : 0;
    store(i, Pair{key << format.shift | upper, value});
  }

 private:
  HKV_HOST_DEVICE uint64_t load_key(int64_t i) const {
    return format.wide ? static_cast<const uint64_t*>(keys)[i]
                       : static_cast<const uint32_t*>(keys)[i];
  }
  HKV_HOST_DEVICE uint32_t load_low(int64_t i) const {
    return format.packed ? static_cast<const uint16_t*>(values)[i]
                         : static_cast<const uint32_t*>(values)[i];
  }
};

// Pairs, and a second buffer of the same size: each pass of a sort moves the pairs to the other
// one.
struct SortedPairs {
  Pairs pairs;
  Pairs other;
};

}  // namespace torchrec_hkv::hash_table::cuda
