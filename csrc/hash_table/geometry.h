// How a capacity becomes buckets, and what a table takes.
#pragma once

#include <cstdint>

#include "common/hashing.h"

namespace torchrec_hkv::hash_table {

struct Geometry {
  int64_t num_buckets;
  int32_t bucket_slots;  // of the 64 that a bucket's line of digests has room for

  int64_t num_slots() const { return num_buckets * bucket_slots; }
};

// As few buckets as hold the capacity, evenly filled: less than one slot a bucket is added to it.
inline Geometry geometry_of(int64_t capacity) {
  Geometry geometry;
  geometry.num_buckets = (capacity + kBucketDigests - 1) / kBucketDigests;
  geometry.bucket_slots =
      static_cast<int32_t>((capacity + geometry.num_buckets - 1) / geometry.num_buckets);
  return geometry;
}

// Bytes of digests, ids, steps and, where the policy keeps them, scores.
inline int64_t index_bytes(const Geometry& geometry, bool scores) {
  const int64_t slot = sizeof(int64_t) + sizeof(uint32_t) + (scores ? sizeof(uint64_t) : 0);
  return geometry.num_buckets * kBucketDigests * 2 + geometry.num_slots() * slot;
}

}  // namespace torchrec_hkv::hash_table
