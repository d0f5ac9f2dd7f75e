// Miniatures on the GPU. The kernel before has listed the sampled ids of each table
// (miniature_lists.cuh). A block has one set of each miniature, and a warp the set of one
// miniature, two entries a lane. The block searches its table's list for the ids of the set, and
// each warp processes them; equal ids among 32 count at once. The order of a list is arbitrary and
// does not matter.

#include "common/cuda_check.h"
#include "common/dependent_launch.cuh"
#include "hash_table/cuda/bucket.cuh"
#include "hash_table/cuda/insert/miniature_lists.cuh"
#include "hash_table/cuda/insert/miniatures.cuh"
#include "hash_table/miniature_use.h"

namespace torchrec_hkv::hash_table::cuda {
namespace {

constexpr int kEntries = kMiniatureWays / kWarp;  // of a lane
constexpr int kSimulators = kMiniatures * kWarp;  // threads of a block
constexpr uint32_t kPart = 8 * kSimulators;       // entries of a list that a block reads at once

// The order in which entries leave.
struct EvictionCandidate {
  uint64_t rank = ~0ull;
  uint32_t last_step = ~0u;
  uint32_t tag = ~0u;
  int32_t entry = -1;  // of the set; -1: none

  __device__ __forceinline__ bool operator<(const EvictionCandidate& other) const {
    if (rank != other.rank) return rank < other.rank;
    return last_step != other.last_step ? last_step < other.last_step : tag < other.tag;
  }
};

// A set of one miniature during a call, in a warp. A lane has the entries e * kWarp + lane.
struct MiniatureSet {
  uint32_t tags[kEntries], counts[kEntries], last_steps[kEntries];
  bool inserted[kEntries];         // came in this call
  uint32_t hits = 0, evicted = 0;  // of the lane's entries
  uint32_t ways;
  uint32_t now;
  Ranking ranking;

  __device__ __forceinline__ bool is_one(int e) const {
    return static_cast<uint32_t>(e * kWarp) + threadIdx.x % kWarp < ways;
  }

  __device__ __forceinline__ void put(int32_t entry, uint32_t tag, uint32_t given) {
#pragma unroll
    for (int e = 0; e < kEntries; ++e) {
      if (entry != e * kWarp + static_cast<int>(threadIdx.x % kWarp)) continue;
      tags[e] = tag;
      counts[e] = given;
      last_steps[e] = now;
      inserted[e] = true;
    }
  }

  // The first free entry, or -1; the same in all lanes.
  __device__ __forceinline__ int32_t free_entry() const {
#pragma unroll
    for (int e = 0; e < kEntries; ++e) {
      const unsigned free = __ballot_sync(kAllLanes, is_one(e) && tags[e] == 0);
      if (free != 0) return e * kWarp + __ffs(static_cast<int>(free)) - 1;
    }
    return -1;
  }

  // The entry that a new id replaces, or -1.
  __device__ __forceinline__ int32_t lowest() const {
    EvictionCandidate least;
#pragma unroll
    for (int e = 0; e < kEntries; ++e) {
      if (!is_one(e) || last_steps[e] == now) continue;
      const EvictionCandidate other{ranking.of(counts[e], last_steps[e]), last_steps[e], tags[e],
                                    e * kWarp + static_cast<int>(threadIdx.x % kWarp)};
      if (other < least) least = other;
    }
#pragma unroll
    for (int offset = kWarp / 2; offset; offset /= 2) {
      const EvictionCandidate other{__shfl_xor_sync(kAllLanes, least.rank, offset),
                                    __shfl_xor_sync(kAllLanes, least.last_step, offset),
                                    __shfl_xor_sync(kAllLanes, least.tag, offset),
                                    __shfl_xor_sync(kAllLanes, least.entry, offset)};
      if (other < least) least = other;
    }
    return least.rank <= ranking.replaced_by_new(1, now) ? least.entry : -1;
  }

  // The entry with the highest tag of those that this call inserted, if that is above `tag`; else
  // -1.
  __device__ __forceinline__ int32_t inserted_with_higher_tag(uint32_t tag) const {
    uint32_t highest = 0;
#pragma unroll
    for (int e = 0; e < kEntries; ++e) {
      if (is_one(e) && inserted[e]) highest = max(highest, tags[e]);
    }
    highest = __reduce_max_sync(kAllLanes, highest);
    if (highest <= tag) return -1;
#pragma unroll
    for (int e = 0; e < kEntries; ++e) {
      const unsigned matches =
          __ballot_sync(kAllLanes, is_one(e) && inserted[e] && tags[e] == highest);
      if (matches != 0) return e * kWarp + __ffs(static_cast<int>(matches)) - 1;
    }
    return -1;
  }

  // Counts a present id, which this call or an earlier one inserted. positions: number of its
  // positions; given: the sum of their scores. Returns to all lanes whether the id is present.
  __device__ __forceinline__ bool count(uint32_t tag, uint32_t given, uint32_t positions,
                                        bool is_new) {
    bool is_match = false;
#pragma unroll
    for (int e = 0; e < kEntries; ++e) {
      if (!is_one(e) || tags[e] != tag) continue;
      is_match = true;
      if (inserted[e] != is_new) continue;
      hits += is_new ? 0 : positions;
      const uint64_t sum = static_cast<uint64_t>(counts[e]) + given;
      counts[e] = sum > 0xffffffffull ? 0xffffffffu : static_cast<uint32_t>(sum);
      last_steps[e] = now;
    }
    return __any_sync(kAllLanes, is_match);
  }

  __device__ __forceinline__ void place_missing(uint32_t tag, uint32_t given) {
    if (count(tag, given, 0, /*is_new=*/true)) return;
    int32_t entry = free_entry();
    if (entry < 0) {
      entry = lowest();
      if (entry >= 0) {
        evicted += threadIdx.x % kWarp == 0 ? 1 : 0;
      } else {
        entry = inserted_with_higher_tag(tag);
      }
    }
    if (entry >= 0) put(entry, tag, given);
  }
};

// A block a set, a warp a miniature.
__global__ void __launch_bounds__(kSimulators)
    simulate_kernel(const TableView* __restrict__ tables, const Batch batch,
                    const CallContext context, const SampleLists lists) {
  // The entries of this set in one part of the list.
  __shared__ SampleEntry found[kPart];
  __shared__ uint32_t number_found;
  wait_for_kernel_before();
  const auto t = static_cast<int32_t>(blockIdx.y);
  const uint32_t listed = lists.numbers[t];
  if (listed == 0) return;
  const int64_t begin = begin_by_warp(batch, t);
  const auto n = static_cast<uint32_t>(
      min(static_cast<int64_t>(listed), max(batch.num_ids - begin, int64_t{0})));
  const Miniatures& miniatures = tables[t].miniatures;
  if (n == 0 || blockIdx.x >= miniatures.size.sets) return;
  const SampleEntry* const list = lists.ids + begin;
  const int lane = threadIdx.x % kWarp;
  const int k = threadIdx.x / kWarp;
  uint32_t* const memory = miniatures.set_of(k, blockIdx.x);
  MiniatureSet set;
  set.ways = miniatures.size.ways;
  set.now = context.now();
  set.ranking = tables[t].aged->ranking_of(c_of_miniature(k));
#pragma unroll
  for (int e = 0; e < kEntries; ++e) {
    set.tags[e] = memory[e * kWarp + lane];
    set.counts[e] = memory[kMiniatureWays + e * kWarp + lane];
    set.last_steps[e] = memory[2 * kMiniatureWays + e * kWarp + lane];
    set.inserted[e] = false;
  }
  const uint32_t where = static_cast<uint32_t>(t) * kMaxMiniatureSets + blockIdx.x;
  // Called by all threads of the block.
  const auto list_found = [&](uint32_t from) {
    __syncthreads();
    if (threadIdx.x == 0) number_found = 0;
    __syncthreads();
    const uint32_t end = min(n, from + kPart);
#pragma unroll 4
    for (uint32_t i = from + threadIdx.x; i < end; i += kSimulators) {
      const SampleEntry it = list[i];
      if (it.where() == where) found[atomicAdd(&number_found, 1u)] = it;
    }
    __syncthreads();
  };
  const auto for_each_found = [&](const auto& process) {
    const uint32_t number = number_found;
    for (uint32_t base = 0; base < number; base += kWarp) {
      const bool is_one = base + lane < number;
      const SampleEntry it = found[is_one ? base + lane : base];
      unsigned remaining = __ballot_sync(kAllLanes, is_one);
      while (remaining != 0) {
        const uint32_t tag = __shfl_sync(kAllLanes, it.tag, __ffs(static_cast<int>(remaining)) - 1);
        const bool is_match = is_one && it.tag == tag;
        remaining &= ~__ballot_sync(kAllLanes, is_match);
        const uint32_t given = saturated_sum(kAllLanes, is_match ? it.given : 0u);
        const uint32_t positions = __reduce_add_sync(kAllLanes, is_match ? it.positions() : 0u);
        process(tag, given, positions);
      }
    }
  };
  uint32_t lookups = 0, missing = 0;
  for (uint32_t from = 0; from < n; from += kPart) {
    list_found(from);
    for_each_found([&](uint32_t tag, uint32_t given, uint32_t positions) {
      lookups += positions;
      missing += set.count(tag, given, positions, /*is_new=*/false) ? 0 : 1;
    });
  }
  if (lookups == 0) return;  // the same for all warps
  const auto place = [&](uint32_t tag, uint32_t given, uint32_t) { set.place_missing(tag, given); };
  if (n <= kPart) {
    if (missing != 0) for_each_found(place);
  } else if (__syncthreads_or(missing != 0)) {
    for (uint32_t from = 0; from < n; from += kPart) {
      list_found(from);
      if (missing != 0) for_each_found(place);
    }
  }
#pragma unroll
  for (int e = 0; e < kEntries; ++e) {
    memory[e * kWarp + lane] = set.tags[e];
    memory[kMiniatureWays + e * kWarp + lane] = set.counts[e];
    memory[2 * kMiniatureWays + e * kWarp + lane] = set.last_steps[e];
  }
  const uint32_t hits = __reduce_add_sync(kAllLanes, set.hits);
  const uint32_t evicted = __reduce_add_sync(kAllLanes, set.evicted);
  if (lane != 0) return;
  const auto add = [](uint64_t* to, uint32_t by) {
    if (by != 0) atomicAdd(reinterpret_cast<unsigned long long*>(to), by);
  };
  add(&miniatures.counters->hits[k], hits);
  if (k > 0) return;
  add(&miniatures.counters->lookups, lookups);
  add(&miniatures.counters->evicted, evicted);
}

}  // namespace

void simulate(const TableView* tables, const Batch& batch, const CallContext& context,
              const SampleLists& lists, cudaStream_t stream) {
  const dim3 grid(kMaxMiniatureSets, static_cast<unsigned>(lists.num_tables));
  launch_dependent(simulate_kernel, {grid, kSimulators}, stream, tables, batch, context, lists);
}

}  // namespace torchrec_hkv::hash_table::cuda
