// The hot rows of a read-only table that is larger than a GPU's memory.
//
// All rows are in host memory, which the GPU reads. The rows that are looked up most, the hot rows,
// are also in GPU memory, densely and in the order of their numbers. A mask has one bit for each
// row, which says whether the row is hot. For each 32 rows, a count of the hot rows before them
// gives the positions.
#pragma once

#include <cstdint>

#include "common/macros.h"

namespace torchrec_hkv::serving {

constexpr int kHotMaskRows = 32;

// 32 rows, from a multiple of 32 on.
struct HotMaskWord {
  uint32_t mask;    // which rows are hot, the first row in the lowest bit
  uint32_t before;  // number of hot rows before these rows
};
static_assert(sizeof(HotMaskWord) == 8);

struct HotRowCache {
  const HotMaskWord* words;  // null: the table has no rows in host memory
  const char* rows;
  // Number of sampled lookups of each row, at most kMaxHotCount; null: not counted.
  uint32_t* counts;
  unsigned long long* host_lookups;  // lookups that read a row in host memory; null: not counted
  int64_t bytes_before;              // bytes of rows in host memory of the tables before this one
};

// Further lookups of a row don't change its count.
constexpr uint32_t kMaxHotCount = uint32_t{1} << 30;

HKV_HOST_DEVICE uint32_t bits_of(uint32_t mask) {
#ifdef __CUDA_ARCH__
  return __popc(mask);
#else
  return static_cast<uint32_t>(__builtin_popcount(mask));
#endif
}

// The position of a row among the hot rows, or -1.
HKV_HOST_DEVICE int64_t hot_index(const HotMaskWord& word, int64_t row) {
  const uint32_t bit = uint32_t{1} << (row % kHotMaskRows);
  return (word.mask & bit) == 0 ? -1 : int64_t{word.before} + bits_of(word.mask & (bit - 1));
}

// Whether the id at a position of a call is sampled: an eighth of the positions, evenly spread, and
// other positions in the next call.
HKV_HOST_DEVICE bool is_sampled(int64_t position, uint32_t phase) {
  return (static_cast<uint32_t>(position) * 0x9e3779b9u + phase) >> 29 == 0;
}

// Rows to be copied to the hot rows.
struct HotRowCopy {
  const HotMaskWord* words;
  int64_t rows;  // number of rows of the table
  const char* from;
  int64_t row_bytes;
  char* to;
};

}  // namespace torchrec_hkv::serving
