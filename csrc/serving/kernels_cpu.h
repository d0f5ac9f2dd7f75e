// The CPU kernels of read-only tables.
#pragma once

#include <cstdint>

#include "serving/table.h"

namespace torchrec_hkv::serving::cpu {

// Looks up one feature: pools the rows of each bag, or writes out each row. Unknown ids get their
// initial or default row and are counted.
void look_up(const Feature& feature, int threads);

// Where the ids of some blocks go.
struct Placement {
  const int64_t* ids;  // [n], distinct, all of blocks [first_block, first_block + blocks)
  int64_t n;
  Geometry geometry;
  uint32_t first_block;
  uint32_t blocks;
  int64_t first_row;   // rows are numbered from here
  const bool* erased;  // [n]; null: none
  Bucket* buckets;     // out: [blocks * block_buckets]
  int64_t* order;      // out: [n]; row first_row + i is that of ids[order[i]]
};

enum class Placed { kYes, kForeignId, kRepeatedId, kFull };

// Fills buckets. The result other than kYes says why not, of the id `*at`.
Placed place(const Placement& placement, int64_t* at, int threads);

}  // namespace torchrec_hkv::serving::cpu
