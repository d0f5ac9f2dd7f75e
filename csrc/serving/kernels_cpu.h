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

// Rows to be converted to 8 or 4 bits.
struct Quantization {
  const float* rows;  // [n, dim]
  int64_t n;
  int32_t dim;
  RowFormat format;
  float unit;   // a power of two
  float limit;  // the largest absolute value that this unit is for
  char* out;    // [n, row bytes]
};

struct Quantized {
  int64_t rows;   // rows before the first with a value beyond the limit, or one that is not finite
  float largest;  // largest absolute value of that row
  int room;       // doublings of the unit that all rows before can take: see lower()
};

// Converts rows up to one beyond the limit. What is behind it may have been written too.
Quantized quantize(const Quantization& its, int threads);

// Converts quantized rows to a unit that is larger by a power of two. They are what quantize()
// would have made of their values with that unit, if they have room for so many doublings.
void lower(char* rows, int64_t n, int64_t row_bytes, int doublings);

// Rows to be copied: row `order[i]` to place i.
struct Gathered {
  const char* rows;
  const int64_t* order;  // [n]
  int64_t n;
  int64_t row_bytes;
  char* out;  // [n, row_bytes]
};

void gather(const Gathered& its, int threads);

struct Split {
  int64_t* order;   // [n], numbers of the ids
  int64_t* ids;     // [n], in this order
  int64_t* counts;  // [parts]
};

// Sorts ids by parts, each a range of blocks, and else leaves their order.
void split(const int64_t* ids, int64_t n, uint32_t parts, const Split& out, int threads);

// Makes those rows hot that have the largest counts: `wanted`, or all. Of equal counts these are
// the rows that were hot before (null: none were), then the first ones. words: out, for each 32
// rows.
void choose_hot_rows(const uint32_t* counts, int64_t n, int64_t wanted, const HotWord* before,
                     HotWord* words);

void copy_hot_rows(const HotCopy& its, int threads);

void find_row_numbers(const RowNumbers& its, int threads);

}  // namespace torchrec_hkv::serving::cpu
