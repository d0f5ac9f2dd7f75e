// Where a GPU's table under LRU, if it is large, does not grow and is the only one of its group,
// keeps ids and last steps: those of three slots of a bucket in one sector of 32 bytes, so that a
// find, its touch and a new entry take one access to memory.
//
// A bucket has sectors of its own; places past its slots hold kFreeStep, and never anything else.
// Of a sector's eight words the first three are last steps. Of an id it has what its digest does
// not tell of the hash, a bijection of ids: 32 bits in words 3 to 5, 16 in the bytes from 24 on. In
// the last two bytes a bit for each slot tells apart what digest_of gives the same digest: it is
// only looked at where the digest is one of these two, and may be anything elsewhere.
#pragma once

#include <cstdint>

#include "common/hashing.h"
#include "common/macros.h"

namespace torchrec_hkv::hash_table {

constexpr int kSectorSlots = 3;
constexpr int kSectorWords = 8;
constexpr int kSectorBytes = 32;
constexpr int kLowWord = kSectorSlots;       // of the first slot
constexpr int kHighHalf = 4 * kSectorSlots;  // number of its half word
constexpr int kFlagWord = kSectorWords - 1;  // whose upper half has the flags
constexpr int kFlagShift = 16;

// A bucket's sectors are in groups, of which a table knows how old their oldest entries are, so
// that the search for the oldest entry of a bucket need not read it all.
constexpr int kGroups = 4;
constexpr int kGroupSectors = 6;

constexpr int sectors_of_bucket(int bucket_slots) {
  return (bucket_slots + kSectorSlots - 1) / kSectorSlots;
}
static_assert(kGroups * kGroupSectors >= sectors_of_bucket(kBucketDigests));

// What is kept of an id beside its digest.
struct PackedId {
  uint32_t low;
  uint16_t high;
  bool flag;
};

HKV_HOST_DEVICE PackedId pack_hash(uint64_t hash) {
  const uint16_t raw = raw_digest(hash);
  return PackedId{static_cast<uint32_t>(hash >> 16), static_cast<uint16_t>(hash >> 48),
                  raw == kEmptyDigest || raw == kClosedDigest};
}
// Whether flags of ids with this digest tell them apart.
HKV_HOST_DEVICE bool is_flagged_digest(uint16_t digest) { return digest == 1 || digest == 0xFFFE; }

HKV_HOST_DEVICE uint64_t unpack_hash(const PackedId& id, uint16_t digest) {
  uint16_t raw = digest;
  if (is_flagged_digest(digest) && id.flag) raw = digest == 1 ? kEmptyDigest : kClosedDigest;
  const uint64_t above = static_cast<uint64_t>(id.high) << 48 | static_cast<uint64_t>(id.low) << 16;
  return above | static_cast<uint16_t>(raw ^ static_cast<uint16_t>(above >> 32));
}

// The sectors of a table, and how to find a slot's.
struct PackedEntries {
  uint32_t* words;      // [num_buckets][bucket_sectors][8]
  uint64_t reciprocal;  // 2^64 / bucket_slots, rounded up; of one slot 0
  int32_t bucket_sectors;
  int32_t bucket_words;  // of its sectors

  static PackedEntries make(uint32_t* words, int32_t bucket_slots) {
    const int32_t sectors = sectors_of_bucket(bucket_slots);
    return PackedEntries{words, UINT64_MAX / static_cast<uint64_t>(bucket_slots) + 1, sectors,
                         sectors * kSectorWords};
  }

  HKV_HOST_DEVICE uint32_t* sectors_of(int64_t bucket) const {
    return words + bucket * bucket_words;
  }
  // Exact of fewer than 2^57 slots.
  HKV_HOST_DEVICE int64_t bucket_of(int64_t slot) const {
#ifdef __CUDA_ARCH__
    return static_cast<int64_t>(__umul64hi(static_cast<uint64_t>(slot), reciprocal));
#else
    return static_cast<int64_t>(
        static_cast<unsigned __int128>(static_cast<uint64_t>(slot)) * reciprocal >> 64);
#endif
  }
};

}  // namespace torchrec_hkv::hash_table
