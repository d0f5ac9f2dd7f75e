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

__device__ __forceinline__ uint64_t add_saturated(uint64_t a, uint64_t b) {
  return a + b < a ? ~0ull : a + b;
}

// Updates the score of a slot for several lookups of one call: `given` is the sum of what they give
// under LFU and epoch LFU, and of one of them under the other policies.
__device__ __forceinline__ void update_score(const TableView& table, int64_t slot,
                                             const Visit& visit, uint64_t given) {
  auto* const score = reinterpret_cast<unsigned long long*>(&table.scores[slot]);
  const Eviction policy = table.eviction;
  if (policy == Eviction::kLfu) {
    const unsigned long long old = atomicAdd(score, static_cast<unsigned long long>(given));
    // Whoever wraps the sum stores the highest score, and so does everyone who wraps that.
    if (old + given < old) atomicMax(score, ~0ull);
    return;
  }
  unsigned long long old = load_l2(score);
  if (policy == Eviction::kEpochLfu) {
    // Counts of an epoch have 32 bits. An addition can't carry into the epoch as long as the count
    // is below half of that: at most some thousand threads add at a time.
    constexpr uint64_t kFarFromFull = uint64_t{1} << 31;
    constexpr uint64_t kSmall = uint64_t{1} << 16;
    for (;;) {
      const bool present = old >> 32 == visit.epoch();
      if (present && (old & 0xffffffffull) < kFarFromFull && given < kSmall) {
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
  const unsigned long long next = next_score(policy, old, visit.now(), visit.epoch(), given);
  if (next != old) store_l2(score, next);
}

// The sum of what the lanes in `peers` have, saturated. All lanes in `peers` call it together.
__device__ __forceinline__ uint64_t sum_of_peers(unsigned peers, uint64_t given, bool all_ones) {
  if (all_ones) return static_cast<uint64_t>(__popc(peers));
  uint64_t sum = 0;
  for (unsigned left = peers; left; left &= left - 1) {
    sum = add_saturated(sum, __shfl_sync(peers, given, __ffs(static_cast<int>(left)) - 1));
  }
  return sum;
}

// Updates scores for the lanes of a warp that call it together: one update for each distinct slot.
// slot: numbered through the tables of the group.
__device__ __forceinline__ void update_scores_of_lanes(const TableView& table, int64_t slot,
                                                       const Visit& visit, uint64_t given) {
  const unsigned lanes = __activemask();
  const unsigned peers = __match_any_sync(lanes, static_cast<unsigned long long>(slot));
  const uint64_t sum = sum_of_peers(peers, given, visit.scores == nullptr);
  if ((peers & ((1u << threadIdx.x % kWarp) - 1)) != 0) return;
  update_score(table, slot - table.first_slot, visit, sum);
}

// What the threads of a block bring to one slot, added up in shared memory. A sum of 64 bits is
// kept in three words of 24, 24 and 16 bits, whose sums over a block fit in 32: shared memory adds
// 32 bits at a time. Most sums only use the first.
struct BlockScores {
  static constexpr int kEntries = 512;
  static constexpr uint32_t kMask = (1u << 24) - 1;
  static_assert(kThreads <= 256);

  uint32_t words[3][kEntries];

  // All threads of the block, which synchronise before add.
  __device__ __forceinline__ void clear() {
    for (int i = threadIdx.x; i < 3 * kEntries; i += kThreads) words[0][i] = 0;
  }
  __device__ __forceinline__ void add(uint32_t entry, uint64_t given) {
    const auto low = static_cast<uint32_t>(given) & kMask;
    atomicAdd(&words[0][entry], low);
    if (given <= kMask) return;
    atomicAdd(&words[1][entry], static_cast<uint32_t>(given >> 24) & kMask);
    atomicAdd(&words[2][entry], static_cast<uint32_t>(given >> 48));
  }
  __device__ __forceinline__ uint64_t sum(uint32_t entry) const {
    const uint64_t middle = words[1][entry] + (words[0][entry] >> 24);
    const uint64_t high = words[2][entry] + (middle >> 24);
    if (high >> 16) return ~0ull;
    return high << 48 | (middle & kMask) << 24 | (words[0][entry] & kMask);
  }
};

}  // namespace torchrec_hkv::hash_table::cuda
