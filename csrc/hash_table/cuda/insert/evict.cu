// The part of an insertion on the GPU that evicts: ids whose buckets are full take the places of
// the lowest ranks. Where scores are last steps a thread looks for a victim, which has to read few
// of them; otherwise a tile of lanes does, which reads all.
#include "common/chain.cuh"
#include "common/cuda_check.h"
#include "hash_table/cuda/bucket.cuh"
#include "hash_table/cuda/entry.cuh"
#include "hash_table/cuda/insert/insert.cuh"
#include "hash_table/cuda/insert/missing.cuh"
#include "hash_table/cuda/insert/new_row.cuh"
#include "hash_table/cuda/insert/place.cuh"
#include "hash_table/cuda/row_matrix.cuh"

namespace torchrec_hkv::hash_table::cuda {
namespace {

constexpr int kEvictBlocks = 3;  // of a multiprocessor, which bound the registers

// Gives each lane that wants one a place among the leavers: one atomic a warp. All lanes.
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

// The row of a leaver: of the entry that leaves, or, for a refused id, the one it came with.
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
  __syncwarp();  // what was read may be written
}

// The two lowest last steps of a group of slots, and where in it the lowest is; of equal ones the
// first.
struct Oldest {
  uint32_t step = kFreeStep;
  uint32_t next = kFreeStep;
  uint32_t at = 0;

  __device__ __forceinline__ void look_at(uint32_t other, uint32_t its_place) {
    next = min(next, max(step, other));
    if (other < step) at = its_place;
    step = min(step, other);
  }
};

__device__ __forceinline__ Oldest oldest_of(const uint32_t* sectors, int number) {
  uint4 steps[kGroupSectors];
#pragma unroll
  for (int k = 0; k < kGroupSectors; ++k) {
    steps[k] = uint4{kFreeStep, kFreeStep, kFreeStep, 0};
    if (k < number) steps[k] = load_vector_l2(sectors + k * kSectorWords);
  }
  Oldest oldest;
#pragma unroll
  for (int k = 0; k < kGroupSectors; ++k) {
    oldest.look_at(steps[k].x, k * kSectorSlots);
    oldest.look_at(steps[k].y, k * kSectorSlots + 1);
    oldest.look_at(steps[k].z, k * kSectorSlots + 2);
  }
  return oldest;
}

// Claims the place of the oldest entry in both buckets, where scores are last steps. Mostly one
// group of slots is looked at, that whose oldest entry is said to be the oldest of all: if no other
// group can have an older one, it is. By one thread. What a table says of its groups is never
// wrong, since last steps only grow; where it is no longer right, it is put right here.
__device__ __forceinline__ Place claim_oldest(const TableView& table, const BucketChoice& choice,
                                              uint32_t now, uint32_t pinned_from) {
  for (;;) {
    uint32_t bounds[2 * kGroups];
#pragma unroll
    for (int b = 0; b < 2; ++b) {
      const uint4 of_bucket = load_vector_l2(
          table.oldest + static_cast<int64_t>(b == 0 ? choice.first : choice.second) * kGroups);
      bounds[b * kGroups] = of_bucket.x;
      bounds[b * kGroups + 1] = of_bucket.y;
      bounds[b * kGroups + 2] = of_bucket.z;
      bounds[b * kGroups + 3] = of_bucket.w;
    }
    int group = 0;
    uint32_t least = bounds[0];
#pragma unroll
    for (int g = 1; g < 2 * kGroups; ++g) {
      if (bounds[g] < least) group = g;
      least = min(least, bounds[g]);
    }
    const uint32_t bucket = group < kGroups ? choice.first : choice.second;
    const int first_sector = group % kGroups * kGroupSectors;
    const Oldest oldest = oldest_of(table.entries.sectors_of(bucket) + first_sector * kSectorWords,
                                    table.entries.bucket_sectors - first_sector);
    // Among equals that of the first bucket is taken, and there the first.
    const bool pinned = oldest.step >= pinned_from;
    bool decided = true;
#pragma unroll
    for (int g = 0; g < 2 * kGroups; ++g) {
      const uint32_t below = pinned ? pinned_from : oldest.step + (g < group ? 1 : 0);
      decided &= g == group || bounds[g] >= below;
    }
    uint32_t* const bound = table.oldest + static_cast<int64_t>(bucket) * kGroups + group % kGroups;
    if (!decided || pinned) {
      atomicMax(bound, min(oldest.step, now));
      if (decided) return Place{kNoRoom, kNoSlot, 0};
      continue;
    }
    const uint32_t position = first_sector * kSectorSlots + oldest.at;
    if (atomicCAS(entry_at(table, bucket, position).step(), oldest.step, now) == oldest.step) {
      atomicMax(bound, min(oldest.next, now));
      return Place{kReplaced, static_cast<int64_t>(bucket) * table.bucket_slots + position,
                   oldest.step};
    }
  }
}

// What a lane asks a tile for, and what it gets.
struct Claim {
  const TableView* table;
  uint64_t score;
  BucketChoice choice;
  Place place;
};

// Has the scores in both buckets of the id with this number brought near, of `busy` ids that want a
// place: shortly before they are read, since what the ids of all warps need does not fit the
// second-level cache. By a tile, whose first two lanes see to a bucket each.
__device__ __forceinline__ void prefetch_scores(const Claim* claims, int at, int busy, int lane) {
  if (lane > 1 || at >= busy) return;
  const Claim& claim = claims[at];
  const TableView& table = *claim.table;
  // A prefetch begins at sixteen bytes.
  if (table.scores == nullptr || table.bucket_slots != kBucketDigests) return;
  const int64_t bucket = lane == 0 ? claim.choice.first : claim.choice.second;
  prefetch_l2(table.scores + bucket * kBucketDigests, kBucketDigests * sizeof(uint64_t));
}

// The places of the first `busy` lanes' ids, each by a tile. What is lowest of the next id's scores
// is looked for while the present one's last steps are on their way.
__device__ __forceinline__ void claim_lowest(Claim* claims, int busy, const Visit& visit,
                                             bool refuse_lower) {
  constexpr int kTiles = kWarp / kVictimLanes;
  const int lane = threadIdx.x % kVictimLanes;
  const int tile = threadIdx.x % kWarp / kVictimLanes;
  const unsigned lanes = ((1ull << kVictimLanes) - 1) << (tile * kVictimLanes);
  const auto lowest_of = [&](int at) {
    const Claim& claim = claims[at];
    LowestScore lowest(*claim.table, claim.choice, lanes, lane);
    lowest.prefetch_steps(*claim.table, claim.choice, lane);
    return lowest;
  };
  prefetch_scores(claims, tile, busy, lane);
  prefetch_scores(claims, tile + kTiles, busy, lane);
  LowestScore next;
  if (tile < busy) next = lowest_of(tile);
#pragma unroll 1
  for (int base = tile; base < busy; base += kTiles) {
    Claim& mine = claims[base];
    prefetch_scores(claims, base + 2 * kTiles, busy, lane);
    const LowestScore lowest = next;
    if (base + kTiles < busy) next = lowest_of(base + kTiles);
    const Place place = claim_victim(*mine.table, mine.choice, mine.score, visit, refuse_lower,
                                     lowest, lanes, lane);
    if (lane == 0) mine.place = place;
  }
}

// kLeavers: what leaves or is refused is noted. kScores: tables may have scores.
template <NewRows kRows, bool kOneTable, bool kLeavers, bool kScores>
__global__ void __launch_bounds__(kThreads, kEvictBlocks)
    evict_kernel(const __grid_constant__ TableView only, const TableView* __restrict__ tables,
                 const Batch batch, const Visit visit, const Placement placement, int64_t* slots,
                 bool* writer, const Missing missing, bool deduplicated) {
  // A warp's rows lie where its claims have been.
  __shared__ union OfWarp {
    Claim claims[kWarp];
    RowToWrite rows[kWarp];
  } of_warps[kThreads / kWarp];
  OfWarp& of_warp = of_warps[threadIdx.x / kWarp];
  Claim* const claims = of_warp.claims;
  const int warp_lane = threadIdx.x % kWarp;
  let_next_kernel_start();
  wait_for_kernel_before();
  Tally<kOneTable, kMisses> misses;
  Tally<kOneTable, kInserted> inserted;
  Tally<kOneTable, kEvicted> evicted;
  Tally<kOneTable, kRefused> refused;
#pragma unroll 1
  for (const bool second : {true, false}) {
    if (!second && *missing.chosen == 0) break;
    const int64_t number = second ? *missing.number_full : *missing.number;
    for (Share share(number, even_lanes(number, kWarp / kVictimLanes)); share.more();
         share.next()) {
      bool listed = warp_lane < share.busy();
      const int64_t position = listed ? missing.listed(second, share.at()) : 0;
      const int64_t was = listed ? slots[position] : 0;
      const bool returns = listed && was == kReturningToFull;
      const bool chosen = returns || (listed && was == kChosenFromFull);
      if (!second) listed = chosen;  // insert_kernel has seen to the others
      const TableView* mine = kOneTable ? &only : tables;
      if (!kOneTable && listed) mine = &table_at(tables, batch, position);
      const TableView& table = kOneTable ? only : *mine;
      misses.add(mine, listed && !chosen);
      bool busy = chosen || (listed && is_missing(was));
      BucketChoice choice{};
      if (busy) {
        const int64_t id = batch.ids[position];
        choice = choose_buckets(id, table.num_buckets);
        if (!chosen && !deduplicated) {
          const int64_t other =
              representative<kOneTable>(missing, tables, table, batch, position, id);
          busy = other == position;
          if (!busy) {
            slots[position] = remember(other);
            if (load_l2(missing.waiting) == 0) *missing.waiting = 1;
          }
        }
      }
      if (__ballot_sync(kAllLanes, busy) == 0) continue;
      uint64_t score = 0;
      if (busy) {
        score = first_score(table.eviction, visit.now(), visit.epoch(), visit.given(position));
      }
      Place place{kNoRoom, kNoSlot, 0};
      if (kScores) {
        const unsigned lanes = __ballot_sync(kAllLanes, busy);
        Claim& claim = claims[__popc(lanes & ((1u << warp_lane) - 1))];
        if (busy) {
          claim.table = mine;
          claim.score = score;
          claim.choice = choice;
        }
        __syncwarp();
        claim_lowest(claims, __popc(lanes), visit, placement.refuse_lower);
        __syncwarp();
        if (busy) place = claim.place;
      } else if (busy) {  // whose score, the step, is never too low
        place = claim_oldest(table, choice, visit.now(), visit.pinned_from());
      }
      __syncwarp();  // rows may be written where claims were
      // Read again, for want of registers to keep it in.
      const int64_t id = busy ? batch.ids[position] : 0;
      __syncwarp();
      const bool placed = busy && place.slot != kNoSlot;
      // Read here and used behind the counts: a load that nothing waits for.
      const bool remembers = placed && table.evicted.marks != nullptr;
      const int64_t leaver = (kLeavers && placed) || remembers ? id_of_slot(table, place.slot) : 0;
      inserted.add(mine, placed);
      evicted.add(mine, placed);
      refused.add(mine, busy && !placed);
      if (missing.returns) count_warp(mine, kReturned, placed && returns);
      count_warp(mine, kCrowded, busy && place.fate == kNoRoom);
      if (kLeavers) {
        int64_t leaver_at = leaver_number(placement.leavers, busy);
        if (busy) {
          placement.leavers.ids[leaver_at] = placed ? leaver : id;
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
        const uint64_t hash = hash_of_id(id);
        store_l2(digest_of_slot(table, place.slot), digest_of(raw_digest(hash)));
        write_id(entry_of(table, place.slot), hash);
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

// What leaves is given back only where rows are assigned, so that none are initialised.
template <bool kOneTable, bool kScores>
EvictKernel choose_evict_kernel(const Placement& placement) {
  if (placement.leavers.number != nullptr) {
    return evict_kernel<NewRows::kUntouched, kOneTable, true, kScores>;
  }
  switch (placement.rows) {
    case NewRows::kUntouched:
      return evict_kernel<NewRows::kUntouched, kOneTable, false, kScores>;
    case NewRows::kUniform:
      return evict_kernel<NewRows::kUniform, kOneTable, false, kScores>;
    default:
      return evict_kernel<NewRows::kInitial, kOneTable, false, kScores>;
  }
}
EvictKernel choose_evict_kernel(bool one_table, const Placement& placement) {
  if (one_table) {
    return placement.scored ? choose_evict_kernel<true, true>(placement)
                            : choose_evict_kernel<true, false>(placement);
  }
  return placement.scored ? choose_evict_kernel<false, true>(placement)
                          : choose_evict_kernel<false, false>(placement);
}

}  // namespace

void evict_for_missing(const TableView* tables, const TableView* only, const Batch& batch,
                       const Visit& visit, const Placement& placement, int64_t* slots, bool* writer,
                       const Missing& missing, bool deduplicated, cudaStream_t stream) {
  const EvictKernel evict = choose_evict_kernel(only != nullptr, placement);
  launch_chained(evict, std::min(grid_for(batch.num_ids), resident_blocks(evict)), kThreads, stream,
                 only != nullptr ? *only : TableView{}, tables, batch, visit, placement, slots,
                 writer, missing, deduplicated);
}

}  // namespace torchrec_hkv::hash_table::cuda
