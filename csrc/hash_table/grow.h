// Growth of a table: its buckets split in two, in place. Both devices implement it, as kernels.h
// declares.
//
// An id's two buckets are its two hashes scaled by the number of buckets. With twice as many
// buckets, the entries of bucket b go to 2 b or 2 b + 1 and keep their positions. Entries only move
// upwards. First the upper half of the buckets moves to where nothing is stored, then the upper
// half of the rest, whose targets are free by then, and so on; bucket 0 is last and gives bucket 1
// its entries. So there is never a second copy of a row.
//
// One kind of entry is misplaced (*astray*) after that. If both hashes of an id give one bucket f,
// its second bucket is f + 1. Doubling may separate the hashes, so that the id belongs to 2 f or 2
// f + 1 and may be stored in either. It waits at its position in 2 f + 2 until all buckets are
// split, and then takes a free slot of those two. There always is one: the two receive at most the
// entries of f and those astray of f + 1, each no more than one bucket held.
#pragma once

#include <cstdint>

#include "hash_table/table_view.h"

#ifdef TORCHREC_HKV_CUDA
#include <cuda_runtime.h>
#endif

namespace torchrec_hkv::hash_table {

// The new bucket of an entry of `bucket`, among twice as many.
HKV_HOST_DEVICE uint32_t split_target(const BucketChoice& doubled, uint32_t bucket) {
  if (doubled.first >> 1 == bucket) return doubled.first;
  if (doubled.second >> 1 == bucket) return doubled.second;
  return bucket << 1;  // astray
}

HKV_HOST_DEVICE bool is_astray(int64_t id, uint32_t bucket, uint32_t num_buckets) {
  const BucketChoice choice = choose_buckets(id, num_buckets);
  return bucket != choice.first && bucket != choice.second;
}

// One of several launches: buckets [begin, end) split together. None of their targets is a source.
struct SplitRange {
  uint32_t begin;
  uint32_t end;

  // The first range of a table, then the next one.
  static SplitRange first(uint32_t num_buckets) { return {(num_buckets + 1) / 2, num_buckets}; }
  SplitRange next() const { return begin == 1 ? SplitRange{0, 1} : first(begin); }
  bool is_last() const { return begin == 0; }
};

namespace cpu {

// Splits all buckets. `table` is the table before: `num_buckets` is half of the final number, and
// its arrays have room for all. The new half is overwritten.
void split_buckets(const TableView& table, int threads);

// The number of entries.
int64_t count_entries(const TableView& table, int threads);

}  // namespace cpu

#ifdef TORCHREC_HKV_CUDA
namespace cuda {

// Number of misplaced entries that are listed and moved at once.
constexpr int64_t kAstrayRoom = 4096;

// astray: scratch, [kAstrayRoom + 1]. Waits for the stream.
void split_buckets(const TableView& table, int64_t* astray, cudaStream_t stream);

// Adds the number of entries to *number.
void count_entries(const TableView& table, int64_t* number, cudaStream_t stream);

}  // namespace cuda
#endif

}  // namespace torchrec_hkv::hash_table
