// The packed ids and last steps of a GPU table under LRU that is large, does not grow and is the
// only one of its group. Three slots of a bucket share a sector of 32 bytes, so that a find, its
// touch and a new entry take one memory access.
//
// A bucket has its own sectors; places beyond its slots always hold kFreeStep. The first three of a
// sector's eight words are last steps. The hash is a bijection of ids; the sector stores the part
// of it that the digest lacks: 32 bits in words 3 to 5, 16 bits in the bytes from 24 on. The last
// two bytes have a bit for each slot that distinguishes hashes with the same digest_of. Only two
// digests need it; for others it is not read and may have any value.
#pragma once

#include <cstdint>

#include "common/global_pointer.h"
#include "common/hashing.h"
#include "common/macros.h"

namespace torchrec_hkv::hash_table {

constexpr int kSectorSlots = 3;
constexpr int kSectorWords = 8;
constexpr int kSectorBytes = 32;
constexpr int kLowWord = kSectorSlots;       // of the first slot
constexpr int kHighHalf = 4 * kSectorSlots;  // index of its half word
constexpr int kFlagWord = kSectorWords - 1;  // its upper half holds the flags
constexpr int kFlagShift = 16;

// A bucket's sectors are in groups. A table stores a lower bound of each group's last steps, so
// that the search for a bucket's oldest entry need not read all sectors.
constexpr int kGroups = 4;
constexpr int kGroupSectors = 6;

constexpr int sectors_of_bucket(int bucket_slots) {
  return (bucket_slots + kSectorSlots - 1) / kSectorSlots;
}
static_assert(kGroups * kGroupSectors >= sectors_of_bucket(kBucketDigests));

// The stored part of an id besides its digest.
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
// Whether the flag distinguishes ids with this digest.
HKV_HOST_DEVICE bool is_flagged_digest(uint16_t digest) { return digest == 1 || digest == 0xFFFE; }

HKV_HOST_DEVICE uint64_t unpack_hash(const PackedId& id, uint16_t digest) {
  uint16_t raw = digest;
  if (is_flagged_digest(digest) && id.flag) raw = digest == 1 ? kEmptyDigest : kClosedDigest;
  const uint64_t above = static_cast<uint64_t>(id.high) << 48 | static_cast<uint64_t>(id.low) << 16;
  return above | static_cast<uint16_t>(raw ^ static_cast<uint16_t>(above >> 32));
}

// The sectors of a table, and the position of a slot in them.
struct PackedEntries {
  GlobalPointer<uint32_t> words;  // [num_buckets][bucket_sectors][8]
  uint64_t reciprocal;            // 2^64 / bucket_slots, rounded up; 0 for one slot
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
  // Exact for fewer than 2^57 slots.
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
