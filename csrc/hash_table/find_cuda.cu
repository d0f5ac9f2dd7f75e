#include "common/cuda_check.h"
#include "hash_table/bucket_cuda.cuh"
#include "hash_table/find_cuda.cuh"
#include "hash_table/kernels.h"

namespace torchrec_hkv::hash_table::cuda {
namespace {

// Eight lanes an id: each reads 16 bytes of the first bucket's digests, tests the slots that match,
// and goes on to the second bucket only where the first has none.
template <bool kTouch>
__global__ void __launch_bounds__(kThreads)
    find_kernel(const TableView* __restrict__ tables, Batch batch, Visit visit,
                int64_t* __restrict__ slots, bool* __restrict__ found_at) {
  const int lane = threadIdx.x % kLineLanes;
  const int64_t position = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) / kLineLanes;
  const bool valid = position < batch.num_ids;
  const unsigned tile = 0xffu << (threadIdx.x % kWarp / kLineLanes * kLineLanes);
  int32_t table_index = -1;
  bool hit = false;
  if (valid) {
    table_index = batch.feature_tables[batch.feature_of(position)];
    const TableView& table = tables[table_index];
    const int64_t id = batch.ids[position];
    const BucketChoice choice = choose_buckets(id, table.num_buckets);
    int64_t slot = kNoSlot;
    uint32_t bucket = choice.first;
    for (int turn = 0; turn < 2; ++turn, bucket = choice.second) {
      const uint4 line = reinterpret_cast<const uint4*>(
          table.digests + static_cast<int64_t>(bucket) * kBucketDigests)[lane];
      const int64_t base = static_cast<int64_t>(bucket) * table.bucket_slots + lane * kLaneDigests;
      int64_t mine = kNoSlot;
      for (uint32_t mask = match_lane(line, choice.digest); mask; mask &= mask - 1) {
        const int64_t candidate = base + __ffs(static_cast<int>(mask)) - 1;
        if (table.ids[candidate] == id) mine = candidate;
      }
      const unsigned found = __ballot_sync(tile, mine != kNoSlot);
      if (found) {
        slot = __shfl_sync(tile, mine, __ffs(static_cast<int>(found)) - 1);
        break;
      }
    }
    hit = slot != kNoSlot;
    if (lane == 0) {
      slots[position] = hit ? table.first_slot + slot : kNoSlot;
      if (kTouch && hit) touch(table, slot, visit, visit.given(position));
      if (kTouch && found_at != nullptr) found_at[position] = hit;
    }
  }
  if (kTouch) {
    // One count a warp and table: neighbours mostly share their table.
    const bool leader = valid && lane == 0;
    unsigned left = __ballot_sync(kAllLanes, leader);
    while (left) {
      const int first = __ffs(static_cast<int>(left)) - 1;
      const int32_t its_table = __shfl_sync(kAllLanes, table_index, first);
      const bool same = leader && table_index == its_table;
      const unsigned peers = __ballot_sync(kAllLanes, same);
      const unsigned hits = __ballot_sync(kAllLanes, same && hit);
      if (threadIdx.x % kWarp == static_cast<unsigned>(first)) {
        count(tables[its_table], kLookups, __popc(peers));
        if (hits) count(tables[its_table], kHits, __popc(hits));
      }
      left &= ~peers;
    }
  }
}

template <bool kTouch>
void launch_find(const TableView* tables, const Batch& batch, const Visit& visit, int64_t* slots,
                 bool* found_at, cudaStream_t stream) {
  if (batch.num_ids == 0) return;
  find_kernel<kTouch><<<grid_for(batch.num_ids * kLineLanes), kThreads, 0, stream>>>(
      tables, batch, visit, slots, found_at);
  HKV_CUDA_CHECK_LAUNCH();
}

}  // namespace

void find(const TableView* tables, const Batch& batch, int64_t* slots, cudaStream_t stream) {
  launch_find<false>(tables, batch, Visit{}, slots, nullptr, stream);
}

void find_and_touch(const TableView* tables, const Batch& batch, const Visit& visit, int64_t* slots,
                    bool* found, cudaStream_t stream) {
  launch_find<true>(tables, batch, visit, slots, found, stream);
}

}  // namespace torchrec_hkv::hash_table::cuda
