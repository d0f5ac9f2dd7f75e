// Lists, for each table, the ids of a batch that its miniatures sample. A block joins equal ids of
// a part of the batch into one entry, because a hot id may be most of the batch.
#pragma once

#include <cstdint>

#include "hash_table/cuda/bucket.cuh"
#include "hash_table/cuda/insert/lane_feature.cuh"
#include "hash_table/miniature_use.h"

namespace torchrec_hkv::hash_table::cuda {

constexpr int kMaxTables = 4096;     // of a group; further tables keep their initial c
constexpr int kSampleRounds = 4;     // positions of a thread in a part
constexpr int kAggregatedIds = 512;  // different ids of a part that a block can aggregate
constexpr int kAggregateProbes = 4;
constexpr int kCachedTables = 256;  // features and tables whose data a block caches

// The lookups of tables before `table` among the features f, f + step, and so on.
__device__ __forceinline__ int64_t lookups_before(const Batch& batch, int32_t table, int32_t f,
                                                  int32_t step) {
  int64_t lookups = 0;
  for (; f < batch.num_features; f += step) {
    const bool earlier = batch.feature_tables[f] < table;
    const int64_t lookups_of_feature =
        max(batch.feature_start(f + 1) - batch.feature_start(f), int64_t{0});
    lookups += earlier ? lookups_of_feature : 0;
  }
  return lookups;
}
// The begin of a table's part of the list, which has room for all its lookups.
__device__ __forceinline__ int64_t begin_of(const Batch& batch, int32_t table) {
  return lookups_before(batch, table, 0, 1);
}
// As begin_of. Called by all lanes of a warp, which read different features.
__device__ __forceinline__ int64_t begin_by_warp(const Batch& batch, int32_t table) {
  int64_t begin = lookups_before(batch, table, static_cast<int32_t>(threadIdx.x % kWarp), kWarp);
#pragma unroll
  for (int offset = kWarp / 2; offset; offset /= 2) {
    begin += __shfl_xor_sync(kAllLanes, begin, offset);
  }
  return begin;
}

// Clamps a sum to 32 bits.
__device__ __forceinline__ uint32_t saturated(uint64_t sum) {
  return sum > 0xffffffffull ? 0xffffffffu : static_cast<uint32_t>(sum);
}
// The clamped sum of `given` over the lanes in `lanes`. These lanes call it together.
__device__ __forceinline__ uint32_t saturated_sum(unsigned lanes, uint32_t given) {
  const uint64_t low = __reduce_add_sync(lanes, given & 0xffffu);
  const uint64_t high = __reduce_add_sync(lanes, given >> 16);
  return saturated((high << 16) + low);
}

// An entry of a list: an id and the number of positions of a part that have it.
struct SampleEntry {
  static constexpr int kWhereBits = 22;
  static_assert(kMaxTables * kMaxMiniatureSets <= 1 << kWhereBits);
  static_assert(kSampleRounds * kThreads <= 1 << (32 - kWhereBits));

  uint32_t where_and_positions;  // number of positions - 1 in the highest bits
  uint32_t tag;
  uint32_t given;  // sum over these positions

  static __device__ __forceinline__ SampleEntry make(uint32_t where, uint32_t tag, uint32_t given,
                                                     uint32_t positions) {
    return SampleEntry{where | (positions - 1) << kWhereBits, tag, given};
  }
  __device__ __forceinline__ uint32_t where() const {
    return where_and_positions & ((1u << kWhereBits) - 1);
  }
  __device__ __forceinline__ uint32_t positions() const {
    return (where_and_positions >> kWhereBits) + 1;
  }
};

// Scratch of a call. A table's part of `ids` has room for all its lookups.
struct SampleLists {
  SampleEntry* ids;   // [num_ids]
  uint32_t* numbers;  // [num_tables] number of listed ids
  int32_t num_tables;
};

// Bytes of SampleLists::numbers.
inline size_t sample_number_bytes(int32_t num_tables) {
  return static_cast<size_t>(num_tables < kMaxTables ? num_tables : kMaxTables) * sizeof(uint32_t);
}

// The ids of a part, joined by table, set and tag, in shared memory. Each is listed once.
struct SampleAggregator {
  unsigned long long keys[kAggregatedIds];  // place << 32 | tag; 0: free, because no tag is 0
  unsigned long long given[kAggregatedIds];
  uint32_t positions[kAggregatedIds];
  uint64_t sampled_fractions[kCachedTables];  // [feature] the sampled part of its ids, of 2^32
  int64_t begins[kCachedTables];              // [table] its begin_of

  __device__ __forceinline__ void clear() {
    for (int i = threadIdx.x; i < kAggregatedIds; i += kThreads) {
      keys[i] = given[i] = 0;
      positions[i] = 0;
    }
  }
  // Adds `number` positions of an id. Returns whether there was room.
  __device__ __forceinline__ bool add(const SampledId& id, uint32_t number) {
    const unsigned long long key = static_cast<unsigned long long>(id.where) << 32 | id.tag;
    for (int probe = 0; probe < kAggregateProbes; ++probe) {
      const uint32_t at = (id.tag + id.where + static_cast<uint32_t>(probe)) % kAggregatedIds;
      const unsigned long long occupant = atomicCAS(&keys[at], 0ull, key);
      if (occupant != 0 && occupant != key) continue;
      atomicAdd(&given[at], static_cast<unsigned long long>(id.given));
      atomicAdd(&positions[at], number);
      return true;
    }
    return false;
  }
};

// Appends an id to the list of its table.
__device__ __forceinline__ void append(const SampleAggregator& aggregator, const Batch& batch,
                                       const SampleEntry& id, const SampleLists& lists) {
  const auto table = static_cast<int32_t>(id.where() / kMaxMiniatureSets);
  const int64_t begin = table < kCachedTables ? aggregator.begins[table] : begin_of(batch, table);
  const int64_t to = begin + atomicAdd(&lists.numbers[table], 1u);
  if (to < batch.num_ids) lists.ids[to] = id;  // true if offsets are valid
}

// Lists the sampled ids of a batch. Called by all threads of all blocks of a launch. lists.numbers:
// zeros before it.
__device__ __forceinline__ void list_sampled(SampleAggregator& aggregator, const TableView* tables,
                                             const Batch& batch, const CallContext& context,
                                             const SampleLists& lists) {
  // The sampled part of a feature's ids, of 2^32.
  const auto sampled_fraction = [&](int32_t feature) -> uint64_t {
    const int32_t t = batch.feature_tables[feature];
    if (t >= kMaxTables || !miniatures_enabled(tables[t])) return 0;
    return tables[t].miniatures.sampled;
  };
  bool any_sampled = false;  // whether any table's miniatures see the ids
  for (int32_t f = threadIdx.x; f < batch.num_features; f += kThreads) {
    const uint64_t fraction = sampled_fraction(f);
    if (f < kCachedTables) aggregator.sampled_fractions[f] = fraction;
    any_sampled |= fraction != 0;
  }
  if (!__syncthreads_or(any_sampled)) return;
  for (int32_t t = threadIdx.x / kWarp; t < min(lists.num_tables, kCachedTables);
       t += kThreads / kWarp) {
    aggregator.begins[t] = begin_by_warp(batch, t);
  }
  constexpr int64_t kPart = int64_t{kSampleRounds} * kThreads;
#pragma unroll 1
  for (int64_t part = blockIdx.x * kPart; part < batch.num_ids; part += gridDim.x * kPart) {
    int64_t ids[kSampleRounds];  // all loads are in flight together
#pragma unroll
    for (int round = 0; round < kSampleRounds; ++round) {
      const int64_t at = part + round * kThreads + threadIdx.x;
      ids[round] = at < batch.num_ids ? batch.ids[at] : 0;
    }
    aggregator.clear();
    __syncthreads();
#pragma unroll
    for (int round = 0; round < kSampleRounds; ++round) {
      const int64_t at = part + round * kThreads + threadIdx.x;
      const int32_t feature = feature_of_lane(batch, at);
      SampledId id{};
      bool sampled = false;
      if (at < batch.num_ids) {
        const uint64_t fraction = feature < kCachedTables ? aggregator.sampled_fractions[feature]
                                                          : sampled_fraction(feature);
        if (fraction != 0) {
          sampled = miniature_hash(ids[round]) >> 32 < fraction;
          if (sampled) {
            const int32_t t = batch.feature_tables[feature];
            tables[t].miniatures.sample(ids[round], context.given(at), t, &id);
          }
        }
      }
      const unsigned all = __ballot_sync(kAllLanes, sampled);
      if (sampled) {
        const unsigned equal =
            __match_any_sync(all, static_cast<unsigned long long>(id.where) << 32 | id.tag);
        id.given = saturated_sum(equal, id.given);
        const auto number = static_cast<uint32_t>(__popc(equal));
        const bool is_leader =
            __ffs(static_cast<int>(equal)) - 1 == static_cast<int>(threadIdx.x % kWarp);
        if (is_leader && !aggregator.add(id, number)) {
          append(aggregator, batch, SampleEntry::make(id.where, id.tag, id.given, number), lists);
        }
      }
      __syncwarp();
    }
    __syncthreads();
    for (int i = threadIdx.x; i < kAggregatedIds; i += kThreads) {
      if (aggregator.keys[i] == 0) continue;
      append(aggregator, batch,
             SampleEntry::make(static_cast<uint32_t>(aggregator.keys[i] >> 32),
                               static_cast<uint32_t>(aggregator.keys[i]),
                               saturated(aggregator.given[i]), aggregator.positions[i]),
             lists);
    }
    __syncthreads();  // the next part clears the entries
  }
}

}  // namespace torchrec_hkv::hash_table::cuda
