// The part of an insertion on the GPU that evicts: ids whose buckets are full take the places of
// the lowest ranks. A tile of lanes looks for a victim.
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

// What a lane asks a tile for, and what it gets.
struct Claim {
  const TableView* table;
  uint64_t score;
  BucketChoice choice;
  // Of claim_oldest: whether the second bucket is looked at first, and what no last step of the
  // other bucket is lower than.
  bool second_first;
  uint32_t bound;
  Place place;

  __device__ __forceinline__ uint32_t likely() const {
    return second_first ? choice.second : choice.first;
  }
};

// Has the ranks in both buckets of the id with this number brought near, of `busy` ids that want a
// place: shortly before they are read, since what the ids of all warps need does not fit the
// second-level cache. By a tile, whose first two lanes see to a bucket each. kOldest: the likely
// bucket alone, by the first lane, as claim_oldest looks at no other.
template <bool kOldest>
__device__ __forceinline__ void prefetch_ranks(const Claim* claims, int at, int busy, int lane) {
  if (lane > (kOldest ? 0 : 1) || at >= busy) return;
  const Claim& claim = claims[at];
  const TableView& table = *claim.table;
  const int64_t bucket = kOldest     ? claim.likely()
                         : lane == 0 ? claim.choice.first
                                     : claim.choice.second;
  prefetch_l2(table.entries.sectors_of(bucket), table.entries.bucket_sectors * kSectorBytes);
  // A prefetch begins at sixteen bytes.
  if (!kOldest && table.scores != nullptr && table.bucket_slots == kBucketDigests) {
    prefetch_l2(table.scores + bucket * kBucketDigests, kBucketDigests * sizeof(uint64_t));
  }
}

// The two lowest last steps of a bucket, and where in it the lowest is; of equal ones the first.
struct Oldest {
  uint32_t step;
  uint32_t next;
  uint32_t position;
};

// The last steps in a bucket of 64 slots that a lane of a tile looks at.
struct Steps {
  static constexpr int kSectors = sectors_of_bucket(kBucketDigests);
  static constexpr int kOfLane = (kSectors + kVictimLanes - 1) / kVictimLanes;
  uint4 v[kOfLane];

  // Lanes that are left over look at nothing, as if it were free.
  __device__ __forceinline__ Steps(const TableView& table, uint32_t bucket, int lane) {
    const uint32_t* const sectors = table.entries.sectors_of(bucket);
#pragma unroll
    for (int k = 0; k < kOfLane; ++k) {
      v[k] = uint4{kFreeStep, kFreeStep, kFreeStep, 0};
      const int sector = k * kVictimLanes + lane;
      if ((k + 1) * kVictimLanes <= kSectors || sector < kSectors) {
        v[k] = load_vector_l2(sectors + sector * kSectorWords);
      }
    }
  }
  // All lanes of a warp.
  __device__ __forceinline__ Oldest oldest(int lane) const {
    uint32_t least = kFreeStep, next = kFreeStep;
    const auto add = [&](uint32_t step) {
      next = min(next, max(least, step));
      least = min(least, step);
    };
#pragma unroll
    for (const uint4& three : v) {
      add(three.x);
      add(three.y);
      add(three.z);
    }
#pragma unroll
    for (int offset = kVictimLanes / 2; offset; offset /= 2) {
      const uint32_t other = __shfl_xor_sync(kAllLanes, least, offset);
      const uint32_t other_next = __shfl_xor_sync(kAllLanes, next, offset);
      next = min(max(least, other), min(next, other_next));
      least = min(least, other);
    }
    uint32_t at = kBucketDigests;
#pragma unroll
    for (int k = kOfLane - 1; k >= 0; --k) {
      const uint32_t first = (k * kVictimLanes + lane) * kSectorSlots;
      if (v[k].z == least) at = first + 2;
      if (v[k].y == least) at = first + 1;
      if (v[k].x == least) at = first;
    }
#pragma unroll
    for (int offset = kVictimLanes / 2; offset; offset /= 2) {
      at = min(at, __shfl_xor_sync(kAllLanes, at, offset));
    }
    return Oldest{least, next, at};
  }
};

// Claims the place of the oldest entry of a bucket, or says that there is none, and notes how old
// those are that stay. By one thread. Notes of several threads may overwrite each other: last steps
// only grow, so each remains true.
__device__ __forceinline__ Place take_oldest(const TableView& table, uint32_t bucket,
                                             const Oldest& oldest, uint32_t now,
                                             uint32_t pinned_from) {
  if (oldest.step >= pinned_from) {
    store_l2(&table.oldest[bucket], min(oldest.step, now));
    return Place{kNoRoom, kNoSlot, 0};
  }
  const Entry entry = entry_at(table, bucket, oldest.position);
  if (atomicCAS(entry.step(), oldest.step, now) != oldest.step) {
    return Place{kUndecided, kNoSlot, 0};
  }
  store_l2(&table.oldest[bucket], min(oldest.next, now));
  const int64_t slot = static_cast<int64_t>(bucket) * kBucketDigests + oldest.position;
  return Place{kReplaced, slot, oldest.step};
}

// The places of ids that claim_oldest has left undecided: all ranks of both buckets are looked at.
// All lanes.
__device__ __forceinline__ void claim_undecided(Claim* claims, int busy, const Visit& visit) {
  const int warp_lane = threadIdx.x % kWarp;
  const int lane = threadIdx.x % kVictimLanes;
  const int tile = warp_lane / kVictimLanes;
  const uint32_t now = visit.now(), pinned_from = visit.pinned_from();
  unsigned left =
      __ballot_sync(kAllLanes, warp_lane < busy && claims[warp_lane].place.fate == kUndecided);
  while (left != 0) {
    const bool working = tile < __popc(left);
    Claim& mine = claims[nth_lane(left, tile)];
    const Oldest of_first = Steps(*mine.table, mine.choice.first, lane).oldest(lane);
    const Oldest of_second = Steps(*mine.table, mine.choice.second, lane).oldest(lane);
    const bool takes_first = of_first.step <= of_second.step;
    if (working && lane == 0) {
      mine.place = take_oldest(*mine.table, takes_first ? mine.choice.first : mine.choice.second,
                               takes_first ? of_first : of_second, now, pinned_from);
      store_l2(&mine.table->oldest[takes_first ? mine.choice.second : mine.choice.first],
               min(takes_first ? of_second.step : of_first.step, now));
    }
    __syncwarp();
    // Those that others were faster to claim are looked for again.
    left = __ballot_sync(kAllLanes, (left >> warp_lane & 1) != 0 &&
                                        claims[warp_lane].place.fate == kUndecided);
  }
}

// The places of the first `busy` lanes' ids, each by a tile, where scores are last steps and
// buckets have 64 slots. Of an id's buckets mostly one is looked at, that whose oldest entry is
// said to be older: if it is as old as none of the other bucket's can be, it is the one. The next
// id's steps are read while the present one's are decided on. All lanes.
__device__ __forceinline__ void claim_oldest(Claim* claims, int busy, const Visit& visit) {
  constexpr int kTiles = kWarp / kVictimLanes;
  const int lane = threadIdx.x % kVictimLanes;
  const int tile = threadIdx.x % kWarp / kVictimLanes;
  const uint32_t now = visit.now(), pinned_from = visit.pinned_from();
  const auto steps_of = [&](int at) {
    const Claim& claim = claims[min(at, busy - 1)];
    return Steps(*claim.table, claim.likely(), lane);
  };
  Steps steps = steps_of(tile);
  prefetch_ranks<true>(claims, tile + kTiles, busy, lane);
  bool undecided = false;
#pragma unroll 1
  for (int at = tile; at - tile < busy; at += kTiles) {
    prefetch_ranks<true>(claims, at + 2 * kTiles, busy, lane);
    const Oldest oldest = steps.oldest(lane);
    if (at - tile + kTiles < busy) steps = steps_of(at + kTiles);
    if (at < busy && lane == 0) {
      Claim& mine = claims[at];
      // Among equals the first bucket's is taken.
      const bool decided =
          mine.second_first ? oldest.step < mine.bound : oldest.step <= mine.bound;
      mine.place = decided ? take_oldest(*mine.table, mine.likely(), oldest, now, pinned_from)
                           : Place{kUndecided, kNoSlot, 0};
      undecided |= mine.place.fate == kUndecided;
    }
  }
  __syncwarp();
  if (__any_sync(kAllLanes, undecided)) claim_undecided(claims, busy, visit);
}

// The same of any tables.
__device__ __forceinline__ void claim_lowest(Claim* claims, int busy, const Visit& visit,
                                             bool refuse_lower) {
  constexpr int kTiles = kWarp / kVictimLanes;
  const int lane = threadIdx.x % kVictimLanes;
  const int tile = threadIdx.x % kWarp / kVictimLanes;
  const unsigned lanes = ((1ull << kVictimLanes) - 1) << (tile * kVictimLanes);
  prefetch_ranks<false>(claims, tile, busy, lane);
#pragma unroll 1
  for (int base = tile; base < busy; base += kTiles) {
    Claim& mine = claims[base];
    prefetch_ranks<false>(claims, base + kTiles, busy, lane);
    const Place place =
        claim_victim(*mine.table, mine.choice, mine.score, visit, refuse_lower, lanes, lane);
    if (lane == 0) mine.place = place;
  }
}

// kLeavers: what leaves or is refused is noted.
template <NewRows kRows, bool kOneTable, bool kLeavers>
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
      const bool oldest = table.scores == nullptr && table.bucket_slots == kBucketDigests;
      BucketChoice choice{};
      uint32_t bounds[2] = {0, 0};
      if (busy) {
        const int64_t id = batch.ids[position];
        choice = choose_buckets(id, table.num_buckets);
        if (oldest) {
          bounds[0] = load_l2(&table.oldest[choice.first]);
          bounds[1] = load_l2(&table.oldest[choice.second]);
        }
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
      uint64_t score = 0;
      const unsigned lanes = __ballot_sync(kAllLanes, busy);
      const int asked = __popc(lanes);
      Claim& claim = claims[__popc(lanes & ((1u << warp_lane) - 1))];
      if (busy) {
        score = first_score(table.eviction, visit.now(), visit.epoch(), visit.given(position));
        claim.table = mine;
        claim.score = score;
        claim.choice = choice;
        claim.second_first = bounds[1] < bounds[0];
        claim.bound = max(bounds[0], bounds[1]);
      }
      __syncwarp();
      if (asked == 0) continue;
      if (__all_sync(kAllLanes, oldest || !busy)) {
        claim_oldest(claims, asked, visit);  // whose score, the step, is never too low
      } else {
        claim_lowest(claims, asked, visit, placement.refuse_lower);
      }
      __syncwarp();
      const Place place = busy ? claim.place : Place{kNoRoom, kNoSlot, 0};
      // Read again, for want of registers to keep it in.
      const int64_t id = busy ? batch.ids[position] : 0;
      __syncwarp();
      const bool placed = busy && place.slot != kNoSlot;
      // Read here and used behind the counts: a load that nothing waits for.
      const bool remembers = placed && table.evicted.marks != nullptr;
      const int64_t leaver =
          (kLeavers && placed) || remembers ? id_of_slot(table, place.slot) : 0;
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
template <bool kOneTable>
EvictKernel choose_evict_kernel(const Placement& placement) {
  if (placement.leavers.number != nullptr) {
    return evict_kernel<NewRows::kUntouched, kOneTable, true>;
  }
  switch (placement.rows) {
    case NewRows::kUntouched:
      return evict_kernel<NewRows::kUntouched, kOneTable, false>;
    case NewRows::kUniform:
      return evict_kernel<NewRows::kUniform, kOneTable, false>;
    default:
      return evict_kernel<NewRows::kInitial, kOneTable, false>;
  }
}

}  // namespace

void evict_for_missing(const TableView* tables, const TableView* only, const Batch& batch,
                       const Visit& visit, const Placement& placement, int64_t* slots, bool* writer,
                       const Missing& missing, bool deduplicated, cudaStream_t stream) {
  const EvictKernel evict = only != nullptr ? choose_evict_kernel<true>(placement)
                                            : choose_evict_kernel<false>(placement);
  launch_chained(evict, std::min(grid_for(batch.num_ids), resident_blocks(evict)), kThreads, stream,
                 only != nullptr ? *only : TableView{}, tables, batch, visit, placement, slots,
                 writer, missing, deduplicated);
}

}  // namespace torchrec_hkv::hash_table::cuda
