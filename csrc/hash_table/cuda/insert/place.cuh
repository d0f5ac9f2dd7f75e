// Finding a place for a new id on the GPU, without locks: a free slot by one thread, the place of
// another entry by a tile of lanes. As each id is placed by itself, whoever claims a slot has it: a
// free slot by compare-and-swap on its digest, a victim's by compare-and-swap on its last step,
// which becomes the present one and so is no victim any more. Free slots hold the last step
// kFreeStep, which is no victim's either. What is read may be stale: it then fails to be claimed,
// and is read again.
#pragma once

#include <cstdint>

#include "hash_table/cuda/bucket.cuh"
#include "hash_table/cuda/entry.cuh"

namespace torchrec_hkv::hash_table::cuda {

// kOutranked: its score is too low. kNoRoom: all that stand there are pinned.
enum Fate : int { kPlaced, kReplaced, kOutranked, kNoRoom };

// A place that is claimed; the entry is still to be written, but for a new step.
struct Place {
  Fate fate;
  int64_t slot;             // kNoSlot: kOutranked or kNoRoom
  uint64_t replaced_score;  // of the entry that leaves
};

// A first look may come from L1, since two vectors share one of its sectors.
__device__ __forceinline__ uint4 look(const void* from, bool again) {
  if (!again) return load_vector_cached(from);
  return load_vector_l2(from);
}

// Bit p: slot p of the bucket is free.
__device__ __forceinline__ uint64_t free_slots(const TableView& table, uint32_t bucket,
                                               bool again) {
  const uint4* line = reinterpret_cast<const uint4*>(digest_line(table, bucket));
  uint64_t free = 0;
#pragma unroll 4
  for (int v = 0; v < kLineVectors; ++v) {
    free |= static_cast<uint64_t>(match_vector(look(line + v, again), kEmptyDigest))
            << (v * kVectorDigests);
  }
  return free;
}

constexpr uint32_t kNoPosition = ~0u;

// Claims a free slot, one of `free`, of a bucket, and returns its position there; kNoPosition where
// others were faster.
__device__ __forceinline__ uint32_t claim_free(const TableView& table, uint32_t bucket,
                                               uint64_t free, uint16_t digest) {
  const int position = __ffsll(static_cast<long long>(free)) - 1;
  // Two digests share a word; a neighbour that changes meanwhile is no reason to give up.
  auto* word = reinterpret_cast<uint32_t*>(table.digests) +
               (static_cast<int64_t>(bucket) * kBucketDigests + position) / 2;
  const int shift = position % 2 * 16;
  uint32_t old = load_l2(word);
  while ((old >> shift & 0xffffu) == kEmptyDigest) {
    const uint32_t seen = atomicCAS(word, old, old | static_cast<uint32_t>(digest) << shift);
    if (seen == old) return position;
    old = seen;
  }
  return kNoPosition;
}

// What joiners of its bucket wait for follows a claim at once.
__device__ __forceinline__ void write_claimed(const Entry& entry, uint64_t hash, uint32_t now) {
  write_id(entry, hash);
  store_release(entry.step(), now);
}

// Claims a free slot of an id's buckets, and writes its id and last step; kNoSlot where there is
// none. By one thread.
__device__ __forceinline__ int64_t claim_free_slot(const TableView& table,
                                                   const BucketChoice& choice, uint64_t hash,
                                                   uint32_t now) {
  for (bool again = false;; again = true) {
    uint32_t bucket = choice.first;
    uint64_t free = free_slots(table, choice.first, again);
    const int number_first = __popcll(free);
    // An id that has room enough in its first bucket need not look at the second.
    if (!prefers_first(table.bucket_slots, number_first, kBucketDigests)) {
      const uint64_t free_second = free_slots(table, choice.second, again);
      if (!prefers_first(table.bucket_slots, number_first, __popcll(free_second))) {
        bucket = choice.second;
        free = free_second;
      }
    }
    // What comes from L1 decides nothing by itself: before an id evicts another it has seen in L2
    // that both of its buckets are full.
    if (free == 0 && again) return kNoSlot;
    if (free == 0) continue;
    const uint32_t position = claim_free(table, bucket, free, choice.digest);
    if (position == kNoPosition) continue;
    write_claimed(entry_at(table, bucket, position), hash, now);
    return static_cast<int64_t>(bucket) * table.bucket_slots + position;
  }
}

struct Joined {
  int64_t slot;  // kNoSlot: the bucket is full, and the id not there
  bool claimed;  // whether it was claimed, and not found
};

// Finds an id in its first bucket or claims a free slot there and writes its id and last step, as
// all threads do that have the id: the first to come claims, the others find, without any other
// agreement. For all claim the lowest slot that they see free. Of two threads one would have to see
// the other's slot taken, and look at its id, to claim a higher one; and the lower one can't be
// claimed once it was seen taken, since no slot becomes free meanwhile. By one thread.
__device__ __forceinline__ Joined join_first_bucket(const TableView& table,
                                                    const BucketChoice& choice, uint64_t hash,
                                                    uint32_t now) {
  const uint4* line = reinterpret_cast<const uint4*>(digest_line(table, choice.first));
  const int64_t first = static_cast<int64_t>(choice.first) * table.bucket_slots;
  prefetch_l2(line, kBucketDigests * sizeof(uint16_t));  // half of it is read after the other
  for (bool again = false;; again = true) {
    uint64_t free = 0, same = 0;
#pragma unroll 4
    for (int v = 0; v < kLineVectors; ++v) {
      const uint4 digests = look(line + v, again);
      free |= static_cast<uint64_t>(match_vector(digests, kEmptyDigest)) << (v * kVectorDigests);
      same |= static_cast<uint64_t>(match_vector(digests, choice.digest)) << (v * kVectorDigests);
    }
    bool being_written = false;
    for (; same != 0; same &= same - 1) {
      const uint32_t position = __ffsll(static_cast<long long>(same)) - 1;
      const Entry entry = entry_at(table, choice.first, position);
      if (load_acquire(entry.step()) == kFreeStep) {
        being_written = true;
      } else if (is_entry_of<true>(entry, hash)) {
        return Joined{first + position, false};
      }
    }
    if (being_written) {
      __nanosleep(32);  // lets a lane of this warp go on that may be the one to write
      continue;
    }
    if (free == 0 && again) return Joined{kNoSlot, false};
    if (free == 0) continue;
    const uint32_t position = claim_free(table, choice.first, free, choice.digest);
    if (position != kNoPosition) {
      write_claimed(entry_at(table, choice.first, position), hash, now);
      return Joined{first + position, true};
    }
  }
}

constexpr int kVictimLanes = 8;  // a tile that looks for a victim

struct Victim {
  int64_t slot;  // kNoSlot: none
  Rank rank;
};

// The lowest last step that a lane has seen of what is not pinned, and its place: 0 to 63 in the
// first bucket, 64 to 127 in the second.
struct LowestStep {
  uint32_t step = kFreeStep;
  uint32_t place = 2 * kBucketDigests;

  __device__ __forceinline__ void look_at(uint32_t other, uint32_t at, uint32_t pinned_from) {
    if (other >= pinned_from || other > step || (other == step && at > place)) return;
    step = other;
    place = at;
  }
  // The lowest of a tile, among equals the first.
  __device__ __forceinline__ void reduce(unsigned tile) {
    const uint32_t least = __reduce_min_sync(tile, step);
    place = __reduce_min_sync(tile, step == least ? place : 2u * kBucketDigests);
    step = least;
  }
  __device__ __forceinline__ int64_t slot(const int64_t (&starts)[2]) const {
    if (place >= 2 * kBucketDigests) return kNoSlot;
    return starts[place / kBucketDigests] + place % kBucketDigests;
  }
};

// The lowest score in both buckets of an id, and which of the slots that a lane looks at have it.
// Of tables without scores nothing.
struct LowestScore {
  static constexpr int kSlots = kBucketDigests / kVictimLanes;  // that a lane looks at in a bucket
  static_assert(2 * kSlots <= 32);
  uint64_t score = ~0ull;
  uint32_t slots = 0;  // bit b * kSlots + v: slot v of bucket b

  __device__ __forceinline__ LowestScore() {}
  // Above `floor`, where there is one. By a tile.
  __device__ __forceinline__ LowestScore(const TableView& table, const BucketChoice& choice,
                                         unsigned tile, int lane, const uint64_t* floor = nullptr) {
    if (table.scores == nullptr) return;
#pragma unroll
    for (int b = 0; b < 2; ++b) {
      const int64_t start =
          static_cast<int64_t>(b == 0 ? choice.first : choice.second) * table.bucket_slots;
      uint64_t scores[kSlots];
#pragma unroll
      for (int v = 0; v < kSlots; v += 2) {
        const int at = position(v, lane);
        if (table.bucket_slots == kBucketDigests) {
          const ulonglong2 two = load_pair_l2(table.scores + start + at);
          scores[v] = two.x;
          scores[v + 1] = two.y;
        } else {
          scores[v] = at < table.bucket_slots ? load_score(table, start + at) : 0;
          scores[v + 1] = at + 1 < table.bucket_slots ? load_score(table, start + at + 1) : 0;
        }
      }
#pragma unroll
      for (int v = 0; v < kSlots; ++v) {
        if (position(v, lane) >= table.bucket_slots) continue;
        if (floor != nullptr && scores[v] <= *floor) continue;
        if (slots == 0 || scores[v] < score) {
          score = scores[v];
          slots = 0;
        }
        if (scores[v] == score) slots |= 1u << (b * kSlots + v);
      }
    }
    uint64_t least = score;
#pragma unroll
    for (int offset = kVictimLanes / 2; offset; offset /= 2) {
      least = min(least, __shfl_xor_sync(tile, least, offset));
    }
    if (score != least) slots = 0;
    score = least;
  }

  // Position in its bucket of a lane's slot: two neighbours share a load.
  __device__ __forceinline__ static int position(int v, int lane) {
    return (v / 2 * kVictimLanes + lane) * 2 + v % 2;
  }
  // The last step of a lane's slot with this bit, and its place: 0 to 63 in the first bucket, 64 to
  // 127 in the second.
  __device__ __forceinline__ static uint32_t* step_at(const TableView& table,
                                                      const BucketChoice& choice, int bit, int lane,
                                                      uint32_t* place) {
    const int b = bit / kSlots;
    const int at = position(bit % kSlots, lane);
    *place = b * kBucketDigests + at;
    return entry_at(table, b == 0 ? choice.first : choice.second, at).step();
  }
  // Has the last steps of its slots brought near.
  __device__ __forceinline__ void prefetch_steps(const TableView& table, const BucketChoice& choice,
                                                 int lane) const {
    for (uint32_t left = slots; left != 0; left &= left - 1) {
      uint32_t place;
      prefetch_l2(step_at(table, choice, __ffs(static_cast<int>(left)) - 1, lane, &place));
    }
  }
  // The lowest last step of its slots that is not pinned. By a tile.
  __device__ __forceinline__ LowestStep lowest_step(const TableView& table,
                                                    const BucketChoice& choice,
                                                    uint32_t pinned_from, unsigned tile,
                                                    int lane) const {
    LowestStep lowest;
    constexpr int kAtOnce = 4;
    for (uint32_t left = slots; left != 0;) {
      uint32_t steps[kAtOnce], places[kAtOnce];
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {
        steps[k] = kFreeStep;
        places[k] = 0;
        if (left == 0) continue;
        steps[k] =
            load_l2(step_at(table, choice, __ffs(static_cast<int>(left)) - 1, lane, &places[k]));
        left &= left - 1;
      }
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {
        if (steps[k] != kFreeStep) lowest.look_at(steps[k], places[k], pinned_from);
      }
    }
    __syncwarp(tile);
    lowest.reduce(tile);
    return lowest;
  }
};

// The slot of the lowest rank in both buckets that is not pinned. Among equals one of the first
// bucket, where finds see it with one line less. By a tile; `lane` is the thread's in it. scores:
// the lowest of before, which may only have come to be pinned since.
__device__ __forceinline__ Victim lowest_rank(const TableView& table, const BucketChoice& choice,
                                              uint32_t pinned_from, LowestScore scores,
                                              unsigned tile, int lane) {
  const int64_t starts[2] = {static_cast<int64_t>(choice.first) * table.bucket_slots,
                             static_cast<int64_t>(choice.second) * table.bucket_slots};
  if (table.scores == nullptr) {
    LowestStep lowest;
#pragma unroll
    for (int b = 0; b < 2; ++b) {
      const uint32_t* const sectors =
          table.entries.sectors_of(b == 0 ? choice.first : choice.second);
      for (int s = lane; s < table.entries.bucket_sectors; s += kVictimLanes) {
        const uint4 steps = load_vector_l2(sectors + s * kSectorWords);
        const uint32_t at = b * kBucketDigests + s * kSectorSlots;
        lowest.look_at(steps.x, at, pinned_from);
        lowest.look_at(steps.y, at + 1, pinned_from);
        lowest.look_at(steps.z, at + 2, pinned_from);
      }
    }
    lowest.reduce(tile);
    return Victim{lowest.slot(starts), Rank{lowest.step, lowest.step}};
  }
  // If all that has the lowest score is pinned, the next score is the lowest.
  for (;;) {
    if (!__any_sync(tile, scores.slots != 0)) return Victim{kNoSlot, Rank{~0ull, kFreeStep}};
    const LowestStep lowest = scores.lowest_step(table, choice, pinned_from, tile, lane);
    const int64_t slot = lowest.slot(starts);
    if (slot != kNoSlot) return Victim{slot, Rank{scores.score, lowest.step}};
    const uint64_t floor = scores.score;
    scores = LowestScore(table, choice, tile, lane, &floor);
  }
}

// Claims the place of another entry for an id of this score whose buckets are full. By a tile,
// whose lanes all get the answer; `refuse_lower` as in Placement, `lowest` as in lowest_rank.
__device__ __forceinline__ Place claim_victim(const TableView& table, const BucketChoice& choice,
                                              uint64_t score, const Visit& visit, bool refuse_lower,
                                              LowestScore lowest, unsigned tile, int lane) {
  for (;;) {
    const Victim victim = lowest_rank(table, choice, visit.pinned_from(), lowest, tile, lane);
    if (victim.slot == kNoSlot) return Place{kNoRoom, kNoSlot, 0};
    if (refuse_lower && score < victim.rank.score) return Place{kOutranked, kNoSlot, 0};
    bool claimed = false;
    if (lane == 0) {
      claimed = atomicCAS(step_of(table, victim.slot), victim.rank.last_step, visit.now()) ==
                victim.rank.last_step;
    }
    if (__ballot_sync(tile, claimed) != 0) {
      return Place{kReplaced, victim.slot, victim.rank.score};
    }
  }
}

}  // namespace torchrec_hkv::hash_table::cuda
