// Updates the scores of found ids. Many positions of a batch may have the same id, so scores are
// combined first: the lanes of a warp, or the threads of a block, with the same slot sum their
// scores, and one of them updates memory. A hot id then costs one atomic operation for each block
// or warp, not for each position.
//
// Counts are exact under LFU and epoch LFU, and equal to those of a CPU: sums saturate, so the
// order of the additions does not matter. Under LFU a lookup without a given count adds without a
// test, so that no thread waits for the old count. A stored count can then be above kMaxCounts,
// and counts as kMaxCounts. Under "customized", the score of any of the positions is stored; in
// deterministic mode keep_last_scores then stores the last one of the batch.
#pragma once

#include <cstdint>

#include "common/scores.h"
#include "hash_table/cuda/bucket.cuh"
#include "hash_table/table_view.h"

namespace torchrec_hkv::hash_table::cuda {

// Both are at most kMaxCounts.
__device__ __forceinline__ uint64_t add_counts(uint64_t a, uint64_t b) {
  return a + b > kMaxCounts ? kMaxCounts : a + b;
}

__device__ __forceinline__ uint64_t load_score(const TableView& table, int64_t slot) {
  const uint64_t score = load_l2(reinterpret_cast<unsigned long long*>(&table.scores[slot]));
  return counts_lookups(table.eviction) && score > kMaxCounts ? kMaxCounts : score;
}

// Adds to a count of 63 bits that saturates. The addition comes first, so that nothing waits for a
// read; the thread whose addition passes the highest count takes the excess back. Less than 2^31
// threads add less than 2^32 each, so that an excess fits the highest bit.
__device__ __forceinline__ void add_to_count(unsigned long long* score, uint64_t given) {
  constexpr uint64_t kSmall = uint64_t{1} << 32;
  if (given < kSmall) {
    const unsigned long long old = atomicAdd(score, static_cast<unsigned long long>(given));
    if (old + given > kMaxCounts) atomicMin(score, static_cast<unsigned long long>(kMaxCounts));
    return;
  }
  unsigned long long old = load_l2(score);
  for (;;) {
    const unsigned long long next = next_score(Eviction::kLfu, old, 0, 0, given);
    if (next == old) return;
    const unsigned long long seen = atomicCAS(score, old, next);
    if (seen == old) return;
    old = seen;
  }
}

// Adds to a count without a test and without waiting for it.
__device__ __forceinline__ void add_untested(unsigned long long* score, uint64_t given) {
  asm volatile("red.relaxed.gpu.global.add.u64 [%0], %1;" ::"l"(score), "l"(given) : "memory");
}

// As add_to_count, for a count of 32 bits below an epoch. An addition that passes the highest count
// carries into the epoch for a while, and its thread then stores both; it does so after all
// additions that have found the count lower, so that the count stays at the highest. A thread that
// finds another epoch corrects it and leaves the count as it is.
__device__ __forceinline__ void add_to_count_of_epoch(unsigned long long* score, uint32_t epoch,
                                                      uint64_t given) {
  constexpr uint64_t kLow = 0xffffffffull;
  const uint64_t high = static_cast<uint64_t>(epoch) << 32;
  given = given < kLow ? given : kLow;
  const unsigned long long old = atomicAdd(score, static_cast<unsigned long long>(given));
  const bool saturated = (old & kLow) + given > kLow;
  if (!saturated && old >> 32 == epoch) return;
  unsigned long long present = old + given;
  for (;;) {
    const unsigned long long wanted = high | (saturated ? kLow : present & kLow);
    if (present == wanted) return;
    const unsigned long long seen = atomicCAS(score, present, wanted);
    if (seen == present) return;
    present = seen;
  }
}

// Updates the score of a slot for several lookups of one call. given: under frequency policies the
// sum of their scores, otherwise the score of one of them. epoch: that of the call.
__device__ __forceinline__ void update_score(const TableView& table, int64_t slot,
                                             const CallContext& context, uint64_t given,
                                             uint32_t epoch) {
  auto* const score = reinterpret_cast<unsigned long long*>(&table.scores[slot]);
  switch (table.eviction) {
    case Eviction::kLfu:
    case Eviction::kAgedLfu:
      if (context.scores == nullptr) {
        add_untested(score, given);
      } else {
        add_to_count(score, given);
      }
      break;
    case Eviction::kEpochLfu:
      add_to_count_of_epoch(score, epoch, given);
      break;
    default:
      // An exchange, because a write of a part of a sector is slower if ids are spread.
      atomicExch(score, static_cast<unsigned long long>(
                            first_score(table.eviction, context.now(), epoch, given)));
  }
}

// The saturated sum over the lanes in `peers`, all of which call it.
__device__ __forceinline__ uint64_t sum_of_peers(unsigned peers, uint64_t given, bool all_ones) {
  if (all_ones) return static_cast<uint64_t>(__popc(peers));
  uint64_t sum = 0;
  for (unsigned remaining = peers; remaining; remaining &= remaining - 1) {
    sum = add_counts(sum, __shfl_sync(peers, given, __ffs(static_cast<int>(remaining)) - 1));
  }
  return sum;
}

// Updates scores of one table for the calling lanes of a warp, once for each distinct slot. peers:
// the lanes with the slot of this lane.
__device__ __forceinline__ void update_score_of_lanes(const TableView& table, int64_t slot,
                                                      unsigned peers, const CallContext& context,
                                                      uint64_t given) {
  if (sums_scores(table.eviction)) {
    given = sum_of_peers(peers, given, context.scores == nullptr);
  }
  if ((peers & ((1u << threadIdx.x % kWarp) - 1)) != 0) return;
  update_score(table, slot, context, given, context.epoch());
}

}  // namespace torchrec_hkv::hash_table::cuda
