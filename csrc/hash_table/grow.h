// Growth of a table: its buckets split in two, in place. Both devices implement it.
//
// An id's two buckets are its two hashes scaled by the number of buckets. With twice as many
// buckets, the entries of bucket b go to 2 b or 2 b + 1 and keep their positions. Entries only move
// upwards. First the upper half of the buckets moves to where nothing is stored, then the upper
// half of the rest, whose targets are free by then, and so on; bucket 0 is last and gives bucket 1
// its entries. So there is never a second copy of a row.
//
// One kind of entry is misplaced after that. If both hashes of an id give one bucket
// f, its second bucket is f + 1. Doubling may separate the hashes, so that the id belongs to 2 f
// and 2 f + 1. An entry of f + 1 then waits at its position in 2 f + 2 until all buckets are split,
// and takes a free slot of those two. There always is one: the two receive at most the entries of f
// and the misplaced ones of f + 1, each no more than one bucket held.
//
// On a CPU a table may be in use while some buckets are yet to be split. The last ones are split
// first: buckets 0 to unsplit - 1 of the old number are yet to be split, buckets 2 * unsplit and up
// of the new number have been split, and those in between are empty. An id's hashes are scaled by
// the new number; half of that is its bucket while this is yet to be split. Ids that are misplaced
// are then moved as soon as their bucket has been split.
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
  return bucket << 1;  // misplaced
}

HKV_HOST_DEVICE bool is_misplaced(int64_t id, uint32_t bucket, uint32_t num_buckets) {
  const BucketChoice choice = choose_buckets(id, num_buckets);
  return bucket != choice.first && bucket != choice.second;
}

// Buckets [begin, end), which one launch splits. None of their targets is a source, but bucket 0 is
// its own.
struct SplitRange {
  uint32_t begin;
  uint32_t end;

  // The first range of a table, then the next one.
  static SplitRange first(uint32_t num_buckets) { return {(num_buckets + 1) / 2, num_buckets}; }
  SplitRange next() const { return begin == 1 ? SplitRange{0, 1} : first(begin); }
  bool is_last() const { return begin == 0; }
};

// The buckets of an id in a table of which TableView::unsplit buckets are yet to be split.
HKV_HOST_DEVICE BucketChoice choose_while_split(int64_t id, uint32_t num_buckets,
                                                uint32_t unsplit) {
  const uint64_t hash = hash_of_id(id);
  const auto bucket_of = [&](uint64_t half) {
    const auto bucket = static_cast<uint32_t>((half * num_buckets) >> 32);
    return bucket < 2 * unsplit ? bucket / 2 : bucket;
  };
  BucketChoice choice;
  choice.first = bucket_of(hash >> 32);
  choice.second = bucket_of(hash & 0xffffffffull);
  if (choice.second == choice.first) {
    choice.second = choice.first + 1 == unsplit ? 2 * unsplit : choice.first + 1;
    if (choice.second == num_buckets) choice.second = 0;
  }
  choice.digest = digest_of(raw_digest(hash));
  return choice;
}

namespace cpu {

// Makes buckets [begin, end) empty.
void empty_buckets(const TableView& table, int64_t begin, int64_t end, int threads);

// Splits buckets [unsplit, table.unsplit). `table` is the view before; the buckets in between must
// be empty.
void split_buckets(const TableView& table, uint32_t unsplit, int threads);

// The number of entries.
int64_t count_entries(const TableView& table, int threads);

}  // namespace cpu

#ifdef TORCHREC_HKV_CUDA
namespace cuda {

// Number of misplaced entries that are listed and moved at once.
constexpr int64_t kMisplacedCapacity = 4096;

// misplaced: scratch, [kMisplacedCapacity + 1]. Waits for the stream.
void split_buckets(const TableView& table, int64_t* misplaced, cudaStream_t stream);

// Adds the number of entries to *number.
void count_entries(const TableView& table, int64_t* number, cudaStream_t stream);

}  // namespace cuda
#endif

}  // namespace torchrec_hkv::hash_table
