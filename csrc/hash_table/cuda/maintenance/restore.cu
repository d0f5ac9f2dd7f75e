// Restores entries of a file to a table on the GPU, one warp for each entry.
//
// Entries that are inserted as new ids are placed in two launches. The first fills free slots,
// claimed by compare-and-swap on their digests. The second only finds full buckets with complete
// entries. It claims a victim by compare-and-swap on its last step, which then marks the slot as
// busy. If an entry ranks below all entries that it can read, but a slot is busy, it is returned as
// displaced and tried again, because it may rank above the new entry of the busy slot.
#include "common/cuda_check.h"
#include "hash_table/cuda/bucket.cuh"
#include "hash_table/cuda/entry.cuh"
#include "hash_table/cuda/maintenance/restore.cuh"
#include "hash_table/kernels.h"

namespace torchrec_hkv::hash_table::cuda {
namespace {

constexpr uint32_t kBusyStep = 0xffffffffu;

// The data of a displaced entry.
struct EntryData {
  int64_t id;
  uint64_t score;
  uint32_t last_step;
  const char* row;
  const char* state;
};

__device__ void append_displaced(const TableView& table, const EntryData& source,
                                 const DisplacedEntries& displaced) {
  unsigned long long at = 0;
  if (threadIdx.x % kWarp == 0) {
    at = atomicAdd(reinterpret_cast<unsigned long long*>(&displaced.counts[0]), 1ull);
    displaced.ids[at] = source.id;
    displaced.last_steps[at] = source.last_step;
    if (table.scores != nullptr) displaced.scores[at] = source.score;
  }
  at = __shfl_sync(kAllLanes, at, 0);
  const Widths widths(table);
  copy_vector(displaced.rows + at * widths.row, source.row, widths.row);
  copy_vector(reinterpret_cast<char*>(displaced.states) + at * widths.state, source.state,
              widths.state);
}

__device__ __forceinline__ int64_t warp_index() {
  return (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) / kWarp;
}

__global__ void __launch_bounds__(kThreads)
    owners_kernel(TableView table, int64_t first, int64_t n, int32_t* __restrict__ owners) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= n) return;
  const int64_t slot = first + i;
  owners[i] = *digest_of_slot(table, slot) == kEmptyDigest
                  ? -1
                  : static_cast<int32_t>(owner_bucket(id_of_slot(table, slot)));
}

// Claims a free slot; all lanes get the result.
__device__ __forceinline__ bool claim_free(const TableView& table, int64_t slot, uint16_t digest) {
  static_assert(sizeof(unsigned short) == sizeof(uint16_t));
  int claimed = 0;
  if (threadIdx.x % kWarp == 0) {
    claimed = atomicCAS(reinterpret_cast<unsigned short*>(digest_of_slot(table, slot)),
                        kEmptyDigest, digest) == kEmptyDigest;
  }
  return __shfl_sync(kAllLanes, claimed, 0) != 0;
}

__global__ void __launch_bounds__(kThreads)
    restore_slots_kernel(TableView table, Entries entries, const int64_t* __restrict__ slots,
                         bool* __restrict__ placed) {
  const int64_t i = warp_index();
  if (i >= entries.n) return;
  const int64_t slot = slots[i];
  const BucketChoice choice = choose_buckets(entries.ids[i], table.num_buckets);
  const int64_t bucket = slot < 0 ? -1 : slot / table.bucket_slots;
  // Two entries may have the same slot; the first to claim it gets it.
  const bool claimed =
      (bucket == choice.first || bucket == choice.second) && claim_free(table, slot, choice.digest);
  if (claimed) write_entry(table, slot, entries, i);
  if (threadIdx.x % kWarp == 0) {
    placed[i] = claimed;
    if (claimed) restore_step(table, slot, entries.last_steps[i]);
  }
}

__global__ void __launch_bounds__(kThreads)
    overwrite_slots_kernel(TableView table, Entries entries, const int64_t* __restrict__ slots) {
  const int64_t i = warp_index();
  if (i >= entries.n) return;
  const int64_t slot = slots[i];
  if (slot < 0 || slot >= table.num_slots) return;
  // Ids of free slots have no meaning.
  if (*digest_of_slot(table, slot) == kEmptyDigest) return;
  if (id_of_slot(table, slot) != entries.ids[i]) return;
  write_entry(table, slot, entries, i);
  if (threadIdx.x % kWarp == 0) restore_step(table, slot, entries.last_steps[i]);
}

// The free positions of a bucket; the same result in all lanes.
struct FreePositions {
  unsigned even;  // bit k: position 2 k
  unsigned odd;   // bit k: position 2 k + 1

  __device__ int number() const { return __popc(even) + __popc(odd); }
  __device__ int any() const { return even ? 2 * __ffs(even) - 2 : 2 * __ffs(odd) - 1; }
};

__device__ __forceinline__ FreePositions free_positions(const TableView& table, uint32_t bucket) {
  const uint16_t* line = table.digests + static_cast<int64_t>(bucket) * kBucketDigests;
  const uint32_t pair = load_l2(reinterpret_cast<const uint32_t*>(line) + threadIdx.x % kWarp);
  return {__ballot_sync(kAllLanes, (pair & 0xffff) == kEmptyDigest),
          __ballot_sync(kAllLanes, pair >> 16 == kEmptyDigest)};
}

__global__ void __launch_bounds__(kThreads)
    fill_kernel(TableView table, Entries entries, bool* __restrict__ waiting) {
  const int64_t i = warp_index();
  if (i >= entries.n) return;
  const BucketChoice choice = choose_buckets(entries.ids[i], table.num_buckets);
  int64_t slot = kNoSlot;
  for (;;) {
    const FreePositions free_first = free_positions(table, choice.first);
    const FreePositions free_second = free_positions(table, choice.second);
    if (free_first.number() + free_second.number() == 0) break;
    const bool first = prefers_first(table.bucket_slots, free_first.number(), free_second.number());
    slot = static_cast<int64_t>(first ? choice.first : choice.second) * table.bucket_slots +
           (first ? free_first : free_second).any();
    if (claim_free(table, slot, choice.digest)) break;
    slot = kNoSlot;
  }
  if (slot != kNoSlot) write_entry(table, slot, entries, i);
  if (threadIdx.x % kWarp == 0) {
    waiting[i] = slot == kNoSlot;
    if (slot != kNoSlot) restore_step(table, slot, entries.last_steps[i]);
  }
}

struct RestoreVictim {
  int64_t slot;  // kNoSlot: no victim
  Rank rank;
  bool busy;  // whether a busy slot was left out
};

// The slot of the lowest rank in two full buckets; the same result in all lanes.
__device__ RestoreVictim lowest_rank(const TableView& table, const BucketChoice& choice) {
  RestoreVictim lowest{kNoSlot, {~0ull, kBusyStep}, false};
  for (int b = 0; b < 2; ++b) {
    const int64_t base =
        static_cast<int64_t>(b == 0 ? choice.first : choice.second) * table.bucket_slots;
    for (int p = threadIdx.x % kWarp; p < table.bucket_slots; p += kWarp) {
      const Rank rank = rank_of(table, base + p);
      if (rank.last_step == kBusyStep) {
        lowest.busy = true;
      } else if (rank < lowest.rank) {
        lowest.slot = base + p;
        lowest.rank = rank;
      }
    }
  }
  for (int offset = kWarp / 2; offset; offset /= 2) {
    RestoreVictim other;
    other.slot = __shfl_xor_sync(kAllLanes, lowest.slot, offset);
    other.rank.score = __shfl_xor_sync(kAllLanes, lowest.rank.score, offset);
    other.rank.last_step = __shfl_xor_sync(kAllLanes, lowest.rank.last_step, offset);
    // Ties go to the lower slot in every lane, so that all agree.
    if (other.rank < lowest.rank || (!(lowest.rank < other.rank) && other.slot < lowest.slot)) {
      lowest.slot = other.slot;
      lowest.rank = other.rank;
    }
  }
  lowest.busy = __any_sync(kAllLanes, lowest.busy);
  return lowest;
}

// Marks a victim's slot as busy; all lanes get the result. Between the read and the claim another
// entry with the same last step may have taken the slot; the score distinguishes them.
__device__ bool claim_victim(const TableView& table, const RestoreVictim& victim) {
  int claimed = 0;
  if (threadIdx.x % kWarp == 0) {
    uint32_t* step = step_of(table, victim.slot);
    claimed = atomicCAS(step, victim.rank.last_step, kBusyStep) == victim.rank.last_step;
    __threadfence();
    if (claimed && table.scores != nullptr &&
        table.ranking().of(load_score(table, victim.slot), victim.rank.last_step) !=
            victim.rank.score) {
      store_l2(step, victim.rank.last_step);
      claimed = 0;
    }
  }
  claimed = __shfl_sync(kAllLanes, claimed, 0);
  __syncwarp();  // the other lanes see what lane 0's fence has made visible
  return claimed != 0;
}

__global__ void __launch_bounds__(kThreads)
    replace_kernel(TableView table, Entries entries, DisplacedEntries displaced,
                   const bool* __restrict__ waiting) {
  const int64_t i = warp_index();
  if (i >= entries.n || !waiting[i]) return;
  const Widths widths(table);
  const BucketChoice choice = choose_buckets(entries.ids[i], table.num_buckets);
  const Rank entry_rank = entries.rank(table.ranking(), i);
  const auto score_of = [&](const uint64_t* scores, int64_t at) {
    return scores == nullptr ? uint64_t{0} : scores[at];
  };
  RestoreVictim victim;
  do {
    victim = lowest_rank(table, choice);
    if (victim.slot == kNoSlot || !(victim.rank < entry_rank)) {
      if (victim.busy) {
        append_displaced(table,
                         {entries.ids[i], score_of(entries.scores, i), entry_rank.last_step,
                          entries.rows + i * widths.row,
                          reinterpret_cast<const char*>(entries.states) + i * widths.state},
                         displaced);
      } else if (threadIdx.x % kWarp == 0) {
        atomicAdd(reinterpret_cast<unsigned long long*>(&displaced.counts[1]), 1ull);
      }
      return;
    }
  } while (!claim_victim(table, victim));
  const int64_t slot = victim.slot;
  append_displaced(
      table,
      {id_of_slot(table, slot), table.scores == nullptr ? 0 : load_score(table, slot),
       victim.rank.last_step, table.row(slot), reinterpret_cast<const char*>(table.state(slot))},
      displaced);
  __syncwarp();
  write_entry(table, slot, entries, i);
  if (threadIdx.x % kWarp == 0) store_l2(digest_of_slot(table, slot), choice.digest);
  __threadfence();
  __syncwarp();
  if (threadIdx.x % kWarp == 0) restore_step(table, slot, entry_rank.last_step);
}

}  // namespace

void slot_owners(const TableView& table, int64_t first, int64_t n, int32_t* owners,
                 cudaStream_t stream) {
  if (n == 0) return;
  owners_kernel<<<grid_for(n), kThreads, 0, stream>>>(table, first, n, owners);
  HKV_CUDA_CHECK_LAUNCH();
}

void restore_slots(const TableView& table, const Entries& entries, const int64_t* slots,
                   bool* placed, cudaStream_t stream) {
  if (entries.n == 0) return;
  restore_slots_kernel<<<grid_for(entries.n * kWarp), kThreads, 0, stream>>>(table, entries, slots,
                                                                             placed);
  HKV_CUDA_CHECK_LAUNCH();
}

void overwrite_slots(const TableView& table, const Entries& entries, const int64_t* slots,
                     cudaStream_t stream) {
  if (entries.n == 0) return;
  overwrite_slots_kernel<<<grid_for(entries.n * kWarp), kThreads, 0, stream>>>(table, entries,
                                                                               slots);
  HKV_CUDA_CHECK_LAUNCH();
}

void restore_entries(const TableView& table, const Entries& entries,
                     const DisplacedEntries& displaced, bool* waiting, cudaStream_t stream) {
  if (entries.n == 0) return;
  const unsigned grid = grid_for(entries.n * kWarp);
  fill_kernel<<<grid, kThreads, 0, stream>>>(table, entries, waiting);
  HKV_CUDA_CHECK_LAUNCH();
  replace_kernel<<<grid, kThreads, 0, stream>>>(table, entries, displaced, waiting);
  HKV_CUDA_CHECK_LAUNCH();
}

}  // namespace torchrec_hkv::hash_table::cuda
