// Hashing of ids: the buckets of an id in a table, and the rank that owns it.
//
// Both devices and all ranks must agree on these functions, and checkpoints depend on them. A
// change is a change of the file format.
#pragma once

#include <cstdint>

#include "common/macros.h"

namespace torchrec_hkv {

// SplitMix64's finaliser (Steele, Lea, Flood 2014; constants by Stafford): a bijection of 64 bits.
HKV_HOST_DEVICE uint64_t mix64(uint64_t x) {
  x ^= x >> 30;
  x *= 0xbf58476d1ce4e5b9ull;
  x ^= x >> 27;
  x *= 0x94d049bb133111ebull;
  return x ^ (x >> 31);
}

// The inverse of mix64. Each constant is the inverse of mix64's constant modulo 2^64.
HKV_HOST_DEVICE uint64_t unmix64(uint64_t x) {
  x ^= x >> 31 ^ x >> 62;
  x *= 0x319642b2d24d8ec3ull;
  x ^= x >> 27 ^ x >> 54;
  x *= 0x96de1b173f119089ull;
  return x ^ x >> 30 ^ x >> 60;
}

// Each slot of a bucket has a digest. A bucket's 64 digests fill one 128-byte line.
constexpr int kBucketDigests = 64;
constexpr uint16_t kEmptyDigest = 0;        // the slot is free
constexpr uint16_t kClosedDigest = 0xFFFF;  // beyond the bucket's capacity: never used

// The two buckets that may hold an id, and its digest, which is neither empty nor closed.
struct BucketChoice {
  uint32_t first;
  uint32_t second;
  uint16_t digest;
};

constexpr uint64_t kTableSeed = 0x6a09e667f3bcc909ull;

// The hash of an id in a table. It is a bijection.
HKV_HOST_DEVICE uint64_t hash_of_id(int64_t id) {
  return mix64(static_cast<uint64_t>(id) ^ kTableSeed);
}
HKV_HOST_DEVICE int64_t id_of_hash(uint64_t hash) {
  return static_cast<int64_t>(unmix64(hash) ^ kTableSeed);
}

// The digest before the two reserved values are replaced by other values.
HKV_HOST_DEVICE uint16_t raw_digest(uint64_t hash) {
  return static_cast<uint16_t>(hash ^ (hash >> 32));
}
HKV_HOST_DEVICE uint16_t digest_of(uint16_t raw) {
  return raw == kEmptyDigest ? 1 : raw == kClosedDigest ? 0xFFFE : raw;
}

HKV_HOST_DEVICE BucketChoice choose_buckets_of_hash(uint64_t hash, uint32_t num_buckets) {
  BucketChoice choice;
  choice.first = static_cast<uint32_t>(((hash >> 32) * num_buckets) >> 32);
  choice.second = static_cast<uint32_t>(((hash & 0xffffffffull) * num_buckets) >> 32);
  if (choice.second == choice.first && num_buckets > 1) {
    choice.second = choice.first + 1 == num_buckets ? 0 : choice.first + 1;
  }
  choice.digest = digest_of(raw_digest(hash));
  return choice;
}

HKV_HOST_DEVICE BucketChoice choose_buckets(int64_t id, uint32_t num_buckets) {
  return choose_buckets_of_hash(hash_of_id(id), num_buckets);
}

// An id belongs to one of 2^16 owner buckets; each rank owns a contiguous range of them. The mix
// differs from that of choose_buckets, so that the ids of a rank still spread over all buckets of
// its table.
constexpr int kOwnerBucketBits = 16;

HKV_HOST_DEVICE uint32_t owner_bucket(int64_t id) {
  return static_cast<uint32_t>(mix64(static_cast<uint64_t>(id) + 0x9e3779b97f4a7c15ull) >>
                               (64 - kOwnerBucketBits));
}

HKV_HOST_DEVICE int32_t owner_rank(int64_t id, int32_t world_size) {
  return static_cast<int32_t>((owner_bucket(id) * static_cast<uint64_t>(world_size)) >>
                              kOwnerBucketBits);
}

}  // namespace torchrec_hkv
