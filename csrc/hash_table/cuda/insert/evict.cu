// The part of an insertion on the GPU that evicts: ids whose buckets are full take the places of
// the lowest ranks. A tile of lanes looks for a victim.
#include "common/cuda_check.h"
#include "hash_table/cuda/bucket.cuh"
#include "hash_table/cuda/chain.cuh"
#include "hash_table/cuda/insert/insert.cuh"
#include "hash_table/cuda/insert/missing.cuh"
#include "hash_table/cuda/insert/new_row.cuh"
#include "hash_table/cuda/insert/place.cuh"
#include "hash_table/cuda/row_matrix.cuh"

namespace torchrec_hkv::hash_table::cuda {
namespace {

constexpr int kEvictBlocks = 4;  // of a multiprocessor, which bound the registers
constexpr int kWarpsOfBlock = kThreads / kWarp;

__device__ __forceinline__ void prefetch_ranks(const TableView& table, const BucketChoice& choice) {
  if (table.bucket_slots != kBucketDigests) return;  // a prefetch begins at sixteen bytes
  for (const uint32_t bucket : {choice.first, choice.second}) {
    const int64_t first = static_cast<int64_t>(bucket) * kBucketDigests;
    prefetch_l2(table.last_steps + first, kBucketDigests * sizeof(uint32_t));
    if (table.scores != nullptr) {
      prefetch_l2(table.scores + first, kBucketDigests * sizeof(uint64_t));
    }
  }
}

// Gives each thread of a block that wants one a place among the leavers: one atomic a block.
__device__ __forceinline__ int64_t leaver_number(const Leavers& leavers, bool wanted) {
  __shared__ uint32_t warp_ends[kWarpsOfBlock];
  __shared__ unsigned long long base;
  const int warp = threadIdx.x / kWarp;
  const unsigned lanes = __ballot_sync(kAllLanes, wanted);
  if (threadIdx.x % kWarp == 0) warp_ends[warp] = __popc(lanes);
  __syncthreads();
  if (threadIdx.x == 0) {
    uint32_t sum = 0;
    for (uint32_t& end : warp_ends) end = sum += end;
    base = sum == 0 ? 0
                    : atomicAdd(reinterpret_cast<unsigned long long*>(leavers.number),
                                static_cast<unsigned long long>(sum));
  }
  __syncthreads();
  const unsigned lower = lanes & ((1u << threadIdx.x % kWarp) - 1);
  return static_cast<int64_t>(base) + (warp == 0 ? 0 : warp_ends[warp - 1]) + __popc(lower);
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

// The places of a warp's ids that have none, several ids at a time.
template <bool kOneTable>
__device__ __forceinline__ Place claim_victims_of_warp(const TableView* mine, bool busy,
                                                       const BucketChoice& choice, uint64_t score,
                                                       const Visit& visit, bool refuse_lower) {
  constexpr int kTiles = kWarp / kVictimLanes;
  const int lane = threadIdx.x % kVictimLanes;
  const int tile = threadIdx.x % kWarp / kVictimLanes;
  const unsigned lanes = ((1ull << kVictimLanes) - 1) << (tile * kVictimLanes);
  Place place{kNoRoom, kNoSlot, 0};
  for (unsigned left = __ballot_sync(kAllLanes, busy); left;) {
    const int source = nth_lane(left, tile);
    const bool working = tile < __popc(left);
    BucketChoice their_choice;
    their_choice.first = __shfl_sync(kAllLanes, choice.first, source);
    their_choice.second = __shfl_sync(kAllLanes, choice.second, source);
    their_choice.digest = __shfl_sync(kAllLanes, choice.digest, source);
    const uint64_t their_score = __shfl_sync(kAllLanes, score, source);
    const TableView* table = table_of_lane<kOneTable>(mine, source);
    Place claimed{kNoRoom, kNoSlot, 0};
    if (working) {
      claimed = claim_victim(*table, their_choice, their_score, visit, refuse_lower, lanes, lane);
    }
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {  // each id's lane takes its place over
      const int owner = left ? __ffs(static_cast<int>(left)) - 1 : -1;
      const int from = t * kVictimLanes;
      const int fate = __shfl_sync(kAllLanes, static_cast<int>(claimed.fate), from);
      const int64_t slot = __shfl_sync(kAllLanes, claimed.slot, from);
      const uint64_t replaced = __shfl_sync(kAllLanes, claimed.replaced_score, from);
      if (static_cast<int>(threadIdx.x % kWarp) == owner) {
        place = Place{static_cast<Fate>(fate), slot, replaced};
      }
      left &= left - 1;
    }
  }
  return place;
}

// kLeavers: what leaves or is refused is noted.
template <NewRows kRows, bool kOneTable, bool kLeavers>
__global__ void __launch_bounds__(kThreads, kEvictBlocks)
    evict_kernel(const __grid_constant__ TableView only, const TableView* __restrict__ tables,
                 const Batch batch, const Visit visit, const Placement placement, int64_t* slots,
                 bool* writer, const Missing missing) {
  let_next_kernel_start();
  wait_for_kernel_before();
  const int64_t number = *missing.number_full;
  const int lanes_used = even_lanes(number, kWarp / kVictimLanes);
  for (Share share(number, lanes_used); share.more(); share.next()) {
    const bool busy = share.mine();
    const int64_t position = busy ? missing.full_positions[share.at] : 0;
    const bool returns = missing.returns && busy && slots[position] == kReturningToFull;
    const TableView* mine = kOneTable ? &only : tables;
    if (!kOneTable && busy) mine = &table_at(tables, batch, position);
    const TableView& table = kOneTable ? only : *mine;
    int64_t id = 0;
    uint64_t score = 0;
    BucketChoice choice{};
    if (busy) {
      id = batch.ids[position];
      score = first_score(table.eviction, visit.now(), visit.epoch(), visit.given(position));
      choice = choose_buckets(id, table.num_buckets);
      prefetch_ranks(table, choice);
    }
    const Place place =
        claim_victims_of_warp<kOneTable>(mine, busy, choice, score, visit, placement.refuse_lower);
    const bool placed = busy && place.slot != kNoSlot;
    // Read here and used behind the counts: a load that nothing waits for.
    const bool remembers = placed && table.evicted.marks != nullptr;
    const int64_t leaver = remembers ? table.ids[place.slot] : 0;
    count_block<kOneTable>(mine, kInserted, placed);
    count_block<kOneTable>(mine, kEvicted, placed);
    count_block<kOneTable>(mine, kRefused, busy && !placed);
    if (missing.returns) count_warp(mine, kReturned, placed && returns);
    count_warp(mine, kCrowded, busy && place.fate == kNoRoom);
    if (kLeavers) {
      int64_t number = leaver_number(placement.leavers, busy);
      if (busy) {
        placement.leavers.ids[number] = placed ? table.ids[place.slot] : id;
        placement.leavers.scores[number] = placed ? place.replaced_score : score;
        if (!kOneTable) placement.leavers.tables[number] = static_cast<int32_t>(mine - tables);
      } else {
        number = -1;
      }
      copy_leavers_of_warp<kOneTable>(mine, placement, position, place.slot, number);
    }
    if (placed) {
      slots[position] = table.first_slot + place.slot;
      if (writer != nullptr) writer[position] = true;
      if (missing.placed != nullptr) missing.placed[position] = true;
      table.ids[place.slot] = id;
      if (table.scores != nullptr) table.scores[place.slot] = score;
      if (remembers) {
        const EvictedMemory::Place to = table.evicted.place_of(leaver);
        table.evicted.marks[to.entry] = to.mark;
      }
    } else if (busy) {
      slots[position] = kNoSlot;
    }
    write_rows_of_warp<kRows, kOneTable>(mine, placed, id, place.slot);
  }
}

using EvictKernel = void (*)(const TableView, const TableView*, const Batch, const Visit,
                             const Placement, int64_t*, bool*, const Missing);

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
                       const Missing& missing, cudaStream_t stream) {
  const EvictKernel evict = only != nullptr ? choose_evict_kernel<true>(placement)
                                            : choose_evict_kernel<false>(placement);
  launch_chained(evict, std::min(grid_for(batch.num_ids), resident_blocks(evict)), kThreads, stream,
                 only != nullptr ? *only : TableView{}, tables, batch, visit, placement, slots,
                 writer, missing);
}

}  // namespace torchrec_hkv::hash_table::cuda
