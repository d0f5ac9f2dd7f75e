// Scores of ids that are looked up again. Many positions of a batch may have one id, so scores are
// combined before memory is touched: the lanes of a warp, or the threads of a block, that have one
// slot add up what they bring, and one of them updates the score. A hot id then costs a block one
// atomic operation instead of one for each position.
//
// Counts stay exact under LFU and epoch LFU: sums saturate, so the order of the additions does not
// matter. Where a policy takes scores as they are given, any of the positions' scores is stored
// here; in deterministic mode keep_last_scores stores the last one of the batch afterwards.
#pragma once

#include <cstdint>

#include "common/scores.h"
#include "hash_table/cuda/bucket.cuh"
#include "hash_table/table_view.h"

namespace torchrec_hkv::hash_table::cuda {

// Both are at most kMostCounts.
__device__ __forceinline__ uint64_t add_counts(uint64_t a, uint64_t b) {
  return a + b > kMostCounts ? kMostCounts : a + b;
}

__device__ __forceinline__ uint64_t load_score(const TableView& table, int64_t slot) {
  return load_l2(reinterpret_cast<unsigned long long*>(&table.scores[slot]));
}

// The score at some time since the kernel began.
__device__ __forceinline__ uint64_t load_score_cached(const TableView& table, int64_t slot) {
  unsigned long long score;
  asm volatile("ld.global.ca.u64 %0, [%1];" : "=l"(score) : "l"(&table.scores[slot]));
  return score;
}

// Updates the score of a slot for several lookups of one call: `given` is the sum of what they give
// under LFU and epoch LFU, and what one of them gives under the other policies. old: the score as
// it was read during the call; other policies don't use it. Mostly nothing is waited for.
__device__ __forceinline__ void update_score(const TableView& table, int64_t slot,
                                             const Visit& visit, uint64_t given,
                                             unsigned long long old) {
  auto* const score = reinterpret_cast<unsigned long long*>(&table.scores[slot]);
  const Eviction policy = table.eviction;
  if (!sums_scores(policy)) {
    store_l2(score, first_score(policy, visit.now(), visit.epoch(), given));
    return;
  }
  // A count in the lower half of its range is added to without a look at the result. What others
  // have added since `old` was read fits the upper half: in a find, `old` may be as old as the
  // call, whose positions, less than 2^31, give one each; elsewhere it was read just now, and each
  // of the some thousand warps that run meanwhile adds less than `small`. Counts have 32 bits in an
  // epoch, 63 under LFU.
  const bool in_epochs = policy == Eviction::kEpochLfu;
  const uint64_t far = in_epochs ? uint64_t{1} << 31 : uint64_t{1} << 62;
  const uint64_t small = in_epochs ? uint64_t{1} << 16 : uint64_t{1} << 32;
  for (;;) {
    const bool present = !in_epochs || old >> 32 == visit.epoch();
    if (present && (in_epochs ? old & 0xffffffffull : old) < far && given < small) {
      atomicAdd(score, static_cast<unsigned long long>(given));
      return;
    }
    const unsigned long long next = next_score(policy, old, visit.now(), visit.epoch(), given);
    if (next == old) return;
    const unsigned long long seen = atomicCAS(score, old, next);
    if (seen == old) return;
    old = seen;
  }
}

// The sum of what the lanes in `peers` have, saturated. All lanes in `peers` call it together.
__device__ __forceinline__ uint64_t sum_of_peers(unsigned peers, uint64_t given, bool all_ones) {
  if (all_ones) return static_cast<uint64_t>(__popc(peers));
  uint64_t sum = 0;
  for (unsigned left = peers; left; left &= left - 1) {
    sum = add_counts(sum, __shfl_sync(peers, given, __ffs(static_cast<int>(left)) - 1));
  }
  return sum;
}

// Updates scores for the lanes of a warp that call it together: one update for each distinct slot.
// slot: numbered through the tables of the group.
__device__ __forceinline__ void update_scores_of_lanes(const TableView& table, int64_t slot,
                                                       const Visit& visit, uint64_t given) {
  const unsigned lanes = __activemask();
  const unsigned peers = __match_any_sync(lanes, static_cast<unsigned long long>(slot));
  if (sums_scores(table.eviction)) {
    given = sum_of_peers(peers, given, visit.scores == nullptr);
  }
  if ((peers & ((1u << threadIdx.x % kWarp) - 1)) != 0) return;
  const int64_t in_table = slot - table.first_slot;
  update_score(table, in_table, visit, given,
               sums_scores(table.eviction) ? load_score(table, in_table) : 0);
}

}  // namespace torchrec_hkv::hash_table::cuda
