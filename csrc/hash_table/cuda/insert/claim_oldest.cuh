// Claims the slot of the oldest entry in two buckets of a packed table (packed_entries.h), whose
// scores are last steps.
#pragma once

#include <cstdint>

#include "hash_table/cuda/bucket.cuh"
#include "hash_table/cuda/entry.cuh"
#include "hash_table/cuda/insert/place.cuh"

namespace torchrec_hkv::hash_table::cuda {

// The two lowest last steps of a group of slots, and the position of the lowest; the first of equal
// ones.
struct Oldest {
  uint32_t step = kFreeStep;
  uint32_t next = kFreeStep;
  uint32_t position = 0;

  __device__ __forceinline__ void consider(uint32_t other, uint32_t at) {
    next = min(next, max(step, other));
    if (other < step) position = at;
    step = min(step, other);
  }
};

__device__ __forceinline__ Oldest oldest_of(const uint32_t* sectors, int number) {
  uint4 steps[kGroupSectors];
#pragma unroll
  for (int k = 0; k < kGroupSectors; ++k) {
    steps[k] = uint4{kFreeStep, kFreeStep, kFreeStep, 0};
    if (k < number) steps[k] = load_vector_l2(sectors + k * kSectorWords);
  }
  Oldest oldest;
#pragma unroll
  for (int k = 0; k < kGroupSectors; ++k) {
    oldest.consider(steps[k].x, k * kSectorSlots);
    oldest.consider(steps[k].y, k * kSectorSlots + 1);
    oldest.consider(steps[k].z, k * kSectorSlots + 2);
  }
  return oldest;
}

// Claims the slot of the oldest entry in both buckets. Usually reads only the group of slots with
// the lowest bound: if no other bound is lower than this group's oldest entry, that is the oldest
// of all. Bounds stay valid because last steps only grow. Bounds that are too low are raised here.
// Called by one thread.
__device__ __forceinline__ SlotClaim claim_oldest_packed(const TableView& table,
                                                         const BucketChoice& choice, uint32_t now,
                                                         uint32_t pinned_from) {
  for (;;) {
    uint32_t bounds[2 * kGroups];
#pragma unroll
    for (int b = 0; b < 2; ++b) {
      const uint4 of_bucket = load_vector_l2(
          table.oldest + static_cast<int64_t>(b == 0 ? choice.first : choice.second) * kGroups);
      bounds[b * kGroups] = of_bucket.x;
      bounds[b * kGroups + 1] = of_bucket.y;
      bounds[b * kGroups + 2] = of_bucket.z;
      bounds[b * kGroups + 3] = of_bucket.w;
    }
    int group = 0;
    uint32_t least = bounds[0];
#pragma unroll
    for (int g = 1; g < 2 * kGroups; ++g) {
      if (bounds[g] < least) group = g;
      least = min(least, bounds[g]);
    }
    const uint32_t bucket = group < kGroups ? choice.first : choice.second;
    const int first_sector = group % kGroups * kGroupSectors;
    const Oldest oldest = oldest_of(table.entries.sectors_of(bucket) + first_sector * kSectorWords,
                                    table.entries.bucket_sectors - first_sector);
    // Of equally old entries, takes the first one, in the first bucket if possible.
    const bool pinned = oldest.step >= pinned_from;
    bool decided = true;
#pragma unroll
    for (int g = 0; g < 2 * kGroups; ++g) {
      const uint32_t below = pinned ? pinned_from : oldest.step + (g < group ? 1 : 0);
      decided &= g == group || bounds[g] >= below;
    }
    uint32_t* const bound = table.oldest + static_cast<int64_t>(bucket) * kGroups + group % kGroups;
    if (!decided || pinned) {
      atomicMax(bound, min(oldest.step, now));
      if (decided) return SlotClaim{kAllPinned, kNoSlot, 0};
      continue;
    }
    const uint32_t position = first_sector * kSectorSlots + oldest.position;
    if (atomicCAS(entry_at(table, bucket, position).step(), oldest.step, now) == oldest.step) {
      atomicMax(bound, min(oldest.next, now));
      return SlotClaim{kReplaced, static_cast<int64_t>(bucket) * table.bucket_slots + position,
                       oldest.step};
    }
  }
}

// As lowest_rank, for packed tables, without the bounds of groups.
__device__ __forceinline__ Victim oldest_packed(const TableView& table, const BucketChoice& choice,
                                                uint32_t pinned_from, unsigned tile, int lane) {
  uint32_t step = kFreeStep, place = 2 * kBucketDigests;
  for (uint32_t b = 0; b < 2; ++b) {
    const int64_t bucket = b == 0 ? choice.first : choice.second;
    for (int p = lane; p < table.bucket_slots; p += kVictimLanes) {
      const uint32_t other = load_l2(entry_at(table, bucket, p).step());
      if (other >= pinned_from || other >= step) continue;
      step = other;
      place = b * kBucketDigests + p;
    }
  }
  const uint32_t least = __reduce_min_sync(tile, step);
  place = __reduce_min_sync(tile, step == least ? place : 2u * kBucketDigests);
  if (place >= 2 * kBucketDigests) return Victim{kNoSlot, Rank{least, least}};
  const int64_t bucket = place < kBucketDigests ? choice.first : choice.second;
  return Victim{bucket * table.bucket_slots + place % kBucketDigests, Rank{least, least}};
}

}  // namespace torchrec_hkv::hash_table::cuda
