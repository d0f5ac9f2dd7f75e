// The part of an insertion on the GPU that evicts: ids whose buckets are full take the slots of the
// entries of lowest rank. A tile of lanes searches for a victim; in packed tables, a thread
// (claim_oldest.cuh).
#include "common/cuda_check.h"
#include "common/dependent_launch.cuh"
#include "hash_table/cuda/bucket.cuh"
#include "hash_table/cuda/entry.cuh"
#include "hash_table/cuda/insert/claim_oldest.cuh"
#include "hash_table/cuda/insert/insert.cuh"
#include "hash_table/cuda/insert/missing_lists.cuh"
#include "hash_table/cuda/insert/new_row.cuh"
#include "hash_table/cuda/insert/place.cuh"
#include "hash_table/cuda/row_matrix.cuh"

namespace torchrec_hkv::hash_table::cuda {
namespace {

constexpr int kEvictBlocks = 3;  // per multiprocessor; this limits the registers

// Reserves an entry of `evicted_entries` for each lane that wants one, by one atomic per warp.
// Called by all lanes.
__device__ __forceinline__ int64_t reserve_evicted(const EvictedEntries& evicted_entries,
                                                   bool wanted) {
  const unsigned lanes = __ballot_sync(kAllLanes, wanted);
  const int lane = threadIdx.x % kWarp;
  unsigned long long begin = 0;
  if (lane == 0 && lanes != 0) {
    begin = atomicAdd(reinterpret_cast<unsigned long long*>(evicted_entries.number),
                      static_cast<unsigned long long>(__popc(lanes)));
  }
  begin = __shfl_sync(kAllLanes, begin, 0);
  return static_cast<int64_t>(begin) + __popc(lanes & ((1u << lane) - 1));
}

// Copies the row of each returned entry: that of the evicted entry, or the given row of a refused
// id.
template <bool kOneTable>
__device__ __forceinline__ void copy_evicted_rows(const TableView* lane_table,
                                                  const Placement& placement, int64_t position,
                                                  int64_t slot, int64_t number) {
  constexpr int kTiles = kWarp / kTile;
  const int lane = threadIdx.x % kTile;
  const int tile = threadIdx.x % kWarp / kTile;
  const RowMatrix& given = placement.given_rows;
  for (unsigned remaining = __ballot_sync(kAllLanes, number >= 0); remaining;) {
    const int source = nth_lane(remaining, tile);
    const int64_t source_number = __shfl_sync(kAllLanes, number, source);
    const int64_t source_slot = __shfl_sync(kAllLanes, slot, source);
    const int64_t source_position = __shfl_sync(kAllLanes, position, source);
    const TableView* table = table_of_lane<kOneTable>(lane_table, source);
    if (tile < __popc(remaining)) {
      const bool refused = source_slot == kNoSlot;
      copy_to_matrix<kTile>(
          placement.evicted_entries.rows, source_number, refused ? given.type : table->rows.type,
          refused ? given.at(source_position) : table->row(source_slot), table->dim(), lane);
    }
#pragma unroll
    for (int t = 0; t < kTiles; ++t) remaining &= remaining - 1;
  }
  __syncwarp();  // the row that was read may be overwritten
}

// A lane's request for a slot, and the result.
struct SlotRequest {
  const TableView* table;
  uint64_t score;
  BucketChoice choice;
  SlotClaim claim;
};

// Prefetches the ranks in both buckets of the id requests[at], if at < busy. This happens shortly
// before they are read, because the buckets of all warps do not fit L2. Called by a tile, whose
// first two lanes prefetch one bucket each. kOldest: as in claim_oldest.
template <bool kOldest, bool kOneTable>
__device__ __forceinline__ void prefetch_ranks(const SlotRequest* requests, int at, int busy,
                                               int lane) {
  if (lane > 1 || at >= busy) return;
  const TableView& table = stored_table<kOneTable>(requests[at].table);
  // A prefetch must be aligned to 16 bytes.
  if (!kOldest && table.bucket_slots != kBucketDigests) return;
  const BucketChoice& choice = requests[at].choice;
  const int64_t first =
      static_cast<int64_t>(lane == 0 ? choice.first : choice.second) * kBucketDigests;
  prefetch_l2(table.last_steps + first, kBucketDigests * sizeof(uint32_t));
  if (!kOldest && table.scores != nullptr) {
    prefetch_l2(table.scores + first, kBucketDigests * sizeof(uint64_t));
  }
}

// A lane's share of the last steps in both buckets of an id, of 64 slots each.
struct BucketSteps {
  static constexpr int kVectors = kBucketDigests / 4 / kVictimLanes;  // of a bucket
  uint4 v[2 * kVectors];

  __device__ __forceinline__ BucketSteps(const TableView& table, const BucketChoice& choice,
                                         int lane) {
#pragma unroll
    for (int k = 0; k < 2 * kVectors; ++k) {
      const int64_t bucket = k < kVectors ? choice.first : choice.second;
      v[k] = load_vector_l2(table.last_steps + bucket * kBucketDigests +
                            (k % kVectors * kVictimLanes + lane) * 4);
    }
  }
  // The lowest step of the tile. *position: its position, 0 to 63 in the first bucket, 64 to 127 in
  // the second; the first of equal ones. Called by all lanes of a warp.
  __device__ __forceinline__ uint32_t lowest(int lane, uint32_t* position) const {
    uint32_t lowest_step = kFreeStep;
#pragma unroll
    for (const uint4& four : v) {
      lowest_step = min(min(lowest_step, four.x), four.y);
      lowest_step = min(min(lowest_step, four.z), four.w);
    }
#pragma unroll
    for (int offset = kVictimLanes / 2; offset; offset /= 2) {
      lowest_step = min(lowest_step, __shfl_xor_sync(kAllLanes, lowest_step, offset));
    }
    uint32_t at = 2 * kBucketDigests;
#pragma unroll
    for (int k = 2 * kVectors - 1; k >= 0; --k) {
      const uint32_t first =
          k / kVectors * kBucketDigests + (k % kVectors * kVictimLanes + lane) * 4;
      if (v[k].w == lowest_step) at = first + 3;
      if (v[k].z == lowest_step) at = first + 2;
      if (v[k].y == lowest_step) at = first + 1;
      if (v[k].x == lowest_step) at = first;
    }
#pragma unroll
    for (int offset = kVictimLanes / 2; offset; offset /= 2) {
      at = min(at, __shfl_xor_sync(kAllLanes, at, offset));
    }
    *position = at;
    return lowest_step;
  }
};

// Serves the first `busy` requests, one tile per request, if scores are last steps and buckets have
// 64 slots. Loads the steps of the next request during the present one. Called by all lanes.
template <bool kOneTable>
__device__ __forceinline__ void claim_oldest(SlotRequest* requests, int busy,
                                             const CallContext& context) {
  constexpr int kTiles = kWarp / kVictimLanes;
  const int lane = threadIdx.x % kVictimLanes;
  const int tile = threadIdx.x % kWarp / kVictimLanes;
  const unsigned lanes = ((1ull << kVictimLanes) - 1) << (tile * kVictimLanes);
  const uint32_t now = context.now(), pinned_from = context.pinned_from();
  const auto steps_of = [&](int at) {
    const SlotRequest& request = requests[min(at, busy - 1)];
    return BucketSteps(stored_table<kOneTable>(request.table), request.choice, lane);
  };
  BucketSteps steps = steps_of(tile);
  prefetch_ranks<true, kOneTable>(requests, tile + kTiles, busy, lane);
#pragma unroll 1
  for (int at = tile; at - tile < busy; at += kTiles) {
    SlotRequest& request = requests[min(at, busy - 1)];
    bool working = at < busy;
    prefetch_ranks<true, kOneTable>(requests, at + 2 * kTiles, busy, lane);
    for (;;) {
      uint32_t position = 0;
      const uint32_t lowest_step = steps.lowest(lane, &position);
      if (at - tile + kTiles < busy) steps = steps_of(at + kTiles);
      bool claim_failed = false;
      if (working && lane == 0) {
        request.claim = SlotClaim{kAllPinned, kNoSlot, 0};
        if (lowest_step < pinned_from) {
          const int64_t bucket =
              position < kBucketDigests ? request.choice.first : request.choice.second;
          const int64_t slot = bucket * kBucketDigests + position % kBucketDigests;
          const TableView& table = stored_table<kOneTable>(request.table);
          claim_failed = atomicCAS(&table.last_steps[slot], lowest_step, now) != lowest_step;
          if (!claim_failed) {
            store_l2(&table.digests[slot], request.choice.digest);
            request.claim = SlotClaim{kReplaced, slot, lowest_step};
          }
        }
      }
      const unsigned failed_lanes = __ballot_sync(kAllLanes, claim_failed);
      if (failed_lanes == 0) break;
      working = (failed_lanes & lanes) != 0;
      steps = steps_of(at);
    }
  }
}

// As claim_oldest, for any tables and without loading ahead. Called by all lanes.
template <bool kOneTable>
__device__ __forceinline__ void claim_lowest(SlotRequest* requests, int busy,
                                             const CallContext& context, RefuseLower refuse_lower) {
  constexpr int kTiles = kWarp / kVictimLanes;
  const int lane = threadIdx.x % kVictimLanes;
  const int tile = threadIdx.x % kWarp / kVictimLanes;
  const unsigned lanes = ((1ull << kVictimLanes) - 1) << (tile * kVictimLanes);
  prefetch_ranks<false, kOneTable>(requests, tile, busy, lane);
#pragma unroll 1
  for (int at = tile; at - tile < busy; at += kTiles) {
    SlotRequest& request = requests[min(at, busy - 1)];
    const TableView& table = stored_table<kOneTable>(request.table);
    bool working = at < busy;
    prefetch_ranks<false, kOneTable>(requests, at + kTiles, busy, lane);
    for (;;) {
      const Victim victim =
          victim_of_tile(lowest_of_lane(table, request.choice, context.pinned_from(), lane), table,
                         request.choice, kAllLanes);
      const bool claim_failed = working && lane == 0 &&
                                !claim_victim(table, request.choice, request.score, context,
                                              refuse_lower, victim, &request.claim);
      const unsigned failed_lanes = __ballot_sync(kAllLanes, claim_failed);
      if (failed_lanes == 0) break;
      working = (failed_lanes & lanes) != 0;
    }
  }
}

// kReturnEvicted: lists evicted and refused entries. kPacked: packed entries, one table.
template <NewRows kRows, bool kOneTable, bool kReturnEvicted, bool kPacked>
__global__ void __launch_bounds__(kThreads, kEvictBlocks)
    evict_kernel(const __grid_constant__ TableView only, const TableView* __restrict__ tables,
                 const Batch batch, const CallContext context, const Placement placement,
                 int64_t* slots, bool* writer, const MissingLists missing, bool deduplicated) {
  // The rows of a warp reuse the memory of its claims.
  __shared__ union OfWarp {
    SlotRequest requests[kWarp];
    RowToWrite rows[kWarp];
  } of_warps[kThreads / kWarp];
  OfWarp& of_warp = of_warps[threadIdx.x / kWarp];
  SlotRequest* const requests = of_warp.requests;
  const int warp_lane = threadIdx.x % kWarp;
  let_next_kernel_start();
  wait_for_kernel_before();
  const uint4 words = missing.words();
  if (words.y == 0 && words.z == 0) return;  // no id has full buckets
  WarpCounter<kOneTable, kMisses> misses;
  WarpCounter<kOneTable, kInserted> inserted;
  WarpCounter<kOneTable, kEvicted> evicted;
  WarpCounter<kOneTable, kRefused> refused;
#pragma unroll 1
  for (const bool second : {true, false}) {
    if (!second && words.z == 0) break;
    const int64_t number = second ? words.y : words.x;
    for (WarpEvenShare even_share(number, even_lanes(number, kWarp / kVictimLanes));
         even_share.more(); even_share.next()) {
      bool listed = warp_lane < even_share.busy();
      const int64_t position = listed ? missing.listed(second, even_share.at()) : 0;
      const int64_t was = listed ? slots[position] : 0;
      const bool is_returning = listed && was == kReturningToFull;
      const bool chosen = is_returning || (listed && was == kChosenFromFull);
      if (!second) listed = chosen;  // insert_kernel has placed the others
      const TableView* lane_table = kOneTable ? &only : tables;
      if (!kOneTable && listed) lane_table = &table_at(tables, batch, position);
      const TableView& table = kOneTable ? only : *lane_table;
      misses.add(lane_table, listed && !chosen);
      bool busy = chosen || (listed && is_missing(was));
      int64_t id = 0;
      BucketChoice choice{};
      if (busy) {
        id = batch.ids[position];
        choice = choose_buckets(id, table.num_buckets);
        if (!chosen && !deduplicated) {
          busy = is_representative<kOneTable>(missing, tables, table, batch, slots, position, id);
        }
      }
      uint64_t score = 0;
      SlotClaim claim{kAllPinned, kNoSlot, 0};
      const unsigned lanes = __ballot_sync(kAllLanes, busy);
      if (lanes == 0) continue;
      if (busy) {
        score =
            first_score(table.eviction, context.now(), context.epoch(), context.given(position));
      }
      if (kPacked) {
        // Its score, the present step, is never too low.
        if (busy) claim = claim_oldest_packed(table, choice, context.now(), context.pinned_from());
        __syncwarp();
      } else {
        const int num_requests = __popc(lanes);
        SlotRequest& request = requests[__popc(lanes & ((1u << warp_lane) - 1))];
        if (busy) {
          request.table = lane_table;
          request.score = score;
          request.choice = choice;
        }
        const bool oldest = table.scores == nullptr && table.bucket_slots == kBucketDigests;
        __syncwarp();
        if (__all_sync(kAllLanes, oldest || !busy)) {
          claim_oldest<kOneTable>(requests, num_requests,
                                  context);  // as above, scores are never too low
        } else {
          claim_lowest<kOneTable>(requests, num_requests, context, placement.refuse_lower);
        }
        __syncwarp();
        if (busy) claim = request.claim;
        __syncwarp();
      }
      const bool placed = busy && claim.slot != kNoSlot;
      if (kPacked && busy) id = batch.ids[position];  // reloaded to save registers
      // Loaded before the counters are updated, which hides the latency.
      const bool remembers = placed && table.evicted.marks != nullptr;
      int64_t evicted_id = 0;
      if (kPacked) {
        // The slot still has the evicted id's digest, a part of its hash.
        if (remembers || (kReturnEvicted && placed)) evicted_id = packed_id_of(table, claim.slot);
      } else if (remembers) {
        evicted_id = table.ids[claim.slot];
      }
      inserted.add(lane_table, placed);
      evicted.add(lane_table, placed);
      refused.add(lane_table, busy && !placed);
      if (missing.counts_returning) count_warp(lane_table, kReturned, placed && is_returning);
      count_warp(lane_table, kCrowded, busy && claim.outcome == kAllPinned);
      if (kReturnEvicted) {
        int64_t evicted_at = reserve_evicted(placement.evicted_entries, busy);
        if (busy) {
          placement.evicted_entries.ids[evicted_at] = !placed   ? id
                                                      : kPacked ? evicted_id
                                                                : table.ids[claim.slot];
          placement.evicted_entries.scores[evicted_at] = placed ? claim.replaced_score : score;
          if (!kOneTable)
            placement.evicted_entries.tables[evicted_at] =
                static_cast<int32_t>(lane_table - tables);
        } else {
          evicted_at = -1;
        }
        copy_evicted_rows<kOneTable>(lane_table, placement, position, claim.slot, evicted_at);
      }
      if (placed) {
        slots[position] = table.first_slot + claim.slot;
        if (writer != nullptr) writer[position] = true;
        if (missing.placed != nullptr) missing.placed[position] = true;
        if (kPacked) {
          store_l2(digest_of_slot(table, claim.slot), choice.digest);
          write_packed_id(entry_of(table, claim.slot), hash_of_id(id));
        } else {
          table.ids[claim.slot] = id;
        }
        if (table.scores != nullptr) table.scores[claim.slot] = score;
        if (remembers) {
          const EvictedMemory::MarkPosition to = table.evicted.mark_position(evicted_id);
          table.evicted.marks[to.entry] = to.mark;
        }
      } else if (busy) {
        slots[position] = kNoSlot;
      }
      write_rows_of_warp<kRows, kOneTable>(of_warp.rows, lane_table, placed, id, claim.slot);
    }
  }
  misses.finish(only);
  inserted.finish(only);
  evicted.finish(only);
  refused.finish(only);
}

using EvictKernel = void (*)(const TableView, const TableView*, const Batch, const CallContext,
                             const Placement, int64_t*, bool*, const MissingLists, bool);

// Evicted entries are returned only if rows are assigned, and then no rows are initialised.
template <bool kOneTable, bool kPacked>
EvictKernel choose_evict_kernel(const Placement& placement) {
  if (placement.evicted_entries.number != nullptr) {
    return evict_kernel<NewRows::kUntouched, kOneTable, true, kPacked>;
  }
  switch (placement.rows) {
    case NewRows::kUntouched:
      return evict_kernel<NewRows::kUntouched, kOneTable, false, kPacked>;
    case NewRows::kUniform:
      return evict_kernel<NewRows::kUniform, kOneTable, false, kPacked>;
    case NewRows::kInitialAny:
      return evict_kernel<NewRows::kInitialAny, kOneTable, false, kPacked>;
    default:
      return evict_kernel<NewRows::kInitial, kOneTable, false, kPacked>;
  }
}
EvictKernel choose_evict_kernel(const TableView* only, const Placement& placement) {
  if (only == nullptr) return choose_evict_kernel<false, false>(placement);
  return only->entries.words != nullptr ? choose_evict_kernel<true, true>(placement)
                                        : choose_evict_kernel<true, false>(placement);
}

}  // namespace

void evict_for_missing(const TableView* tables, const TableView* only, const Batch& batch,
                       const CallContext& context, const Placement& placement, int64_t* slots,
                       bool* writer, const MissingLists& missing, bool deduplicated,
                       cudaStream_t stream) {
  const EvictKernel evict = choose_evict_kernel(only, placement);
  launch_dependent(evict, min(grid_for(batch.num_ids), resident_blocks(evict)), kThreads, stream,
                   only != nullptr ? *only : TableView{}, tables, batch, context, placement, slots,
                   writer, missing, deduplicated);
}

}  // namespace torchrec_hkv::hash_table::cuda
