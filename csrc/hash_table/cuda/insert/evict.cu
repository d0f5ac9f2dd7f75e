// The part of an insertion on the GPU that evicts: ids whose buckets are full take the slots of the
// entries of lowest rank. A tile of lanes searches for a victim; in packed tables, a thread
// (oldest.cuh).
#include "common/chain.cuh"
#include "common/cuda_check.h"
#include "hash_table/cuda/bucket.cuh"
#include "hash_table/cuda/entry.cuh"
#include "hash_table/cuda/insert/insert.cuh"
#include "hash_table/cuda/insert/missing.cuh"
#include "hash_table/cuda/insert/new_row.cuh"
#include "hash_table/cuda/insert/oldest.cuh"
#include "hash_table/cuda/insert/place.cuh"
#include "hash_table/cuda/row_matrix.cuh"

namespace torchrec_hkv::hash_table::cuda {
namespace {

constexpr int kEvictBlocks = 3;  // per multiprocessor; this limits the registers

// Reserves an entry of `leavers` for each lane that wants one, by one atomic per warp. Called by
// all lanes.
__device__ __forceinline__ int64_t leaver_number(const Leavers& leavers, bool wanted) {
  const unsigned lanes = __ballot_sync(kAllLanes, wanted);
  const int lane = threadIdx.x % kWarp;
  unsigned long long begin = 0;
  if (lane == 0 && lanes != 0) {
    begin = atomicAdd(reinterpret_cast<unsigned long long*>(leavers.number),
                      static_cast<unsigned long long>(__popc(lanes)));
  }
  begin = __shfl_sync(kAllLanes, begin, 0);
  return static_cast<int64_t>(begin) + __popc(lanes & ((1u << lane) - 1));
}

// Copies the row of each leaver: that of the evicted entry, or the given row of a refused id.
template <bool kOneTable>
__device__ __forceinline__ void copy_leavers_of_warp(const TableView* mine,
                                                     const Placement& placement, int64_t position,
                                                     int64_t slot, int64_t number) {
  constexpr int kTiles = kWarp / kTile;
  const int lane = threadIdx.x % kTile;
  const int tile = threadIdx.x % kWarp / kTile;
  const RowMatrix& given = placement.given_rows;
  for (unsigned left = __ballot_sync(kAllLanes, number >= 0); left;) {
    const int source = nth_lane(left, tile);
    const int64_t their_number = __shfl_sync(kAllLanes, number, source);
    const int64_t their_slot = __shfl_sync(kAllLanes, slot, source);
    const int64_t their_position = __shfl_sync(kAllLanes, position, source);
    const TableView* table = table_of_lane<kOneTable>(mine, source);
    if (tile < __popc(left)) {
      const bool refused = their_slot == kNoSlot;
      copy_to_matrix<kTile>(
          placement.leavers.rows, their_number, refused ? given.type : table->rows.type,
          refused ? given.at(their_position) : table->row(their_slot), table->dim(), lane);
    }
#pragma unroll
    for (int t = 0; t < kTiles; ++t) left &= left - 1;
  }
  __syncwarp();  // the row that was read may be overwritten
}

// A lane's request for a slot, and the result.
struct Claim {
  const TableView* table;
  uint64_t score;
  BucketChoice choice;
  Place place;
};

// Prefetches the ranks in both buckets of the id claims[at], if at < busy. This happens shortly
// before they are read, because the buckets of all warps do not fit L2. Called by a tile, whose
// first two lanes prefetch one bucket each. kOldest: as in claim_oldest.
template <bool kOldest, bool kOneTable>
__device__ __forceinline__ void prefetch_ranks(const Claim* claims, int at, int busy, int lane) {
  if (lane > 1 || at >= busy) return;
  const TableView& table = stored_table<kOneTable>(claims[at].table);
  // A prefetch must be aligned to 16 bytes.
  if (!kOldest && table.bucket_slots != kBucketDigests) return;
  const BucketChoice& choice = claims[at].choice;
  const int64_t first =
      static_cast<int64_t>(lane == 0 ? choice.first : choice.second) * kBucketDigests;
  prefetch_l2(table.last_steps + first, kBucketDigests * sizeof(uint32_t));
  if (!kOldest && table.scores != nullptr) {
    prefetch_l2(table.scores + first, kBucketDigests * sizeof(uint64_t));
  }
}

// A lane's share of the last steps in both buckets of an id, of 64 slots each.
struct Steps {
  static constexpr int kVectors = kBucketDigests / 4 / kVictimLanes;  // of a bucket
  uint4 v[2 * kVectors];

  __device__ __forceinline__ Steps(const TableView& table, const BucketChoice& choice, int lane) {
#pragma unroll
    for (int k = 0; k < 2 * kVectors; ++k) {
      const int64_t bucket = k < kVectors ? choice.first : choice.second;
      v[k] = load_vector_l2(table.last_steps + bucket * kBucketDigests +
                            (k % kVectors * kVictimLanes + lane) * 4);
    }
  }
  // The lowest step of the tile. *place: its position, 0 to 63 in the first bucket, 64 to 127 in
  // the second; the first of equal ones. Called by all lanes of a warp.
  __device__ __forceinline__ uint32_t lowest(int lane, uint32_t* place) const {
    uint32_t least = kFreeStep;
#pragma unroll
    for (const uint4& four : v) {
      least = min(min(least, four.x), four.y);
      least = min(min(least, four.z), four.w);
    }
#pragma unroll
    for (int offset = kVictimLanes / 2; offset; offset /= 2) {
      least = min(least, __shfl_xor_sync(kAllLanes, least, offset));
    }
    uint32_t at = 2 * kBucketDigests;
#pragma unroll
    for (int k = 2 * kVectors - 1; k >= 0; --k) {
      const uint32_t first =
          k / kVectors * kBucketDigests + (k % kVectors * kVictimLanes + lane) * 4;
      if (v[k].w == least) at = first + 3;
      if (v[k].z == least) at = first + 2;
      if (v[k].y == least) at = first + 1;
      if (v[k].x == least) at = first;
    }
#pragma unroll
    for (int offset = kVictimLanes / 2; offset; offset /= 2) {
      at = min(at, __shfl_xor_sync(kAllLanes, at, offset));
    }
    *place = at;
    return least;
  }
};

// Serves the first `busy` claims, one tile per claim, if scores are last steps and buckets have 64
// slots. Loads the steps of the next claim during the present one. Called by all lanes.
template <bool kOneTable>
__device__ __forceinline__ void claim_oldest(Claim* claims, int busy, const Visit& visit) {
  constexpr int kTiles = kWarp / kVictimLanes;
  const int lane = threadIdx.x % kVictimLanes;
  const int tile = threadIdx.x % kWarp / kVictimLanes;
  const unsigned lanes = ((1ull << kVictimLanes) - 1) << (tile * kVictimLanes);
  const uint32_t now = visit.now(), pinned_from = visit.pinned_from();
  const auto steps_of = [&](int at) {
    const Claim& claim = claims[min(at, busy - 1)];
    return Steps(stored_table<kOneTable>(claim.table), claim.choice, lane);
  };
  Steps steps = steps_of(tile);
  prefetch_ranks<true, kOneTable>(claims, tile + kTiles, busy, lane);
#pragma unroll 1
  for (int at = tile; at - tile < busy; at += kTiles) {
    Claim& mine = claims[min(at, busy - 1)];
    bool working = at < busy;
    prefetch_ranks<true, kOneTable>(claims, at + 2 * kTiles, busy, lane);
    for (;;) {
      uint32_t place = 0;
      const uint32_t least = steps.lowest(lane, &place);
      if (at - tile + kTiles < busy) steps = steps_of(at + kTiles);
      bool lost = false;
      if (working && lane == 0) {
        mine.place = Place{kNoRoom, kNoSlot, 0};
        if (least < pinned_from) {
          const int64_t bucket = place < kBucketDigests ? mine.choice.first : mine.choice.second;
          const int64_t slot = bucket * kBucketDigests + place % kBucketDigests;
          const TableView& table = stored_table<kOneTable>(mine.table);
          lost = atomicCAS(&table.last_steps[slot], least, now) != least;
          if (!lost) {
            store_l2(&table.digests[slot], mine.choice.digest);
            mine.place = Place{kReplaced, slot, least};
          }
        }
      }
      const unsigned losers = __ballot_sync(kAllLanes, lost);
      if (losers == 0) break;
      working = (losers & lanes) != 0;
      steps = steps_of(at);
    }
  }
}

// As claim_oldest, for any tables and without loading ahead. Called by all lanes.
template <bool kOneTable>
__device__ __forceinline__ void claim_lowest(Claim* claims, int busy, const Visit& visit,
                                             RefuseLower refuse_lower) {
  constexpr int kTiles = kWarp / kVictimLanes;
  const int lane = threadIdx.x % kVictimLanes;
  const int tile = threadIdx.x % kWarp / kVictimLanes;
  const unsigned lanes = ((1ull << kVictimLanes) - 1) << (tile * kVictimLanes);
  prefetch_ranks<false, kOneTable>(claims, tile, busy, lane);
#pragma unroll 1
  for (int at = tile; at - tile < busy; at += kTiles) {
    Claim& mine = claims[min(at, busy - 1)];
    const TableView& table = stored_table<kOneTable>(mine.table);
    bool working = at < busy;
    prefetch_ranks<false, kOneTable>(claims, at + kTiles, busy, lane);
    for (;;) {
      const Victim victim =
          victim_of_tile(lowest_of_lane(table, mine.choice, visit.pinned_from(), lane), table,
                         mine.choice, kAllLanes);
      const bool lost =
          working && lane == 0 &&
          !claim_victim(table, mine.choice, mine.score, visit, refuse_lower, victim, &mine.place);
      const unsigned losers = __ballot_sync(kAllLanes, lost);
      if (losers == 0) break;
      working = (losers & lanes) != 0;
    }
  }
}

// kLeavers: lists evicted and refused entries. kPacked: packed entries, one table.
template <NewRows kRows, bool kOneTable, bool kLeavers, bool kPacked>
__global__ void __launch_bounds__(kThreads, kEvictBlocks)
    evict_kernel(const __grid_constant__ TableView only, const TableView* __restrict__ tables,
                 const Batch batch, const Visit visit, const Placement placement, int64_t* slots,
                 bool* writer, const Missing missing, bool deduplicated) {
  // The rows of a warp reuse the memory of its claims.
  __shared__ union OfWarp {
    Claim claims[kWarp];
    RowToWrite rows[kWarp];
  } of_warps[kThreads / kWarp];
  OfWarp& of_warp = of_warps[threadIdx.x / kWarp];
  Claim* const claims = of_warp.claims;
  const int warp_lane = threadIdx.x % kWarp;
  let_next_kernel_start();
  wait_for_kernel_before();
  const uint4 words = missing.words();
  if (words.y == 0 && words.z == 0) return;  // no id has full buckets
  Tally<kOneTable, kMisses> misses;
  Tally<kOneTable, kInserted> inserted;
  Tally<kOneTable, kEvicted> evicted;
  Tally<kOneTable, kRefused> refused;
#pragma unroll 1
  for (const bool second : {true, false}) {
    if (!second && words.z == 0) break;
    const int64_t number = second ? words.y : words.x;
    for (Share share(number, even_lanes(number, kWarp / kVictimLanes)); share.more();
         share.next()) {
      bool listed = warp_lane < share.busy();
      const int64_t position = listed ? missing.listed(second, share.at()) : 0;
      const int64_t was = listed ? slots[position] : 0;
      const bool returns = listed && was == kReturningToFull;
      const bool chosen = returns || (listed && was == kChosenFromFull);
      if (!second) listed = chosen;  // insert_kernel has placed the others
      const TableView* mine = kOneTable ? &only : tables;
      if (!kOneTable && listed) mine = &table_at(tables, batch, position);
      const TableView& table = kOneTable ? only : *mine;
      misses.add(mine, listed && !chosen);
      bool busy = chosen || (listed && is_missing(was));
      int64_t id = 0;
      BucketChoice choice{};
      if (busy) {
        id = batch.ids[position];
        choice = choose_buckets(id, table.num_buckets);
        if (!chosen && !deduplicated) {
          busy = represents<kOneTable>(missing, tables, table, batch, slots, position, id);
        }
      }
      uint64_t score = 0;
      Place place{kNoRoom, kNoSlot, 0};
      const unsigned lanes = __ballot_sync(kAllLanes, busy);
      if (lanes == 0) continue;
      if (busy) {
        score = first_score(table.eviction, visit.now(), visit.epoch(), visit.given(position));
      }
      if (kPacked) {
        // Its score, the present step, is never too low.
        if (busy) place = claim_oldest_packed(table, choice, visit.now(), visit.pinned_from());
        __syncwarp();
      } else {
        const int asked = __popc(lanes);
        Claim& claim = claims[__popc(lanes & ((1u << warp_lane) - 1))];
        if (busy) {
          claim.table = mine;
          claim.score = score;
          claim.choice = choice;
        }
        const bool oldest = table.scores == nullptr && table.bucket_slots == kBucketDigests;
        __syncwarp();
        if (__all_sync(kAllLanes, oldest || !busy)) {
          claim_oldest<kOneTable>(claims, asked, visit);  // as above, scores are never too low
        } else {
          claim_lowest<kOneTable>(claims, asked, visit, placement.refuse_lower);
        }
        __syncwarp();
        if (busy) place = claim.place;
        __syncwarp();
      }
      const bool placed = busy && place.slot != kNoSlot;
      if (kPacked && busy) id = batch.ids[position];  // reloaded to save registers
      // Loaded before the counters are updated, which hides the latency.
      const bool remembers = placed && table.evicted.marks != nullptr;
      int64_t leaver = 0;
      if (kPacked) {
        // The slot still has the evicted id's digest, a part of its hash.
        if (remembers || (kLeavers && placed)) leaver = packed_id_of(table, place.slot);
      } else if (remembers) {
        leaver = table.ids[place.slot];
      }
      inserted.add(mine, placed);
      evicted.add(mine, placed);
      refused.add(mine, busy && !placed);
      if (missing.returns) count_warp(mine, kReturned, placed && returns);
      count_warp(mine, kCrowded, busy && place.fate == kNoRoom);
      if (kLeavers) {
        int64_t leaver_at = leaver_number(placement.leavers, busy);
        if (busy) {
          placement.leavers.ids[leaver_at] = !placed   ? id
                                             : kPacked ? leaver
                                                       : table.ids[place.slot];
          placement.leavers.scores[leaver_at] = placed ? place.replaced_score : score;
          if (!kOneTable) placement.leavers.tables[leaver_at] = static_cast<int32_t>(mine - tables);
        } else {
          leaver_at = -1;
        }
        copy_leavers_of_warp<kOneTable>(mine, placement, position, place.slot, leaver_at);
      }
      if (placed) {
        slots[position] = table.first_slot + place.slot;
        if (writer != nullptr) writer[position] = true;
        if (missing.placed != nullptr) missing.placed[position] = true;
        if (kPacked) {
          store_l2(digest_of_slot(table, place.slot), choice.digest);
          write_packed_id(entry_of(table, place.slot), hash_of_id(id));
        } else {
          table.ids[place.slot] = id;
        }
        if (table.scores != nullptr) table.scores[place.slot] = score;
        if (remembers) {
          const EvictedMemory::Place to = table.evicted.place_of(leaver);
          table.evicted.marks[to.entry] = to.mark;
        }
      } else if (busy) {
        slots[position] = kNoSlot;
      }
      write_rows_of_warp<kRows, kOneTable>(of_warp.rows, mine, placed, id, place.slot);
    }
  }
  misses.finish(only);
  inserted.finish(only);
  evicted.finish(only);
  refused.finish(only);
}

using EvictKernel = void (*)(const TableView, const TableView*, const Batch, const Visit,
                             const Placement, int64_t*, bool*, const Missing, bool);

// Leavers are returned only if rows are assigned, and then no rows are initialised.
template <bool kOneTable, bool kPacked>
EvictKernel choose_evict_kernel(const Placement& placement) {
  if (placement.leavers.number != nullptr) {
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
                       const Visit& visit, const Placement& placement, int64_t* slots, bool* writer,
                       const Missing& missing, bool deduplicated, cudaStream_t stream) {
  const EvictKernel evict = choose_evict_kernel(only, placement);
  launch_chained(evict, min(grid_for(batch.num_ids), resident_blocks(evict)), kThreads, stream,
                 only != nullptr ? *only : TableView{}, tables, batch, visit, placement, slots,
                 writer, missing, deduplicated);
}

}  // namespace torchrec_hkv::hash_table::cuda
