// The CPU kernels of read-only tables.
#pragma once

#include <cstdint>

#include "serving/table.h"

namespace torchrec_hkv::serving::cpu {

// Looks up one feature: pools the rows of each bag, or writes each row. Unknown ids get their
// initial or default row and are counted.
void look_up(const Feature& feature, int threads);

// The placement of the ids of some blocks.
struct BlockPlacement {
  const int64_t* ids;  // [n], distinct, all of blocks [first_block, first_block + blocks)
  int64_t n;
  IndexGeometry geometry;
  uint32_t first_block;
  uint32_t blocks;
  int64_t first_row;   // number of the first row
  const bool* erased;  // [n]; null: no id is erased
  Bucket* buckets;     // out: [blocks * block_buckets]
  int64_t* order;      // out: [n]; row first_row + i belongs to ids[order[i]]
};

enum class PlaceStatus { kYes, kForeignId, kRepeatedId, kFull };

// Fills buckets. A result other than kYes is the reason why the id `*at` could not be placed.
PlaceStatus place(const BlockPlacement& placement, int64_t* at, int threads);

// Rows to be converted to 8 or 4 bits.
struct QuantizeArguments {
  const float* rows;  // [n, dim]
  int64_t n;
  int32_t dim;
  RowFormat format;
  float unit;   // a power of two
  float limit;  // the largest absolute value that this unit supports
  char* out;    // [n, row bytes]
};

struct QuantizeResult {
  int64_t rows;   // number of rows before the first with a value that exceeds the limit or is not
                  // finite
  float largest;  // largest absolute value of that row
  int headroom;   // number of doublings of the unit that all rows before it support: see lower()
};

// Converts rows up to the first that exceeds the limit. Output after it may have been written, too.
QuantizeResult quantize(const QuantizeArguments& arguments, int threads);

// Converts quantized rows to a unit that is larger by a power of two. If the rows have room for
// this many doublings, the result equals that of quantize() with the larger unit.
void lower(char* rows, int64_t n, int64_t row_bytes, int doublings);

// Rows to be copied: row `order[i]` to position i.
struct GatherArguments {
  const char* rows;
  const int64_t* order;  // [n]
  int64_t n;
  int64_t row_bytes;
  char* out;  // [n, row_bytes]
};

void gather(const GatherArguments& arguments, int threads);

struct SplitOutput {
  int64_t* order;   // [n], numbers of the ids
  int64_t* ids;     // [n], in this order
  int64_t* counts;  // [parts]
};

// Sorts ids by parts, which are ranges of blocks; the sort is stable.
void split(const int64_t* ids, int64_t n, uint32_t parts, const SplitOutput& out, int threads);

// Makes the `wanted` rows with the largest counts hot, or all rows if there are fewer. Among equal
// counts, rows that were hot before (null: none) are preferred, then the first rows. words: out,
// one per 32 rows.
void choose_hot_rows(const uint32_t* counts, int64_t n, int64_t wanted, const HotMaskWord* before,
                     HotMaskWord* words);

void copy_hot_rows(const HotRowCopy& arguments, int threads);

void find_row_numbers(const RowNumbers& arguments, int threads);

}  // namespace torchrec_hkv::serving::cpu
