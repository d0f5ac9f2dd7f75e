// Inserts entries of a file as new ids, one after the other as on a CPU, if the result must be
// deterministic. Only entries that share a bucket wait for each other: each is in the queues of its
// two buckets, and its warp waits for its turn in both. Warps take entries in order, so that the
// first entry in progress never waits.

#include "common/cuda_check.h"
#include "hash_table/cuda/bucket.cuh"
#include "hash_table/cuda/entry.cuh"
#include "hash_table/cuda/insert/insert.cuh"
#include "hash_table/cuda/insert/place.cuh"
#include "hash_table/cuda/maintenance/restore.cuh"
#include "hash_table/kernels.h"

namespace torchrec_hkv::hash_table::cuda {
namespace {

__global__ void __launch_bounds__(kThreads)
    buckets_kernel(TableView table, Entries entries, int64_t* __restrict__ buckets) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= entries.n) return;
  const BucketChoice choice = choose_buckets(entries.ids[i], table.num_buckets);
  buckets[2 * i] = choice.first;
  buckets[2 * i + 1] = choice.second;
}

// Stores the places of each entry in the queues, and the first entry of each queue.
__global__ void __launch_bounds__(kThreads)
    store_tickets_kernel(const int64_t* __restrict__ buckets,
                         const int64_t* __restrict__ queue_positions, int64_t n,
                         const RestoreOrder order) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= n) return;
  order.tickets[queue_positions[i]] = static_cast<uint32_t>(i);
  if (i == 0 || buckets[i - 1] != buckets[i]) order.turns[buckets[i]] = static_cast<uint32_t>(i);
}

// The free slots of a bucket, one bit each; all lanes get the result.
__device__ __forceinline__ uint64_t free_slots_of_warp(const TableView& table, uint32_t bucket) {
  const auto* pairs = reinterpret_cast<const uint32_t*>(digest_line(table, bucket));
  const uint32_t pair = load_l2(pairs + threadIdx.x % kWarp);
  uint64_t free = 0;
  for (unsigned even = __ballot_sync(kAllLanes, (pair & 0xffff) == kEmptyDigest); even;
       even &= even - 1) {
    free |= 1ull << (2 * (__ffs(static_cast<int>(even)) - 1));
  }
  for (unsigned odd = __ballot_sync(kAllLanes, pair >> 16 == kEmptyDigest); odd; odd &= odd - 1) {
    free |= 2ull << (2 * (__ffs(static_cast<int>(odd)) - 1));
  }
  return free;
}

// A free slot of an id's buckets, or kNoSlot; as cpu::free_slot.
__device__ __forceinline__ int64_t free_slot(const TableView& table, const BucketChoice& choice) {
  const uint64_t free_first = free_slots_of_warp(table, choice.first);
  const uint64_t free_second = free_slots_of_warp(table, choice.second);
  const bool first = prefers_first(table.bucket_slots, __popcll(free_first), __popcll(free_second));
  const uint64_t free = first ? free_first : free_second;
  if (free == 0) return kNoSlot;
  return static_cast<int64_t>(first ? choice.first : choice.second) * table.bucket_slots +
         __ffsll(static_cast<long long>(free)) - 1;
}

// The slot of the lowest rank in two full buckets; the first of equal ones.
__device__ Victim lowest_rank_of_warp(const TableView& table, const BucketChoice& choice) {
  Rank lowest{~0ull, kFreeStep};
  uint32_t place = 2 * kBucketDigests;
  const int64_t starts[2] = {static_cast<int64_t>(choice.first) * table.bucket_slots,
                             static_cast<int64_t>(choice.second) * table.bucket_slots};
  for (uint32_t bucket = 0; bucket < 2; ++bucket) {
    for (int p = threadIdx.x % kWarp; p < table.bucket_slots; p += kWarp) {
      const Rank rank = rank_of(table, starts[bucket] + p);
      if (rank.last_step == kFreeStep || !(rank < lowest)) continue;
      lowest = rank;
      place = bucket * kBucketDigests + p;
    }
  }
  for (int offset = kWarp / 2; offset; offset /= 2) {
    const Rank other{__shfl_xor_sync(kAllLanes, lowest.score, offset),
                     __shfl_xor_sync(kAllLanes, lowest.last_step, offset)};
    const uint32_t other_place = __shfl_xor_sync(kAllLanes, place, offset);
    if (other < lowest || (!(lowest < other) && other_place < place)) {
      lowest = other;
      place = other_place;
    }
  }
  if (place == 2 * kBucketDigests) return Victim{kNoSlot, lowest};
  return Victim{starts[place / kBucketDigests] + place % kBucketDigests, lowest};
}

// Copies the entry that entry i replaces to place i.
__device__ void copy_displaced(const TableView& table, const Victim& victim,
                               const DisplacedEntries& displaced, int64_t i) {
  const Widths widths(table);
  if (threadIdx.x % kWarp == 0) {
    displaced.ids[i] = id_of_slot(table, victim.slot);
    displaced.last_steps[i] = victim.rank.last_step;
    if (table.scores != nullptr) displaced.scores[i] = load_score(table, victim.slot);
  }
  copy_vector(displaced.rows + i * widths.row, table.row(victim.slot), widths.row);
  copy_vector(reinterpret_cast<char*>(displaced.states) + i * widths.state,
              reinterpret_cast<const char*>(table.state(victim.slot)), widths.state);
  __syncwarp();  // the data that was read may be overwritten
}

__device__ __forceinline__ uint32_t load_acquire(const uint32_t* from) {
  uint32_t v;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(from) : "memory");
  return v;
}

__global__ void __launch_bounds__(kThreads)
    restore_in_order_kernel(TableView table, Entries entries, DisplacedEntries displaced,
                            const RestoreOrder order) {
  const int lane = threadIdx.x % kWarp;
  for (;;) {
    uint32_t number = 0;
    if (lane == 0) number = atomicAdd(order.next, 1u);
    number = __shfl_sync(kAllLanes, number, 0);
    if (number >= entries.n) return;
    const int64_t i = number;
    const BucketChoice choice = choose_buckets(entries.ids[i], table.num_buckets);
    const uint32_t first_ticket = order.tickets[2 * i], second_ticket = order.tickets[2 * i + 1];
    const bool one_bucket = choice.first == choice.second;
    // Every lane reads the turns itself, so that it sees all earlier writes.
    while (!__all_sync(kAllLanes, load_acquire(&order.turns[choice.first]) == first_ticket &&
                                      (one_bucket || load_acquire(&order.turns[choice.second]) ==
                                                         second_ticket))) {
      __nanosleep(20);
    }
    int64_t slot = free_slot(table, choice);
    bool replaces = false;
    if (slot == kNoSlot) {
      const Victim victim = lowest_rank_of_warp(table, choice);
      replaces = victim.slot != kNoSlot && victim.rank < entries.rank(table.ranking(), i);
      if (replaces) {
        slot = victim.slot;
        copy_displaced(table, victim, displaced, i);
      }
      if (lane == 0) {
        atomicAdd(reinterpret_cast<unsigned long long*>(&displaced.counts[replaces ? 0 : 1]), 1ull);
      }
    }
    if (slot != kNoSlot) {
      write_entry(table, slot, entries, i);
      if (lane == 0) {
        restore_step(table, slot, entries.last_steps[i]);
        store_l2(digest_of_slot(table, slot), choice.digest);
      }
    }
    __threadfence();
    __syncwarp();
    if (lane == 0) {
      order.moved[i] = replaces;
      store_l2(&order.turns[choice.second], second_ticket + 1);
      if (!one_bucket) store_l2(&order.turns[choice.first], first_ticket + 1);
    }
  }
}

}  // namespace

void entry_buckets(const TableView& table, const Entries& entries, int64_t* buckets,
                   cudaStream_t stream) {
  if (entries.n == 0) return;
  buckets_kernel<<<grid_for(entries.n), kThreads, 0, stream>>>(table, entries, buckets);
  HKV_CUDA_CHECK_LAUNCH();
}

void restore_entries_in_order(const TableView& table, const Entries& entries,
                              const DisplacedEntries& displaced, const int64_t* buckets,
                              const int64_t* queue_positions, const RestoreOrder& order,
                              cudaStream_t stream) {
  if (entries.n == 0) return;
  store_tickets_kernel<<<grid_for(2 * entries.n), kThreads, 0, stream>>>(buckets, queue_positions,
                                                                         2 * entries.n, order);
  HKV_CUDA_CHECK_LAUNCH();
  const unsigned grid = min(grid_for(entries.n * kWarp), resident_blocks(restore_in_order_kernel));
  restore_in_order_kernel<<<grid, kThreads, 0, stream>>>(table, entries, displaced, order);
  HKV_CUDA_CHECK_LAUNCH();
}

}  // namespace torchrec_hkv::hash_table::cuda
