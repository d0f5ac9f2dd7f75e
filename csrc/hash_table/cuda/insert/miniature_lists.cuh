// The ids of a batch that are in the samples of miniatures: a list for each table. A block lists an
// id once, since a hot id may be most of the batch.
#pragma once

#include <cstdint>

#include "common/chain.cuh"
#include "hash_table/cuda/bucket.cuh"
#include "hash_table/cuda/insert/lane_feature.cuh"
#include "hash_table/miniature_use.h"

namespace torchrec_hkv::hash_table::cuda {

constexpr int kMostTables = 4096;  // of a group; later ones keep the c they begin with
constexpr int kSampleRounds = 4;   // positions of a thread
constexpr int kJoined = 512;       // ids that a block can join
constexpr int kJoinProbes = 4;

// Where a table's part of the list begins: it has room for all lookups of the table.
__device__ __forceinline__ int64_t begin_of(const Batch& batch, int32_t table) {
  int64_t begin = 0;
  for (int32_t f = 0; f < batch.num_features; ++f) {
    if (batch.feature_tables[f] >= table) continue;
    begin += max(batch.feature_start(f + 1) - batch.feature_start(f), int64_t{0});
  }
  return begin;
}

// The highest number where it is more.
__device__ __forceinline__ uint32_t saturated(uint64_t sum) {
  return sum > 0xffffffffull ? 0xffffffffu : static_cast<uint32_t>(sum);
}
// The sum of what the lanes in `lanes` give. These lanes call it together.
__device__ __forceinline__ uint32_t saturated_sum(unsigned lanes, uint32_t given) {
  const uint64_t low = __reduce_add_sync(lanes, given & 0xffffu);
  const uint64_t high = __reduce_add_sync(lanes, given >> 16);
  return saturated((high << 16) + low);
}

// An entry of a list: an id, and how many positions of a block have it.
struct Listed {
  static constexpr int kWhereBits = 22;
  static_assert(kMostTables * kMostMiniatureSets <= 1 << kWhereBits);
  static_assert(kSampleRounds * kThreads <= 1 << (32 - kWhereBits));

  uint32_t where_and_positions;  // the positions, less one, in the highest bits
  uint32_t tag;
  uint32_t given;  // by all of them

  static __device__ __forceinline__ Listed make(uint32_t where, uint32_t tag, uint32_t given,
                                                uint32_t positions) {
    return Listed{where | (positions - 1) << kWhereBits, tag, given};
  }
  __device__ __forceinline__ uint32_t where() const {
    return where_and_positions & ((1u << kWhereBits) - 1);
  }
  __device__ __forceinline__ uint32_t positions() const {
    return (where_and_positions >> kWhereBits) + 1;
  }
};

// The ids of a block by table, set and tag, in shared memory.
struct Joins {
  unsigned long long keys[kJoined];  // place << 32 | tag; 0: free, because no tag is 0
  unsigned long long given[kJoined];
  uint32_t positions[kJoined];

  __device__ __forceinline__ void clear() {
    for (int i = threadIdx.x; i < kJoined; i += kThreads) {
      keys[i] = given[i] = 0;
      positions[i] = 0;
    }
  }
  // Returns whether there was room.
  __device__ __forceinline__ bool add(const SampledId& id, uint32_t number) {
    const unsigned long long key = static_cast<unsigned long long>(id.where) << 32 | id.tag;
    for (int probe = 0; probe < kJoinProbes; ++probe) {
      const uint32_t at = (id.tag + id.where + static_cast<uint32_t>(probe)) % kJoined;
      const unsigned long long there = atomicCAS(&keys[at], 0ull, key);
      if (there != 0 && there != key) continue;
      atomicAdd(&given[at], static_cast<unsigned long long>(id.given));
      atomicAdd(&positions[at], number);
      return true;
    }
    return false;
  }
};

// numbers: [tables], of the lists, zeros before.
__device__ __forceinline__ void append(const Batch& batch, const Listed& id, Listed* list,
                                       uint32_t* numbers) {
  const auto table = static_cast<int32_t>(id.where() / kMostMiniatureSets);
  const int64_t to = begin_of(batch, table) + atomicAdd(&numbers[table], 1u);
  if (to < batch.num_ids) list[to] = id;  // invalid offsets may say otherwise
}

__global__ void __launch_bounds__(kThreads)
    sample_kernel(const TableView* __restrict__ tables, const Batch batch, const Visit visit,
                  Listed* __restrict__ list, uint32_t* __restrict__ numbers) {
  __shared__ Joins joins;
  enter_chain();
  bool looks = false;  // whether the miniatures of some table look on
  for (int32_t f = threadIdx.x; f < batch.num_features; f += kThreads) {
    const int32_t t = batch.feature_tables[f];
    looks |= t < kMostTables && miniatures_look_on(tables[t]);
  }
  if (!__syncthreads_or(looks)) return;
  joins.clear();
  __syncthreads();
#pragma unroll 1
  for (int round = 0; round < kSampleRounds; ++round) {
    const int64_t at =
        (static_cast<int64_t>(blockIdx.x) * kSampleRounds + round) * kThreads + threadIdx.x;
    const int32_t feature = feature_of_lane(batch, at);
    SampledId id{};
    bool sampled = false;
    if (at < batch.num_ids) {
      const int32_t t = batch.feature_tables[feature];
      sampled = t < kMostTables && miniatures_look_on(tables[t]) &&
                tables[t].miniatures.sample(batch.ids[at], visit.given(at), t, &id);
    }
    const unsigned all = __ballot_sync(kAllLanes, sampled);
    if (sampled) {
      const unsigned equal =
          __match_any_sync(all, static_cast<unsigned long long>(id.where) << 32 | id.tag);
      id.given = saturated_sum(equal, id.given);
      const auto number = static_cast<uint32_t>(__popc(equal));
      const bool leads =
          __ffs(static_cast<int>(equal)) - 1 == static_cast<int>(threadIdx.x % kWarp);
      if (leads && !joins.add(id, number)) {
        append(batch, Listed::make(id.where, id.tag, id.given, number), list, numbers);
      }
    }
    __syncwarp();
  }
  __syncthreads();
  for (int i = threadIdx.x; i < kJoined; i += kThreads) {
    if (joins.keys[i] == 0) continue;
    append(batch,
           Listed::make(static_cast<uint32_t>(joins.keys[i] >> 32),
                        static_cast<uint32_t>(joins.keys[i]), saturated(joins.given[i]),
                        joins.positions[i]),
           list, numbers);
  }
}

}  // namespace torchrec_hkv::hash_table::cuda
