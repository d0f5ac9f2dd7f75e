// The number of buckets for a capacity, and the bytes of a table.
#pragma once

#include <cstdint>

#include "common/hashing.h"
#include "hash_table/packed_entries.h"

namespace torchrec_hkv::hash_table {

struct Geometry {
  int64_t num_buckets;   // at the full capacity
  int32_t bucket_slots;  // slots of a bucket, at most the 64 of its line of digests
  int32_t doublings;     // from the initial number of buckets

  int64_t num_slots() const { return num_buckets * bucket_slots; }
  int64_t initial_buckets() const { return num_buckets >> doublings; }
};

// The fewest buckets that hold the capacity, evenly filled. This adds less than one slot a bucket.
// A table that starts smaller doubles its buckets until it has all of them. Their number is then
// rounded up to a multiple of that power of two, by a sixteenth at most, because smaller buckets
// fill earlier. The table starts with the smallest such fraction that holds the initial capacity.
inline Geometry geometry_of(int64_t capacity, int64_t initial_capacity) {
  const auto divide_up = [](int64_t a, int64_t b) { return (a + b - 1) / b; };
  const int64_t least = divide_up(capacity, kBucketDigests);
  int32_t doublings = 0;
  while (least >> (doublings + 1) != 0) ++doublings;
  for (;; --doublings) {
    const int64_t share = divide_up(least, int64_t{1} << doublings);
    const int64_t buckets = share << doublings;
    const auto slots = static_cast<int32_t>(divide_up(capacity, buckets));
    const bool fits = buckets - least <= least / 16 && share * slots >= initial_capacity;
    if (doublings == 0 || fits) {
      return Geometry{buckets, slots, doublings};
    }
  }
}

// Bytes of digests, ids, steps and, if the policy needs them, scores. packed: see packed_entries.h.
inline int64_t index_bytes(const Geometry& geometry, bool scores, bool packed) {
  if (packed) {
    const int64_t bucket = kBucketDigests * sizeof(uint16_t) +
                           sectors_of_bucket(geometry.bucket_slots) * kSectorBytes +
                           kGroups * sizeof(uint32_t);
    return geometry.num_buckets * bucket;
  }
  const int64_t slot = sizeof(int64_t) + sizeof(uint32_t) + (scores ? sizeof(uint64_t) : 0);
  return geometry.num_buckets * kBucketDigests * 2 + geometry.num_slots() * slot;
}

}  // namespace torchrec_hkv::hash_table
