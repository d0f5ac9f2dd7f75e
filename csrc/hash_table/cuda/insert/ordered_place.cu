// Places the missing ids of an insertion in the order of the batch (ordered.cu). Tiles of lanes
// take ids in the order of the list. If it is an id's turn in both queues, its tile places it as a
// CPU would and passes the turn on. The first id that tiles hold never waits, so there is always
// progress.
#include "common/cuda_check.h"
#include "hash_table/cuda/bucket.cuh"
#include "hash_table/cuda/entry.cuh"
#include "hash_table/cuda/insert/claim_oldest.cuh"
#include "hash_table/cuda/insert/insert.cuh"
#include "hash_table/cuda/insert/missing_lists.cuh"
#include "hash_table/cuda/insert/ordered.cuh"
#include "hash_table/cuda/insert/place.cuh"

namespace torchrec_hkv::hash_table::cuda {
namespace {

constexpr int kPlaceBlocks = 4;  // per multiprocessor; this limits the registers

__device__ __forceinline__ uint32_t load_acquire(const uint32_t* from) {
  uint32_t v;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(from) : "memory");
  return v;
}

// The free slots of a bucket, one bit each. Called by a tile of eight lanes.
__device__ __forceinline__ uint64_t free_slots_of_tile(const TableView& table, uint32_t bucket,
                                                       unsigned tile, int lane) {
  static_assert(kVictimLanes == kLineVectors && kVictimLanes * kVectorDigests == kBucketDigests);
  const uint32_t mine = match_vector(
      load_vector_l2(digest_line(table, bucket) + lane * kVectorDigests), kEmptyDigest);
  const uint32_t half = mine << (lane % 4 * kVectorDigests);
  const uint64_t low = __reduce_or_sync(tile, lane < 4 ? half : 0u);
  const uint64_t high = __reduce_or_sync(tile, lane < 4 ? 0u : half);
  return high << 32 | low;
}

// Selects a slot for an id, as cpu::choose_place. No other thread may use its buckets. Called by a
// tile; all lanes get the result.
__device__ __forceinline__ SlotClaim choose_place(const TableView& table,
                                                  const BucketChoice& choice, uint64_t score,
                                                  const CallContext& context,
                                                  RefuseLower refuse_lower, unsigned tile,
                                                  int lane) {
  uint32_t bucket = choice.first;
  uint64_t free = free_slots_of_tile(table, choice.first, tile, lane);
  const int number_first = __popcll(free);
  if (!prefers_first(table.bucket_slots, number_first, kBucketDigests)) {
    const uint64_t free_second = free_slots_of_tile(table, choice.second, tile, lane);
    if (!prefers_first(table.bucket_slots, number_first, __popcll(free_second))) {
      bucket = choice.second;
      free = free_second;
    }
  }
  if (free != 0) {
    const int position = __ffsll(static_cast<long long>(free)) - 1;
    return SlotClaim{kPlaced, static_cast<int64_t>(bucket) * table.bucket_slots + position, 0};
  }
  const Victim victim = is_packed(table)
                            ? oldest_packed(table, choice, context.pinned_from(), tile, lane)
                            : lowest_rank(table, choice, context.pinned_from(), tile, lane);
  if (victim.slot == kNoSlot) return SlotClaim{kAllPinned, kNoSlot, 0};
  if (is_outranked(table, refuse_lower, score, context.now(), victim.rank.score)) {
    return SlotClaim{kOutranked, kNoSlot, 0};
  }
  return SlotClaim{kReplaced, victim.slot, score_of_victim(table, victim)};
}

// A missing id that a tile processes.
struct QueuedId {
  const TableView* table;
  BucketChoice choice;
  uint64_t score;  // score that decides whether it is refused
  uint32_t position;
  uint32_t queues[2];
  uint32_t tickets[2];

  __device__ QueuedId(const TableView* tables, const Batch& batch, const CallContext& context,
                      const InsertionOrder& order, uint32_t number)
      : position(order.positions[number]) {
    table = &table_at(tables, batch, position);
    choice = choose_buckets(batch.ids[position], table->num_buckets);
    if (threadIdx.x % kVictimLanes == 0) {  // during the turns of other ids
      prefetch_l2(digest_line(*table, choice.first), kBucketDigests * sizeof(uint16_t));
    }
    score =
        first_score(table->eviction, context.now(), context.epoch(),
                    order.highest != nullptr ? order.highest[position] : context.given(position));
    queues[0] = queue_of(order, *table, choice.first);
    queues[1] = queue_of(order, *table, choice.second);
    tickets[0] = order.tickets()[2 * number];
    tickets[1] = order.tickets()[2 * number + 1];
  }

  __device__ __forceinline__ bool is_turn(const uint32_t* turns) const {
    return load_acquire(&turns[queues[0]]) == tickets[0] &&
           (queues[1] == queues[0] || load_acquire(&turns[queues[1]]) == tickets[1]);
  }
  // Called by the thread whose writes the next ids must see.
  __device__ __forceinline__ void pass_turn(uint32_t* turns) const {
    __threadfence();
    // If both queues are one, the id's places are adjacent.
    store_l2(&turns[queues[1]], tickets[1] + 1);
    if (queues[0] != queues[1]) store_l2(&turns[queues[0]], tickets[0] + 1);
  }
};

__global__ void __launch_bounds__(kThreads, kPlaceBlocks)
    place_kernel(const TableView* __restrict__ tables, const Batch batch, const CallContext context,
                 RefuseLower refuse_lower, int64_t* __restrict__ slots, const MissingLists missing,
                 const __grid_constant__ InsertionOrder order) {
  if (*missing.number == 0) return;
  constexpr int kTiles = kWarp / kVictimLanes;
  const int lane = threadIdx.x % kVictimLanes;
  const int tile = threadIdx.x % kWarp / kVictimLanes;
  const unsigned lanes = ((1u << kVictimLanes) - 1) << (tile * kVictimLanes);
  const uint32_t number = *order.number;
  uint32_t* const turns = order.turns();
  for (;;) {
    uint32_t first = 0;
    if (threadIdx.x % kWarp == 0) first = atomicAdd(order.next, kTiles);
    first = __shfl_sync(kAllLanes, first, 0);
    if (first >= number) return;
    const uint32_t mine = first + tile;
    bool waiting = mine < number;
    const QueuedId it(tables, batch, context, order, waiting ? mine : first);
    while (__any_sync(kAllLanes, waiting)) {
      // Every lane reads the turns itself (load_acquire), so that it sees all earlier writes.
      const bool turn = waiting && it.is_turn(turns);
      const bool ready = (__ballot_sync(kAllLanes, turn) & lanes) == lanes;
      if (ready) {
        const TableView& table = *it.table;
        const SlotClaim claim =
            choose_place(table, it.choice, it.score, context, refuse_lower, lanes, lane);
        if (lane == 0) {
          if (claim.slot != kNoSlot) {
            // Before the digest is overwritten, which is part of the evicted id's hash.
            if (order.evicted_ids != nullptr && claim.outcome == kReplaced) {
              order.evicted_ids[it.position] = id_of_slot(table, claim.slot);
            }
            store_l2(digest_of_slot(table, claim.slot), it.choice.digest);
            store_l2(step_of(table, claim.slot), context.now());
          }
          it.pass_turn(turns);
          slots[it.position] = claim.slot == kNoSlot ? kNoSlot : table.first_slot + claim.slot;
          order.outcomes[mine] = static_cast<uint8_t>(claim.outcome);
          if (order.evicted_scores != nullptr)
            order.evicted_scores[it.position] = claim.replaced_score;
        }
        waiting = false;
      } else {
        __nanosleep(20);
      }
      __syncwarp();
    }
  }
}

}  // namespace

void place_in_order(const TableView* tables, const Batch& batch, const CallContext& context,
                    RefuseLower refuse_lower, int64_t* slots, const MissingLists& missing,
                    const InsertionOrder& order, cudaStream_t stream) {
  const unsigned tiles = grid_for(batch.num_ids * kVictimLanes);
  place_kernel<<<min(tiles, resident_blocks(place_kernel)), kThreads, 0, stream>>>(
      tables, batch, context, refuse_lower, slots, missing, order);
  HKV_CUDA_CHECK_LAUNCH();
}

}  // namespace torchrec_hkv::hash_table::cuda
