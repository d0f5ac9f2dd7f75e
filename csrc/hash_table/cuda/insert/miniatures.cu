// A first kernel lists the ids that are in the sample, those of each table together; a warp lists
// an id once, since a hot one may be most of the batch. In a second kernel a warp has one set of
// one miniature, two entries a lane, and goes through its table's list for the set's ids; equal ids
// among 32 neighbours count at once. The order of a list is any, and does not matter.
#include <algorithm>

#include "common/cuda_check.h"
#include "hash_table/cuda/bucket.cuh"
#include "hash_table/cuda/insert/lane_feature.cuh"
#include "hash_table/cuda/insert/miniatures.cuh"
#include "hash_table/cuda/insert/missing.cuh"
#include "hash_table/miniature_use.h"

namespace torchrec_hkv::hash_table::cuda {
namespace {

constexpr int kEntries = kMiniatureWays / kWarp;  // of a lane
constexpr int kMostTables = 4096;  // of a group; later ones keep the c they begin with

// Where a table's part of the list begins: it has room for all lookups of the table.
__device__ __forceinline__ int64_t begin_of(const Batch& batch, int32_t table) {
  int64_t begin = 0;
  for (int32_t f = 0; f < batch.num_features; ++f) {
    if (batch.feature_tables[f] >= table) continue;
    begin += max(batch.feature_start(f + 1) - batch.feature_start(f), int64_t{0});
  }
  return begin;
}

// The sum of what the lanes in `lanes` give; the highest number where it is more. These lanes call
// it together.
__device__ __forceinline__ uint32_t saturated_sum(unsigned lanes, uint32_t given) {
  const uint64_t low = __reduce_add_sync(lanes, given & 0xffffu);
  const uint64_t high = __reduce_add_sync(lanes, given >> 16);
  const uint64_t sum = (high << 16) + low;
  return sum > 0xffffffffull ? 0xffffffffu : static_cast<uint32_t>(sum);
}

// An entry of a list: an id, and how many positions of a warp have it.
struct Listed {
  static constexpr int kWhereBits = 27;
  static_assert(kMostTables * kMostMiniatureSets <= 1 << kWhereBits && kWarp <= 1 << 5);
  uint32_t where_and_positions;  // the positions, less one, in the highest bits
  uint32_t tag;
  uint32_t given;  // by all of them

  __device__ __forceinline__ Listed(const SampledId& id, int positions)
      : where_and_positions(id.where | static_cast<uint32_t>(positions - 1) << kWhereBits),
        tag(id.tag),
        given(id.given) {}
  __device__ __forceinline__ uint32_t where() const {
    return where_and_positions & ((1u << kWhereBits) - 1);
  }
  __device__ __forceinline__ uint32_t positions() const {
    return (where_and_positions >> kWhereBits) + 1;
  }
};

// numbers: [tables], zeros before. Positions of a warp with one id are one entry of a list.
__global__ void __launch_bounds__(kThreads)
    sample_kernel(const TableView* __restrict__ tables, const Batch batch, const Visit visit,
                  Listed* __restrict__ list, uint32_t* __restrict__ numbers) {
  const int64_t at = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const int32_t feature = feature_of_lane(batch, at);
  int32_t t = 0;
  SampledId id{};
  bool sampled = false;
  if (at < batch.num_ids) {
    t = batch.feature_tables[feature];
    sampled = t < kMostTables && miniatures_look_on(tables[t]) &&
              tables[t].miniatures.sample(batch.ids[at], visit.given(at), t, &id);
  }
  const unsigned all = __ballot_sync(kAllLanes, sampled);
  if (!sampled) return;
  const unsigned equal =
      __match_any_sync(all, static_cast<unsigned long long>(id.where) << 32 | id.tag);
  id.given = saturated_sum(equal, id.given);
  const int lane = threadIdx.x % kWarp;
  const bool leads = __ffs(static_cast<int>(equal)) - 1 == lane;
  const unsigned leaders = __ballot_sync(all, leads);
  if (!leads) return;
  const unsigned peers = __match_any_sync(leaders, t);  // one entry each
  const int first = __ffs(static_cast<int>(peers)) - 1;
  int64_t to = 0;
  if (lane == first) {
    to = begin_of(batch, t) + atomicAdd(&numbers[t], static_cast<uint32_t>(__popc(peers)));
  }
  to = __shfl_sync(peers, to, first) + __popc(peers & ((1u << lane) - 1));
  if (to < batch.num_ids) list[to] = Listed(id, __popc(equal));  // wrong offsets may say otherwise
}

// The order in which entries leave.
struct Leaving {
  uint64_t rank = ~0ull;
  uint32_t last_step = ~0u;
  uint32_t tag = ~0u;
  int32_t entry = -1;  // of the set; -1: none

  __device__ __forceinline__ bool operator<(const Leaving& other) const {
    if (rank != other.rank) return rank < other.rank;
    return last_step != other.last_step ? last_step < other.last_step : tag < other.tag;
  }
};

// A set of one miniature during a call, by a warp. Entry e * kWarp + lane is the lane's.
struct MiniatureSet {
  uint32_t tags[kEntries], counts[kEntries], last_steps[kEntries];
  bool fresh[kEntries];            // came in this call
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
      fresh[e] = true;
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

  // The entry that leaves, of those that the call has not touched, or -1.
  __device__ __forceinline__ int32_t lowest() const {
    Leaving least;
#pragma unroll
    for (int e = 0; e < kEntries; ++e) {
      if (!is_one(e) || last_steps[e] == now) continue;
      const Leaving other{ranking.of(counts[e], last_steps[e]), last_steps[e], tags[e],
                          e * kWarp + static_cast<int>(threadIdx.x % kWarp)};
      if (other < least) least = other;
    }
#pragma unroll
    for (int offset = kWarp / 2; offset; offset /= 2) {
      const Leaving other{__shfl_xor_sync(kAllLanes, least.rank, offset),
                          __shfl_xor_sync(kAllLanes, least.last_step, offset),
                          __shfl_xor_sync(kAllLanes, least.tag, offset),
                          __shfl_xor_sync(kAllLanes, least.entry, offset)};
      if (other < least) least = other;
    }
    return least.entry;
  }

  // The entry of the highest tag that came in this call, if that is above `tag`; else -1.
  __device__ __forceinline__ int32_t fresh_with_higher_tag(uint32_t tag) const {
    uint32_t highest = 0;
#pragma unroll
    for (int e = 0; e < kEntries; ++e) {
      if (is_one(e) && fresh[e]) highest = max(highest, tags[e]);
    }
    highest = __reduce_max_sync(kAllLanes, highest);
    if (highest <= tag) return -1;
#pragma unroll
    for (int e = 0; e < kEntries; ++e) {
      const unsigned its = __ballot_sync(kAllLanes, is_one(e) && fresh[e] && tags[e] == highest);
      if (its != 0) return e * kWarp + __ffs(static_cast<int>(its)) - 1;
    }
    return -1;
  }

  // Counts an id that is there: one that came in this call, or one that was there before.
  // positions: that have the id; given: by all of them. Returns whether it is there at all, to all
  // lanes.
  __device__ __forceinline__ bool count(uint32_t tag, uint32_t given, uint32_t positions,
                                        bool came) {
    bool mine = false;
#pragma unroll
    for (int e = 0; e < kEntries; ++e) {
      if (!is_one(e) || tags[e] != tag) continue;
      mine = true;
      if (fresh[e] != came) continue;
      hits += came ? 0 : positions;
      const uint64_t sum = static_cast<uint64_t>(counts[e]) + given;
      counts[e] = sum > 0xffffffffull ? 0xffffffffu : static_cast<uint32_t>(sum);
      last_steps[e] = now;
    }
    return __any_sync(kAllLanes, mine);
  }

  __device__ __forceinline__ void place_missing(uint32_t tag, uint32_t given) {
    if (count(tag, given, 0, /*came=*/true)) return;
    int32_t entry = free_entry();
    if (entry < 0) {
      entry = lowest();
      if (entry >= 0) {
        evicted += threadIdx.x % kWarp == 0 ? 1 : 0;
      } else {
        entry = fresh_with_higher_tag(tag);
      }
    }
    if (entry >= 0) put(entry, tag, given);
  }
};

// A block a set, a warp a miniature.
__global__ void __launch_bounds__(kMiniatures* kWarp)
    simulate_kernel(const TableView* __restrict__ tables, const Batch batch, const Visit visit,
                    const Listed* __restrict__ lists, const uint32_t* __restrict__ numbers) {
  const auto t = static_cast<int32_t>(blockIdx.y);
  const int64_t begin = numbers[t] == 0 ? 0 : begin_of(batch, t);
  const auto n = static_cast<uint32_t>(
      min(static_cast<int64_t>(numbers[t]), max(batch.num_ids - begin, int64_t{0})));
  const Miniatures& miniatures = tables[t].miniatures;
  if (n == 0 || blockIdx.x >= miniatures.size.sets) return;
  const Listed* const list = lists + begin;
  const int lane = threadIdx.x % kWarp;
  const int k = threadIdx.x / kWarp;
  uint32_t* const memory = miniatures.set_of(k, blockIdx.x);
  MiniatureSet set;
  set.ways = miniatures.size.ways;
  set.now = visit.now();
  set.ranking = tables[t].aged->ranking_of(c_of_miniature(k));
#pragma unroll
  for (int e = 0; e < kEntries; ++e) {
    set.tags[e] = memory[e * kWarp + lane];
    set.counts[e] = memory[kMiniatureWays + e * kWarp + lane];
    set.last_steps[e] = memory[2 * kMiniatureWays + e * kWarp + lane];
    set.fresh[e] = false;
  }
  const uint32_t where = static_cast<uint32_t>(t) * kMostMiniatureSets + blockIdx.x;
  const auto for_each = [&](const auto& see) {
    for (uint32_t base = 0; base < n; base += kWarp) {
      const Listed it = list[min(base + lane, n - 1)];
      const bool of_set = base + lane < n && it.where() == where;
      unsigned left = __ballot_sync(kAllLanes, of_set);
      while (left != 0) {
        const uint32_t tag = __shfl_sync(kAllLanes, it.tag, __ffs(static_cast<int>(left)) - 1);
        const bool mine = of_set && it.tag == tag;
        left &= ~__ballot_sync(kAllLanes, mine);
        const uint32_t given = saturated_sum(kAllLanes, mine ? it.given : 0);
        const uint32_t positions = __reduce_add_sync(kAllLanes, mine ? it.positions() : 0u);
        see(tag, given, positions);
      }
    }
  };
  uint32_t lookups = 0, missing = 0;
  for_each([&](uint32_t tag, uint32_t given, uint32_t positions) {
    lookups += positions;
    missing += set.count(tag, given, positions, /*came=*/false) ? 0 : 1;
  });
  if (lookups == 0) return;
  if (missing != 0) {
    for_each([&](uint32_t tag, uint32_t given, uint32_t) { set.place_missing(tag, given); });
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
  add(&miniatures.tally->hits[k], hits);
  if (k > 0) return;
  add(&miniatures.tally->lookups, lookups);
  add(&miniatures.tally->evicted, evicted);
}

constexpr size_t kNumberBytes = kMostTables * sizeof(uint32_t);

}  // namespace

size_t miniature_scratch(int64_t num_ids) {
  return kNumberBytes + static_cast<size_t>(num_ids) * sizeof(Listed);
}

void simulate(const TableView* tables, int32_t num_tables, const Batch& batch, const Visit& visit,
              void* scratch, cudaStream_t stream) {
  auto* const numbers = static_cast<uint32_t*>(scratch);
  const int counted = std::min(num_tables, kMostTables);
  auto* const list = reinterpret_cast<Listed*>(static_cast<char*>(scratch) + kNumberBytes);
  HKV_CUDA_CHECK(cudaMemsetAsync(numbers, 0, counted * sizeof(uint32_t), stream));
  sample_kernel<<<grid_for(batch.num_ids), kThreads, 0, stream>>>(tables, batch, visit, list,
                                                                  numbers);
  HKV_CUDA_CHECK_LAUNCH();
  const dim3 grid(kMostMiniatureSets, static_cast<unsigned>(counted));
  simulate_kernel<<<grid, kMiniatures * kWarp, 0, stream>>>(tables, batch, visit, list, numbers);
  HKV_CUDA_CHECK_LAUNCH();
}

}  // namespace torchrec_hkv::hash_table::cuda
