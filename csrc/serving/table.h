// Read-only tables for serving: a dense index over any 64-bit ids, and rows in one of five formats.
//
// The index is an array of 64-byte buckets with up to seven ids, 64 / (7 * load factor) bytes for
// each id. An id has two buckets. Most ids are in their first bucket; a bucket stores whether some
// of its ids are in their second one. Rows are dense: the rows of a bucket are adjacent, in the
// order of its ids.
//
// Buckets are divided into blocks. Both buckets of an id are in one block. Blocks are ranges of the
// mix that also determines the rank that owns an id. A table can therefore be built block by block
// from ids in the order of their owners, with memory for one block.
#pragma once

#include <cstdint>

#include "common/dtypes.h"
#include "common/hashing.h"
#include "common/initial_rows.h"
#include "common/macros.h"
#include "serving/hot_rows.h"

namespace torchrec_hkv::serving {

constexpr int kBucketIds = 7;

struct alignas(64) Bucket {
  // Bits 0 to 39: number of the first row. 40 to 42: number of ids in this bucket. 43: whether an
  // id whose first bucket is this one is in its second bucket. 48 to 54: which ids here are erased.
  uint64_t header;
  int64_t ids[kBucketIds];
};
static_assert(sizeof(Bucket) == 64);

constexpr int kCountShift = 40, kSpilledShift = 43, kErasedShift = 48;
constexpr uint64_t kFirstRowMask = (uint64_t{1} << kCountShift) - 1;

HKV_HOST_DEVICE int64_t first_row_of(uint64_t header) {
  return static_cast<int64_t>(header & kFirstRowMask);
}
HKV_HOST_DEVICE int count_of(uint64_t header) {
  return static_cast<int>(header >> kCountShift & 7);
}
HKV_HOST_DEVICE bool has_spilled(uint64_t header) { return header >> kSpilledShift & 1; }
HKV_HOST_DEVICE bool is_erased(uint64_t header, int position) {
  return header >> (kErasedShift + position) & 1;
}

// The number of buckets: `blocks` times `block_buckets`.
struct IndexGeometry {
  uint32_t blocks;
  uint32_t block_buckets;
};

struct CandidateBuckets {
  int64_t first;
  int64_t second;
};

// The mix of owner_bucket.
HKV_HOST_DEVICE uint64_t mix_of_id(int64_t id) {
  return mix64(static_cast<uint64_t>(id) + 0x9e3779b97f4a7c15ull);
}
HKV_HOST_DEVICE uint32_t block_of_mix(uint64_t mix, const IndexGeometry& geometry) {
  return static_cast<uint32_t>((mix >> 32) * geometry.blocks >> 32);
}
// The two buckets of an id within its block; equal only if the block has one bucket.
HKV_HOST_DEVICE CandidateBuckets choose_in_block(uint64_t mix, uint32_t block_buckets) {
  const uint64_t first = (mix & 0xffffffffull) * block_buckets >> 32;
  uint64_t second = (mix * 0xd1b54a32d192ed03ull >> 32) * block_buckets >> 32;
  if (second == first) second = first + 1 == block_buckets ? 0 : first + 1;
  return {static_cast<int64_t>(first), static_cast<int64_t>(second)};
}
HKV_HOST_DEVICE CandidateBuckets choose(int64_t id, const IndexGeometry& geometry) {
  const uint64_t mix = mix_of_id(id);
  const int64_t at = static_cast<int64_t>(block_of_mix(mix, geometry)) * geometry.block_buckets;
  const CandidateBuckets choice = choose_in_block(mix, geometry.block_buckets);
  return {at + choice.first, at + choice.second};
}

// Rows of 8 and 4 bits begin with a float16 scale and a float16 offset, both in units of the
// table's `unit`: value = unit * (offset + scale * code). In rows of 4 bits, column 2k is in the
// low half of a byte. Rows are padded to a multiple of 4 bytes.
enum class RowFormat : int32_t {
  kFloat32 = 0,
  kFloat16 = 1,
  kBFloat16 = 2,
  kInt8 = 3,
  kInt4 = 4,
};
constexpr int kQuantizedHeaderBytes = 4;

HKV_HOST_DEVICE int64_t row_bytes_of(RowFormat format, int32_t dim) {
  switch (format) {
    case RowFormat::kFloat32:
      return int64_t{4} * dim;
    case RowFormat::kInt8:
      return (kQuantizedHeaderBytes + int64_t{dim} + 3) / 4 * 4;
    case RowFormat::kInt4:
      return (kQuantizedHeaderBytes + (int64_t{dim} + 1) / 2 + 3) / 4 * 4;
    default:
      return (int64_t{2} * dim + 3) / 4 * 4;
  }
}

// Ids and their rows; without buckets, the layer is empty.
struct Layer {
  const Bucket* buckets;
  IndexGeometry geometry;
  const char* rows;
};

// A search for rows: rows[i] = the number of the row of ids[i], or -1 if the layer lacks the id.
struct RowNumbers {
  Layer layer;
  const int64_t* ids;
  int64_t n;
  int64_t* rows;
};

// A table: a layer with the changes of deltas, which takes precedence, and the base.
struct Table {
  Layer base;
  Layer changes;
  RowFormat format;
  int32_t dim;
  int64_t row_bytes;
  float unit;
  // The row of unknown ids; null: the initial row of training.
  const float* default_row;
  InitialRows initial_rows;
  // The hot rows, if the table is on a GPU and the rows of its base are in host memory.
  HotRowCache hot;
};

// The computation of a bag's mean, as in training, so that results are bit-identical.
enum class Mean : int32_t {
  kNone = 0,        // sum of weight * row
  kScaledRows = 1,  // sum of (weight / length) * row
  kScaledSum = 2,   // (sum of weight * row) * (1 / length)
  kDividedSum = 3,  // (sum of weight * row) / (length, or sum of weights), if that is not 0
};

// One output of a lookup: the rows of one feature in one table.
struct Feature {
  const Table* table;
  const int64_t* ids;
  const float* weights;    // null: none
  const int64_t* offsets;  // [bags + 1], into ids; null: every id is a bag
  int64_t bags;
  Mean mean;
  bool fused;        // weight * row + sum is rounded once
  RowType type;      // of the output
  char* out;         // of the first bag
  int64_t stride;    // bytes from a bag to the next
  int64_t* unknown;  // counts ids that the table lacks
};

}  // namespace torchrec_hkv::serving
