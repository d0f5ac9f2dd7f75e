// Finding on the GPU. Four lanes share an id, each reading 32 of a line's 128 bytes, and work on
// two ids at once, so that their loads overlap; the second bucket is read only where the first has
// no match. On an H200, 2^20 of 2^26 ids: 66 us at load 0.5 and 92 us at load 1; without the bound
// on registers 70 and 100, with one id in flight 74 and 104, with eight lanes 81 and 120 at best.
#include "common/cuda_check.h"
#include "hash_table/bucket_cuda.cuh"
#include "hash_table/find_cuda.cuh"
#include "hash_table/kernels.h"

namespace torchrec_hkv::hash_table::cuda {
namespace {

constexpr int kFindLanes = 4;
constexpr int kIdsInFlight = 2;
constexpr int kVectors = kLineVectors / kFindLanes;  // a lane reads
constexpr int kResidentBlocks = 5;                   // a multiprocessor

enum Stage : int { kFirstBucket, kSecondBucket, kDone };

// One id on its way, as one of its lanes sees it.
struct Probe {
  int64_t id;
  const TableView* table;
  uint32_t bucket;
  uint32_t other_bucket;
  uint16_t digest;
  Stage stage;
  uint32_t matches;  // of the lane's 16 digests, those to look at
  uint4 digests[kVectors];
};

__device__ __forceinline__ void load_digests(Probe& probe, int lane) {
  const uint4* line = reinterpret_cast<const uint4*>(digest_line(*probe.table, probe.bucket));
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    probe.digests[v] = load_vector_once(line + v * kFindLanes + lane);
  }
}

__device__ __forceinline__ void match_digests(Probe& probe) {
  probe.matches = 0;
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    probe.matches |= match_vector(probe.digests[v], probe.digest) << (v * kVectorDigests);
  }
}

// Slot of the lane's match number `bit`.
__device__ __forceinline__ int64_t slot_of(const Probe& probe, int bit, int lane) {
  const int position =
      (bit / kVectorDigests * kFindLanes + lane) * kVectorDigests + bit % kVectorDigests;
  return static_cast<int64_t>(probe.bucket) * probe.table->bucket_slots + position;
}

// kOneTable: the view comes with the launch and not from memory.
template <bool kTouch, bool kOneTable>
__global__ void __launch_bounds__(kThreads, kResidentBlocks)
    find_kernel(__grid_constant__ const TableView only, const TableView* __restrict__ tables,
                const Batch batch, const Visit visit, int64_t* __restrict__ slots,
                bool* __restrict__ found_at) {
  const int lane = threadIdx.x % kFindLanes;
  const int first_lane = threadIdx.x % kWarp - lane;
  const int64_t first =
      (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) / kFindLanes * kIdsInFlight;
  Probe probes[kIdsInFlight];
#pragma unroll
  for (int k = 0; k < kIdsInFlight; ++k) {
    Probe& probe = probes[k];
    probe.stage = first + k < batch.num_ids ? kFirstBucket : kDone;
    probe.matches = 0;
    probe.id = probe.stage == kDone ? 0 : batch.ids[first + k];
  }
#pragma unroll
  for (int k = 0; k < kIdsInFlight; ++k) {
    Probe& probe = probes[k];
    if (probe.stage == kDone) continue;
    probe.table = kOneTable ? &only : tables + batch.feature_tables[batch.feature_of(first + k)];
    const BucketChoice choice = choose_buckets(probe.id, probe.table->num_buckets);
    probe.bucket = choice.first;
    probe.other_bucket = choice.second;
    probe.digest = choice.digest;
    load_digests(probe, lane);
  }
#pragma unroll
  for (int k = 0; k < kIdsInFlight; ++k) {
    if (probes[k].stage != kDone) match_digests(probes[k]);
  }
  // Each turn looks at one match of each lane.
  for (bool working = true; working;) {
    int64_t candidates[kIdsInFlight];
    int64_t stored[kIdsInFlight];
#pragma unroll
    for (int k = 0; k < kIdsInFlight; ++k) {
      Probe& probe = probes[k];
      candidates[k] = kNoSlot;
      if (probe.matches != 0) {
        candidates[k] = slot_of(probe, __ffs(static_cast<int>(probe.matches)) - 1, lane);
        probe.matches &= probe.matches - 1;
        stored[k] = probe.table->ids[candidates[k]];
      }
    }
    bool second[kIdsInFlight];
    working = false;
#pragma unroll
    for (int k = 0; k < kIdsInFlight; ++k) {
      Probe& probe = probes[k];
      const bool hit = candidates[k] != kNoSlot && stored[k] == probe.id;
      constexpr unsigned kTile = (1u << kFindLanes) - 1;
      const bool found = __ballot_sync(kAllLanes, hit) >> first_lane & kTile;
      const bool more = __ballot_sync(kAllLanes, probe.matches != 0) >> first_lane & kTile;
      second[k] = false;
      if (probe.stage == kDone) continue;
      if (hit) {
        slots[first + k] = probe.table->first_slot + candidates[k];
        if (kTouch) {
          touch(*probe.table, candidates[k], visit, visit.given(first + k));
          if (found_at != nullptr) found_at[first + k] = true;
        }
      }
      if (found) {
        probe.stage = kDone;
        probe.matches = 0;
      } else if (!more && probe.stage == kFirstBucket) {
        probe.stage = kSecondBucket;
        probe.bucket = probe.other_bucket;
        load_digests(probe, lane);
        second[k] = true;
      } else if (!more) {
        probe.stage = kDone;
        if (lane == 0) {
          slots[first + k] = kNoSlot;
          if (kTouch && found_at != nullptr) found_at[first + k] = false;
        }
      }
    }
#pragma unroll
    for (int k = 0; k < kIdsInFlight; ++k) {
      if (second[k]) match_digests(probes[k]);
      working |= probes[k].stage != kDone;
    }
    working = __any_sync(kAllLanes, working);
  }
}

template <bool kTouch>
void launch_find(const TableView* tables, const TableView* only, const Batch& batch,
                 const Visit& visit, int64_t* slots, bool* found_at, cudaStream_t stream) {
  if (batch.num_ids == 0) return;
  const unsigned grid = grid_for((batch.num_ids + kIdsInFlight - 1) / kIdsInFlight * kFindLanes);
  if (only != nullptr) {
    find_kernel<kTouch, true>
        <<<grid, kThreads, 0, stream>>>(*only, nullptr, batch, visit, slots, found_at);
  } else {
    find_kernel<kTouch, false>
        <<<grid, kThreads, 0, stream>>>(TableView{}, tables, batch, visit, slots, found_at);
  }
  HKV_CUDA_CHECK_LAUNCH();
}

}  // namespace

void find(const TableView* tables, const TableView* only, const Batch& batch, int64_t* slots,
          cudaStream_t stream) {
  launch_find<false>(tables, only, batch, Visit{}, slots, nullptr, stream);
}

void find_and_touch(const TableView* tables, const TableView* only, const Batch& batch,
                    const Visit& visit, int64_t* slots, bool* found, cudaStream_t stream) {
  launch_find<true>(tables, only, batch, visit, slots, found, stream);
}

}  // namespace torchrec_hkv::hash_table::cuda
