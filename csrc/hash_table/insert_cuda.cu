// The second half of find_or_insert on the GPU: places the ids that the find phase missed.
//
// A warp looks at 32 positions; a tile of 16 lanes places one missing id at a time, eight lanes a
// bucket. Both buckets are locked while the id is placed, and locks are taken and released within
// one turn of the loop, so that no lane waits for another lane of its warp. Before it locks, a tile
// looks whether an equal id of the batch has been placed meanwhile: a new id that fills half of a
// batch costs one insertion, not a queue at its lock. An id is written before its digest, so
// whoever sees the digest finds the id.
#include "common/cuda_check.h"
#include "hash_table/bucket_cuda.cuh"
#include "hash_table/find_cuda.cuh"
#include "hash_table/kernels.h"

namespace torchrec_hkv::hash_table::cuda {
namespace {

constexpr int kTile = 2 * kLineLanes;

// What one lane of a tile knows: its eight slots of one of the two buckets.
struct LaneSlots {
  const uint16_t* digests;
  int64_t first_slot;
  int32_t usable;  // of the eight, those below the bucket's capacity
};

// The id's slot as of now, or kNoSlot; the same answer in all lanes of the tile.
__device__ int64_t look_up(const TableView& table, const LaneSlots& mine, int64_t id,
                           uint16_t digest, unsigned tile) {
  const uint4 line = load_line_l2(mine.digests);
  int64_t slot = kNoSlot;
  for (uint32_t mask = match_lane(line, digest); mask; mask &= mask - 1) {
    const int64_t candidate = mine.first_slot + __ffs(static_cast<int>(mask)) - 1;
    if (load_l2(&table.ids[candidate]) == id) slot = candidate;
  }
  const unsigned found = __ballot_sync(tile, slot != kNoSlot);
  return found ? __shfl_sync(tile, slot, __ffs(static_cast<int>(found)) - 1) : kNoSlot;
}

// A free slot in the better of the two buckets, or kNoSlot. Under both locks.
__device__ int64_t free_slot(const TableView& table, const LaneSlots& mine, bool same_bucket,
                             unsigned tile, int tile_lane) {
  const uint32_t free = match_lane(load_line_l2(mine.digests), kEmptyDigest);
  int number = __popc(free);
  for (int offset = kLineLanes / 2; offset; offset /= 2) {
    number += __shfl_xor_sync(tile, number, offset);
  }
  const int base = threadIdx.x % kWarp - tile_lane;
  const int free_first = __shfl_sync(tile, number, base);
  const int free_second = __shfl_sync(tile, number, base + kLineLanes);
  if (free_first + free_second == 0) return kNoSlot;
  const bool take_first = same_bucket || prefers_first(table.bucket_slots, free_first, free_second);
  const bool candidate = free != 0 && (tile_lane < kLineLanes) == take_first;
  const int from = __ffs(static_cast<int>(__ballot_sync(tile, candidate))) - 1;
  return __shfl_sync(tile, mine.first_slot + __ffs(static_cast<int>(free)) - 1, from);
}

struct Victim {
  int64_t slot;  // kNoSlot: none
  uint64_t score;
};

// The slot of the lowest rank that is not pinned. Under both locks, buckets full.
__device__ Victim lowest_rank(const TableView& table, const LaneSlots& mine, uint32_t pinned_from,
                              unsigned tile) {
  Rank lowest{~0ull, 0xffffffffu};
  int64_t slot = kNoSlot;
  for (int k = 0; k < mine.usable; ++k) {
    const Rank rank = rank_of(table, mine.first_slot + k);
    if (rank.last_step < pinned_from && rank < lowest) {
      lowest = rank;
      slot = mine.first_slot + k;
    }
  }
  for (int offset = kTile / 2; offset; offset /= 2) {
    Rank other;
    other.score = __shfl_xor_sync(tile, lowest.score, offset);
    other.last_step = __shfl_xor_sync(tile, lowest.last_step, offset);
    const int64_t other_slot = __shfl_xor_sync(tile, slot, offset);
    // Ties go to the lower slot in every lane, so that all agree.
    if (other < lowest || (!(lowest < other) && other_slot < slot)) {
      lowest = other;
      slot = other_slot;
    }
  }
  return Victim{slot, lowest.score};
}

__device__ void write_new_row(const TableView& table, int64_t id, int64_t slot, bool initialize,
                              int tile_lane) {
  if (initialize) {
    char* row = table.rows.row(slot);
    for (int32_t c = tile_lane; c < table.dim(); c += kTile) {
      store_element(
          table.rows.type, row, c,
          initial_value(table.initial_rows, id, static_cast<uint32_t>(table.column_offset + c)));
    }
  }
  float* state = table.state(slot);
  for (int32_t c = tile_lane; c < table.states.width; c += kTile) state[c] = 0.0f;
}

// Notes what leaves or is refused; all lanes of a tile.
__device__ void note_leaver(const TableView& table, const Leavers& leavers, int64_t id,
                            uint64_t score, const char* row, unsigned tile, int tile_lane) {
  if (leavers.number == nullptr) return;
  unsigned long long at = 0;
  if (tile_lane == 0) {
    at = atomicAdd(reinterpret_cast<unsigned long long*>(leavers.number), 1ull);
    leavers.ids[at] = id;
    leavers.scores[at] = score;
  }
  at = __shfl_sync(tile, at, threadIdx.x % kWarp - tile_lane);
  const int32_t bytes = table.dim() * element_size(table.rows.type);
  char* to = leavers.rows + at * bytes;
  for (int32_t b = 2 * tile_lane; b < bytes; b += 2 * kTile) {
    *reinterpret_cast<uint16_t*>(to + b) = *reinterpret_cast<const volatile uint16_t*>(row + b);
  }
}

__global__ void __launch_bounds__(kThreads)
    insert_kernel(const TableView* __restrict__ tables, Batch batch, Visit visit,
                  Placement placement, int64_t* slots) {
  const int lane = threadIdx.x % kWarp;
  const int64_t first_position =
      (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) / kWarp * kWarp;
  const int64_t my_position = first_position + lane;
  unsigned missing =
      __ballot_sync(kAllLanes, my_position < batch.num_ids && slots[my_position] == kNoSlot);
  const int tile_lane = lane % kTile;
  const unsigned tile = 0xffffu << (lane - tile_lane);
  while (missing) {
    // Two missing ids a turn, one for each tile.
    const int source_low = __ffs(static_cast<int>(missing)) - 1;
    missing &= missing - 1;
    const int source_high = missing ? __ffs(static_cast<int>(missing)) - 1 : -1;
    missing &= missing - 1;
    const int source = lane < kTile ? source_low : source_high;
    if (source >= 0) {
      const int64_t position = first_position + source;
      const TableView& table = tables[batch.feature_tables[batch.feature_of(position)]];
      const int64_t id = batch.ids[position];
      const BucketChoice choice = choose_buckets(id, table.num_buckets);
      const uint32_t bucket = tile_lane < kLineLanes ? choice.first : choice.second;
      const int line_lane = tile_lane % kLineLanes;
      LaneSlots mine;
      mine.digests =
          table.digests + static_cast<int64_t>(bucket) * kBucketDigests + line_lane * kLaneDigests;
      mine.first_slot =
          static_cast<int64_t>(bucket) * table.bucket_slots + line_lane * kLaneDigests;
      mine.usable = max(0, min(kLaneDigests, table.bucket_slots - line_lane * kLaneDigests));
      const uint64_t given = visit.given(position);
      int64_t slot = kNoSlot;
      for (bool done = false; !done;) {
        slot = look_up(table, mine, id, choice.digest, tile);
        if (slot != kNoSlot) {
          if (tile_lane == 0) touch(table, slot, visit, given);
          break;
        }
        int locked = 0;
        if (tile_lane == 0) locked = try_lock_both(table.locks, choice.first, choice.second);
        if (!__shfl_sync(tile, locked, lane - tile_lane)) {
          __nanosleep(50);
          continue;
        }
        slot = look_up(table, mine, id, choice.digest, tile);
        if (slot != kNoSlot) {
          if (tile_lane == 0) touch(table, slot, visit, given);
        } else {
          slot = free_slot(table, mine, choice.first == choice.second, tile, tile_lane);
          const bool evicts = slot == kNoSlot;
          const uint64_t score = first_score(table.eviction, visit.now, visit.epoch, given);
          if (evicts) {
            const Victim victim = lowest_rank(table, mine, visit.pinned_from, tile);
            slot = victim.slot;
            if (slot == kNoSlot || (placement.refuse_lower && score < victim.score)) {
              slot = kNoSlot;
              const int64_t bytes =
                  static_cast<int64_t>(table.dim()) * element_size(table.rows.type);
              note_leaver(table, placement.leavers, id, score,
                          placement.leavers.given_rows + position * bytes, tile, tile_lane);
            } else {
              note_leaver(table, placement.leavers, load_l2(&table.ids[slot]), victim.score,
                          table.rows.row(slot), tile, tile_lane);
              __syncwarp(tile);
            }
          }
          if (tile_lane == 0) {
            if (slot == kNoSlot) {
              count(table, kRefused, 1);
            } else {
              store_l2(&table.ids[slot], id);
              store_l2(&table.last_steps[slot], visit.now);
              if (table.scores != nullptr) store_l2(&table.scores[slot], score);
              __threadfence();
              const int64_t its_bucket = slot / table.bucket_slots;
              store_l2(&table.digests[its_bucket * kBucketDigests +
                                      (slot - its_bucket * table.bucket_slots)],
                       choice.digest);
              count(table, kInserted, 1);
              if (evicts) count(table, kEvicted, 1);
            }
          }
          if (slot != kNoSlot) write_new_row(table, id, slot, placement.initialize, tile_lane);
        }
        __syncwarp(tile);
        if (tile_lane == 0) unlock_both(table.locks, choice.first, choice.second);
        done = true;
      }
      if (tile_lane == 0 && slot != kNoSlot) slots[position] = table.first_slot + slot;
    }
    __syncwarp();
  }
}

}  // namespace

void find_or_insert(const TableView* tables, const Batch& batch, const Visit& visit,
                    const Placement& placement, int64_t* slots, bool* found, cudaStream_t stream) {
  find_and_touch(tables, batch, visit, slots, found, stream);
  if (batch.num_ids == 0) return;
  insert_kernel<<<grid_for(batch.num_ids), kThreads, 0, stream>>>(tables, batch, visit, placement,
                                                                  slots);
  HKV_CUDA_CHECK_LAUNCH();
}

}  // namespace torchrec_hkv::hash_table::cuda
