// Finds a slot for a new id on the GPU, without locks. One thread claims a free slot by
// compare-and-swap on its digest. A tile of lanes claims a victim's slot by compare-and-swap on its
// last step, which becomes the present step, so that the slot is no longer a victim. Free slots
// have the last step kFreeStep and are never victims. If data that was read is stale, the claim
// fails and the data is read again.
#pragma once

#include <cstdint>

#include "hash_table/cuda/bucket.cuh"
#include "hash_table/cuda/entry.cuh"

namespace torchrec_hkv::hash_table::cuda {

// kOutranked: the score of the id is too low. kAllPinned: all entries of its buckets are pinned.
enum ClaimOutcome : int { kPlaced, kReplaced, kOutranked, kAllPinned };

// A claimed slot. Its digest is written; the rest of the entry is not yet.
struct SlotClaim {
  ClaimOutcome outcome;
  int64_t slot;             // kNoSlot: kOutranked or kAllPinned
  uint64_t replaced_score;  // of the evicted entry
};

// The first read may use L1, because two vectors share a sector.
__device__ __forceinline__ uint4 load_digests(const void* from, bool from_l2) {
  if (!from_l2) return load_vector_cached(from);
  return load_vector_l2(from);
}

// Bit p: slot p of the bucket is free.
__device__ __forceinline__ uint64_t free_slots(const TableView& table, uint32_t bucket,
                                               bool from_l2) {
  const uint4* line = reinterpret_cast<const uint4*>(digest_line(table, bucket));
  uint64_t free = 0;
#pragma unroll 4
  for (int v = 0; v < kLineVectors; ++v) {
    free |= static_cast<uint64_t>(match_vector(load_digests(line + v, from_l2), kEmptyDigest))
            << (v * kVectorDigests);
  }
  return free;
}

// Claims one of the `free` slots of a bucket. Returns kNoSlot if other threads were faster.
__device__ __forceinline__ int64_t claim_free(const TableView& table, uint32_t bucket,
                                              uint64_t free, uint16_t digest) {
  const int position = __ffsll(static_cast<long long>(free)) - 1;
  // Two digests share a word. If the other one changes meanwhile, tries again.
  auto* word = reinterpret_cast<uint32_t*>(table.digests.get()) +
               (static_cast<int64_t>(bucket) * kBucketDigests + position) / 2;
  const int shift = position % 2 * 16;
  uint32_t old = load_l2(word);
  while ((old >> shift & 0xffffu) == kEmptyDigest) {
    const uint32_t seen = atomicCAS(word, old, old | static_cast<uint32_t>(digest) << shift);
    if (seen == old) return static_cast<int64_t>(bucket) * table.bucket_slots + position;
    old = seen;
  }
  return kNoSlot;
}

// Writes the id and its step right after a claim, because find_or_claim_first waits for them.
// kPacked, here and below: packed entries.
template <bool kPacked>
__device__ __forceinline__ void write_claimed(const TableView& table, uint32_t bucket, int64_t slot,
                                              int64_t id, uint32_t now) {
  if (kPacked) {
    const PackedEntry entry = entry_of(table, bucket, slot);
    write_packed_id(entry, hash_of_id(id));
    store_release(entry.step(), now);
  } else {
    table.ids[slot] = id;
    store_release(&table.last_steps[slot], now);
  }
}

// Claims a free slot in an id's buckets, and writes its id and last step. Returns kNoSlot if there
// is none. Called by one thread.
template <bool kPacked>
__device__ __forceinline__ int64_t claim_free_slot(const TableView& table,
                                                   const BucketChoice& choice, int64_t id,
                                                   uint32_t now) {
  for (bool from_l2 = false;; from_l2 = true) {
    uint32_t bucket = choice.first;
    uint64_t free = free_slots(table, choice.first, from_l2);
    const int number_first = __popcll(free);
    // If the first bucket has enough room, the second is not read.
    if (!prefers_first(table.bucket_slots, number_first, kBucketDigests)) {
      const uint64_t free_second = free_slots(table, choice.second, from_l2);
      if (!prefers_first(table.bucket_slots, number_first, __popcll(free_second))) {
        bucket = choice.second;
        free = free_second;
      }
    }
    // Data from L1 may be stale. Only reads from L2 decide that both buckets are full.
    if (free == 0 && from_l2) return kNoSlot;
    if (free == 0) continue;
    const int64_t slot = claim_free(table, bucket, free, choice.digest);
    if (slot == kNoSlot) continue;
    write_claimed<kPacked>(table, bucket, slot, id, now);
    return slot;
  }
}

struct FoundOrClaimed {
  int64_t slot;  // kNoSlot: the bucket is full and does not hold the id
  bool claimed;  // otherwise the id was found in the slot
};

// Finds an id in its first bucket, or claims a free slot there and writes its id and last step. All
// threads with the id call this: the first one claims, the others find. They need no other
// synchronisation, because each claims the lowest slot that it sees free, and no slot becomes free
// meanwhile. A thread claims a higher slot only after it has seen the lower one taken and has
// compared its id. Called by one thread.
template <bool kPacked>
__device__ __forceinline__ FoundOrClaimed find_or_claim_first(const TableView& table,
                                                              const BucketChoice& choice,
                                                              int64_t id, uint32_t now) {
  const uint4* line = reinterpret_cast<const uint4*>(digest_line(table, choice.first));
  const int64_t first = static_cast<int64_t>(choice.first) * table.bucket_slots;
  prefetch_l2(line, kBucketDigests * sizeof(uint16_t));  // its second half is read after the first
  for (bool from_l2 = false;; from_l2 = true) {
    uint64_t free = 0, same = 0;
#pragma unroll 4
    for (int v = 0; v < kLineVectors; ++v) {
      const uint4 digests = load_digests(line + v, from_l2);
      free |= static_cast<uint64_t>(match_vector(digests, kEmptyDigest)) << (v * kVectorDigests);
      same |= static_cast<uint64_t>(match_vector(digests, choice.digest)) << (v * kVectorDigests);
    }
    bool being_written = false;
    for (; same != 0; same &= same - 1) {
      const int64_t slot = first + __ffsll(static_cast<long long>(same)) - 1;
      const PackedEntry entry = kPacked ? entry_of(table, choice.first, slot) : PackedEntry{};
      if (load_acquire(kPacked ? entry.step() : &table.last_steps[slot]) == kFreeStep) {
        being_written = true;
      } else if (kPacked ? is_entry_of<true>(entry, hash_of_id(id))
                         : load_once(&table.ids[slot]) == id) {
        return FoundOrClaimed{slot, false};
      }
    }
    if (being_written) {
      __nanosleep(32);  // lets another lane of this warp run, which may be the writer
      continue;
    }
    if (free == 0 && from_l2) return FoundOrClaimed{kNoSlot, false};
    if (free == 0) continue;
    const int64_t slot = claim_free(table, choice.first, free, choice.digest);
    if (slot != kNoSlot) {
      write_claimed<kPacked>(table, choice.first, slot, id, now);
      return FoundOrClaimed{slot, true};
    }
  }
}

constexpr int kVictimLanes = 8;  // lanes of a tile that searches for a victim

struct Victim {
  int64_t slot;  // kNoSlot: no victim
  Rank rank;
};

// The lowest rank that a lane has read. Places 0 to 63 are in the first bucket, 64 to 127 in the
// second.
struct LowestRank {
  Rank rank{~0ull, kFreeStep};
  uint32_t place = 2 * kBucketDigests;

  __device__ __forceinline__ void consider(uint64_t score, uint32_t step, uint32_t at,
                                           uint32_t pinned_from,
                                           const Ranking& ranking = Ranking{false, 0}) {
    const Rank other{ranking.of(score, step), step};
    if (step < pinned_from && other < rank) {
      rank = other;
      place = at;
    }
  }
  __device__ __forceinline__ void consider(const TableView& table, int64_t slot, uint32_t step,
                                           uint32_t at, uint32_t pinned_from,
                                           const Ranking& ranking) {
    if (step >= pinned_from) return;
    consider(table.scores == nullptr ? step : load_score(table, slot), step, at, pinned_from,
             ranking);
  }
};

// Limits loaded counts as load_score does. Aging ranks counts from 2^52 on alike and needs no
// limit.
template <int kCount>
__device__ __forceinline__ void limit_counts(const TableView& table, ulonglong2 (&scores)[kCount]) {
  uint64_t any = 0;
#pragma unroll
  for (const ulonglong2& two : scores) any |= two.x | two.y;
  if (any <= kMaxCounts || table.eviction != Eviction::kLfu) return;
#pragma unroll
  for (ulonglong2& two : scores) {
    two.x = two.x > kMaxCounts ? kMaxCounts : two.x;
    two.y = two.y > kMaxCounts ? kMaxCounts : two.y;
  }
}

// The lowest rank that is not pinned in a lane's share of both buckets. lane: of the thread in its
// tile.
__device__ __forceinline__ LowestRank lowest_of_lane(const TableView& table,
                                                     const BucketChoice& choice,
                                                     uint32_t pinned_from, int lane) {
  LowestRank lowest;
  const Ranking ranking = table.ranking();
  const int64_t starts[2] = {static_cast<int64_t>(choice.first) * table.bucket_slots,
                             static_cast<int64_t>(choice.second) * table.bucket_slots};
  constexpr int kVectorsOfLane = kBucketDigests / 4 / kVictimLanes;
  if (table.bucket_slots == kBucketDigests && table.scores != nullptr) {
    // Scores of pinned entries are loaded too, so that scores and steps are loaded at once.
#pragma unroll
    for (int bucket = 0; bucket < 2; ++bucket) {
      uint4 steps[kVectorsOfLane];
      ulonglong2 scores[2 * kVectorsOfLane];
#pragma unroll
      for (int v = 0; v < kVectorsOfLane; ++v) {
        const int64_t slot = starts[bucket] + (v * kVictimLanes + lane) * 4;
        steps[v] = load_vector_l2(table.last_steps + slot);
        scores[2 * v] = load_pair_l2(table.scores + slot);
        scores[2 * v + 1] = load_pair_l2(table.scores + slot + 2);
      }
      limit_counts(table, scores);
#pragma unroll
      for (int v = 0; v < kVectorsOfLane; ++v) {
        const uint32_t at = bucket * kBucketDigests + (v * kVictimLanes + lane) * 4;
        lowest.consider(scores[2 * v].x, steps[v].x, at, pinned_from, ranking);
        lowest.consider(scores[2 * v].y, steps[v].y, at + 1, pinned_from, ranking);
        lowest.consider(scores[2 * v + 1].x, steps[v].z, at + 2, pinned_from, ranking);
        lowest.consider(scores[2 * v + 1].y, steps[v].w, at + 3, pinned_from, ranking);
      }
    }
  } else if (table.bucket_slots == kBucketDigests) {
    uint4 steps[2 * kVectorsOfLane];
#pragma unroll
    for (int v = 0; v < 2 * kVectorsOfLane; ++v) {
      const int first = (v % kVectorsOfLane * kVictimLanes + lane) * 4;
      steps[v] = load_vector_l2(table.last_steps + starts[v / kVectorsOfLane] + first);
    }
#pragma unroll
    for (int v = 0; v < 2 * kVectorsOfLane; ++v) {
      const int bucket = v / kVectorsOfLane;
      const uint32_t first = (v % kVectorsOfLane * kVictimLanes + lane) * 4;
      const uint32_t at = bucket * kBucketDigests + first;
      lowest.consider(steps[v].x, steps[v].x, at, pinned_from);
      lowest.consider(steps[v].y, steps[v].y, at + 1, pinned_from);
      lowest.consider(steps[v].z, steps[v].z, at + 2, pinned_from);
      lowest.consider(steps[v].w, steps[v].w, at + 3, pinned_from);
    }
  } else {
    for (int bucket = 0; bucket < 2; ++bucket) {
      for (int at = lane; at < table.bucket_slots; at += kVictimLanes) {
        const int64_t slot = starts[bucket] + at;
        lowest.consider(table, slot, load_l2(&table.last_steps[slot]), bucket * kBucketDigests + at,
                        pinned_from, ranking);
      }
    }
  }
  return lowest;
}

// Reduces the lowest ranks of lanes to the victim of their tile. Of equal ranks, the first bucket
// is preferred, where a find reads one line less. lanes: those of the tile, or of the warp if all
// its tiles call this together.
__device__ __forceinline__ Victim victim_of_tile(LowestRank lowest, const TableView& table,
                                                 const BucketChoice& choice, unsigned lanes) {
#pragma unroll
  for (int offset = kVictimLanes / 2; offset; offset /= 2) {
    const Rank other{__shfl_xor_sync(lanes, lowest.rank.score, offset),
                     __shfl_xor_sync(lanes, lowest.rank.last_step, offset)};
    const uint32_t place = __shfl_xor_sync(lanes, lowest.place, offset);
    if (other < lowest.rank || (!(lowest.rank < other) && place < lowest.place)) {
      lowest.rank = other;
      lowest.place = place;
    }
  }
  if (lowest.place >= 2 * kBucketDigests) return Victim{kNoSlot, lowest.rank};
  const int64_t bucket = lowest.place < kBucketDigests ? choice.first : choice.second;
  return Victim{bucket * table.bucket_slots + lowest.place % kBucketDigests, lowest.rank};
}

// The slot of the lowest rank in both buckets that is not pinned. Called by a tile.
__device__ __forceinline__ Victim lowest_rank(const TableView& table, const BucketChoice& choice,
                                              uint32_t pinned_from, unsigned tile, int lane) {
  return victim_of_tile(lowest_of_lane(table, choice, pinned_from, lane), table, choice, tile);
}

// The stored score of a claimed entry.
__device__ __forceinline__ uint64_t score_of_victim(const TableView& table, const Victim& victim) {
  return table.aged == nullptr ? victim.rank.score : load_score(table, victim.slot);
}

// Claims the slot of a victim for an id with this score whose buckets are full. refuse_lower: as in
// Placement. Returns false if another thread was faster. Called by one thread.
__device__ __forceinline__ bool claim_victim(const TableView& table, const BucketChoice& choice,
                                             uint64_t score, const CallContext& context,
                                             RefuseLower refuse_lower, const Victim& victim,
                                             SlotClaim* place) {
  if (victim.slot == kNoSlot) {
    *place = SlotClaim{kAllPinned, kNoSlot, 0};
    return true;
  }
  if (is_outranked(table, refuse_lower, score, context.now(), victim.rank.score)) {
    *place = SlotClaim{kOutranked, kNoSlot, 0};
    return true;
  }
  if (atomicCAS(&table.last_steps[victim.slot], victim.rank.last_step, context.now()) !=
      victim.rank.last_step) {
    return false;
  }
  const int64_t bucket = victim.slot / table.bucket_slots;
  store_l2(&table.digests[bucket * kBucketDigests + (victim.slot - bucket * table.bucket_slots)],
           choice.digest);
  *place = SlotClaim{kReplaced, victim.slot, score_of_victim(table, victim)};
  return true;
}

}  // namespace torchrec_hkv::hash_table::cuda
