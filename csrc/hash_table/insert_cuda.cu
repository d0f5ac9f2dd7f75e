// find_or_insert on the GPU, without locks:
//   1. find and touch; a missing id's slot is kNoSlot.
//   2. deduplicate the missing ids in a scratch table: one position of each goes on a list, the
//   others
//      remember it.
//   3. insert the ids on the list. As each is there once, a tile of eight lanes that has claimed a
//   slot
//      has it for itself: a free slot by compare-and-swap on its digest, a victim's by
//      compare-and-swap on its last step, which becomes the present one and so is no victim any
//      more. Free slots hold the last step kFreeStep, which is no victim's either.
//   4. the other positions take the slots of those they remember.
#include <algorithm>

#include "common/cuda_check.h"
#include "hash_table/admission_kernels.h"
#include "hash_table/bucket_cuda.cuh"
#include "hash_table/find_cuda.cuh"
#include "hash_table/kernels.h"
#include "hash_table/row_vector.cuh"

namespace torchrec_hkv::hash_table::cuda {
namespace {

constexpr int kTile = kLineVectors;  // lanes that place one id

// slots[] of a position whose id another position has put on the list.
__device__ __forceinline__ int64_t remember(int64_t position) { return -2 - position; }
__device__ __forceinline__ bool is_remembered(int64_t slot) {
  return slot <= -2 && slot != kNotAdmitted;
}
__device__ __forceinline__ int64_t remembered(int64_t slot) { return -2 - slot; }

struct Scratch {
  uint32_t* table;  // [table_size] 1 + position, 0: free
  uint32_t table_mask;
  uint32_t* list;    // [num_ids]
  uint32_t* length;  // of the list
  size_t bytes;      // of all
  size_t zeroed;     // of these, from the beginning on, to be zeroed
};

Scratch layout(int64_t n, char* base) {
  uint32_t size = 1024;
  while (size < 2 * n && size < (1u << 31)) size *= 2;
  Scratch scratch;
  scratch.length = reinterpret_cast<uint32_t*>(base);
  scratch.table = scratch.length + 32;  // a line of its own for the length
  scratch.table_mask = size - 1;
  scratch.list = scratch.table + size;
  scratch.zeroed = (32 + static_cast<size_t>(size)) * sizeof(uint32_t);
  scratch.bytes = scratch.zeroed + n * sizeof(uint32_t);
  return scratch;
}

__device__ __forceinline__ const TableView& table_at(const TableView* tables, const Batch& batch,
                                                     int64_t position) {
  return tables[batch.feature_tables[batch.feature_of(position)]];
}

// Appends the positions of the threads that want it to the list: one atomic a block.
__device__ __forceinline__ void append(const Scratch& scratch, int64_t position, bool wanted) {
  __shared__ uint32_t warp_ends[kThreads / kWarp];
  __shared__ uint32_t base;
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const unsigned all = __ballot_sync(kAllLanes, wanted);
  if (lane == 0) warp_ends[warp] = __popc(all);
  __syncthreads();
  if (threadIdx.x == 0) {
    uint32_t sum = 0;
    for (uint32_t& end : warp_ends) end = sum += end;
    base = sum == 0 ? 0 : atomicAdd(scratch.length, sum);
  }
  __syncthreads();
  if (!wanted) return;
  const uint32_t begin = base + (warp == 0 ? 0 : warp_ends[warp - 1]);
  scratch.list[begin + __popc(all & ((1u << lane) - 1))] = static_cast<uint32_t>(position);
}

// Adds up how many of the block's threads miss an id of one table; neighbours mostly share theirs.
__device__ __forceinline__ void count_misses(const TableView* table, bool missing) {
  __shared__ uint32_t common_thread;
  __shared__ uint32_t common_misses;
  __shared__ const TableView* tables_of_threads[kThreads];
  if (threadIdx.x == 0) {
    common_thread = kThreads;
    common_misses = 0;
  }
  tables_of_threads[threadIdx.x] = table;
  __syncthreads();
  if (missing) atomicMin(&common_thread, threadIdx.x);
  __syncthreads();
  const TableView* common = tables_of_threads[common_thread % kThreads];
  const unsigned of_common = __ballot_sync(kAllLanes, missing && table == common);
  if (threadIdx.x % kWarp == 0 && of_common) atomicAdd(&common_misses, __popc(of_common));
  count_warp(table, kMisses, missing && table != common);
  __syncthreads();
  if (threadIdx.x == 0 && common_misses > 0) count(*common, kMisses, common_misses);
}

// kByScore: of several positions of an id, the one with the highest score is inserted, so that an
// id is refused only if all its scores are too low; what they remember is then the scratch table's
// entry until list_kernel replaces it.
template <bool kByScore>
__global__ void __launch_bounds__(kThreads)
    deduplicate_kernel(const TableView* __restrict__ tables, const Batch batch, const Visit visit,
                       int64_t* __restrict__ slots, const Scratch scratch) {
  const int64_t position = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (blockIdx.x == 0) {  // lookups are known without looking
    for (int32_t f = threadIdx.x; f < batch.num_features; f += kThreads) {
      const int64_t ids = batch.feature_start(f + 1) - batch.feature_start(f);
      if (ids > 0) count(tables[batch.feature_tables[f]], kLookups, ids);
    }
  }
  const bool missing = position < batch.num_ids && slots[position] == kNoSlot;
  if (!__syncthreads_or(missing)) return;
  const TableView* table = nullptr;
  bool listed = false;
  if (missing) {
    table = &table_at(tables, batch, position);
    const int64_t id = batch.ids[position];
    const auto mine = static_cast<uint32_t>(position + 1);
    auto at =
        static_cast<uint32_t>(mix64(static_cast<uint64_t>(id) + reinterpret_cast<uint64_t>(table)));
    for (bool done = false; !done; ++at) {
      const uint32_t index = at & scratch.table_mask;
      uint32_t there = load_l2(&scratch.table[index]);
      if (there == 0) there = atomicCAS(&scratch.table[index], 0u, mine);
      if (there == 0) {
        listed = done = true;
      } else {
        int64_t other = static_cast<int64_t>(there) - 1;
        done = batch.ids[other] == id && &table_at(tables, batch, other) == table;
        if (done && !kByScore) slots[position] = remember(other);
        while (kByScore && done && visit.given(position) > visit.given(other)) {
          const uint32_t seen = atomicCAS(&scratch.table[index], there, mine);
          if (seen == there) break;
          there = seen;
          other = static_cast<int64_t>(there) - 1;
        }
      }
      if (kByScore && done) slots[position] = remember(index);
    }
  }
  if (!kByScore) append(scratch, position, listed);
  count_misses(table, missing);
}

__global__ void __launch_bounds__(kThreads)
    list_kernel(int64_t n, int64_t* __restrict__ slots, const Scratch scratch) {
  const int64_t position = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const bool waiting = position < n && is_remembered(slots[position]);
  if (!__syncthreads_or(waiting)) return;
  bool listed = false;
  if (waiting) {
    const int64_t chosen = static_cast<int64_t>(scratch.table[remembered(slots[position])]) - 1;
    listed = chosen == position;
    slots[position] = listed ? kNoSlot : remember(chosen);
  }
  append(scratch, position, listed);
}

// What a tile's lane holds of one bucket: eight digests and the slots they stand for.
struct LaneSlots {
  const uint16_t* digests;
  int64_t first_slot;
  // The bucket's slots from the first of these on: fewer than eight at its end, or less than one.
  // Not clamped to 0 .. 8: as nvcc 13.0 compiles that, load_steps takes 5 for 8
  // (docs/hash_table.md).
  int32_t left;
};

__device__ __forceinline__ LaneSlots lane_slots(const TableView& table, uint32_t bucket, int lane) {
  LaneSlots mine;
  mine.digests = digest_line(table, bucket) + lane * kVectorDigests;
  mine.first_slot = static_cast<int64_t>(bucket) * table.bucket_slots + lane * kVectorDigests;
  mine.left = table.bucket_slots - lane * kVectorDigests;
  return mine;
}

__device__ __forceinline__ int tile_sum(int value, unsigned tile) {
#pragma unroll
  for (int offset = kTile / 2; offset; offset /= 2) value += __shfl_xor_sync(tile, value, offset);
  return value;
}

// Claims a free slot of one bucket; kNoSlot where another tile was faster. All lanes agree.
__device__ int64_t claim_free(const LaneSlots& mine, uint32_t free, uint16_t digest,
                              unsigned tile) {
  const int claimer = __ffs(static_cast<int>(__ballot_sync(tile, free != 0))) - 1;
  int64_t slot = kNoSlot;
  if (static_cast<int>(threadIdx.x % kWarp) == claimer) {
    const int position = __ffs(static_cast<int>(free)) - 1;
    // Two digests share a word; a neighbour that changes meanwhile is no reason to give up.
    auto* word =
        const_cast<uint32_t*>(reinterpret_cast<const uint32_t*>(mine.digests)) + position / 2;
    const int shift = position % 2 * 16;
    uint32_t old = load_l2(word);
    while ((old >> shift & 0xffffu) == kEmptyDigest) {
      const uint32_t seen = atomicCAS(word, old, old | static_cast<uint32_t>(digest) << shift);
      if (seen == old) {
        slot = mine.first_slot + position;
        break;
      }
      old = seen;
    }
  }
  return __shfl_sync(tile, slot, claimer);
}

struct Victim {
  int64_t slot;  // kNoSlot: none
  Rank rank;
};

// The lane's last steps of one bucket. Those past the bucket's capacity are later than any step.
struct LaneSteps {
  uint32_t v[kVectorDigests];
};
__device__ __forceinline__ LaneSteps load_steps(const TableView& table, const LaneSlots& mine) {
  const uint32_t* from = table.last_steps + mine.first_slot;
  if (mine.left >= kVectorDigests && mine.first_slot % 4 == 0) {
    const uint4 low = load_vector_l2(from), high = load_vector_l2(from + 4);
    return {{low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w}};
  }
  LaneSteps steps;
#pragma unroll
  for (int k = 0; k < kVectorDigests; ++k) {
    steps.v[k] = kFreeStep;
    if (k < mine.left) steps.v[k] = load_l2(from + k);
  }
  return steps;
}

// The slot of the lowest rank in the lanes' slots of both buckets that is not pinned.
__device__ Victim lowest_rank(const TableView& table, const LaneSlots& first,
                              const LaneSlots& second, uint32_t pinned_from, unsigned tile) {
  Victim lowest{kNoSlot, {~0ull, 0xffffffffu}};
  const LaneSteps steps[2] = {load_steps(table, first), load_steps(table, second)};
#pragma unroll
  for (int b = 0; b < 2; ++b) {
    const int64_t first_slot = b == 0 ? first.first_slot : second.first_slot;
#pragma unroll
    for (int k = 0; k < kVectorDigests; ++k) {
      const uint32_t step = steps[b].v[k];
      if (step >= pinned_from) continue;
      const Rank rank{table.scores == nullptr ? step : load_score(table, first_slot + k), step};
      if (rank < lowest.rank) lowest = Victim{first_slot + k, rank};
    }
  }
#pragma unroll
  for (int offset = kTile / 2; offset; offset /= 2) {
    Victim other;
    other.slot = __shfl_xor_sync(tile, lowest.slot, offset);
    other.rank.score = __shfl_xor_sync(tile, lowest.rank.score, offset);
    other.rank.last_step = __shfl_xor_sync(tile, lowest.rank.last_step, offset);
    // Ties go to the lower slot in every lane, so that all agree.
    if (other.rank < lowest.rank || (!(lowest.rank < other.rank) && other.slot < lowest.slot)) {
      lowest = other;
    }
  }
  return lowest;
}

template <int kWidth>
__device__ __forceinline__ void write_initial_row(const TableView& table, int64_t id, char* row,
                                                  int lane) {
  for (int32_t c = lane * kWidth; c < table.dim(); c += kTile * kWidth) {
    Columns<kWidth>::initial(table.initial_rows, id, table.column_offset + c)
        .store(table.rows.type, row, c);
  }
}

__device__ void write_new_row(const TableView& table, int64_t id, int64_t slot, bool initialize,
                              int lane) {
  if (initialize) {
    char* row = table.rows.row(slot);
    if ((table.dim() | table.column_offset) % 4 == 0) {
      write_initial_row<4>(table, id, row, lane);
    } else {
      write_initial_row<1>(table, id, row, lane);
    }
  }
  float* state = table.state(slot);
  for (int32_t c = lane; c < table.states.width; c += kTile) state[c] = 0.0f;
}

// Notes what leaves or is refused; all lanes of a tile.
__device__ void note_leaver(const TableView& table, const Leavers& leavers, int64_t id,
                            uint64_t score, const char* row, unsigned tile, int lane) {
  if (leavers.number == nullptr) return;
  unsigned long long at = 0;
  if (lane == 0) {
    at = atomicAdd(reinterpret_cast<unsigned long long*>(leavers.number), 1ull);
    leavers.ids[at] = id;
    leavers.scores[at] = score;
  }
  at = __shfl_sync(tile, at, threadIdx.x % kWarp - lane);
  const int32_t bytes = table.dim() * element_size(table.rows.type);
  char* to = leavers.rows + at * bytes;
  for (int32_t b = 2 * lane; b < bytes; b += 2 * kTile) {
    *reinterpret_cast<uint16_t*>(to + b) = *reinterpret_cast<const volatile uint16_t*>(row + b);
  }
  __syncwarp(tile);  // the row has been read before it is written
}

// How an id fared; counted at the end of a warp's turn.
enum Fate : int { kPlaced, kReplaced, kOutranked, kNoRoom };

// Places one id; all lanes of a tile.
__device__ Fate place(const TableView& table, const Batch& batch, const Visit& visit,
                      const Placement& placement, int64_t position, int64_t* slots, unsigned tile,
                      int lane) {
  const int64_t id = batch.ids[position];
  const uint64_t score = first_score(table.eviction, visit.now, visit.epoch, visit.given(position));
  const BucketChoice choice = choose_buckets(id, table.num_buckets);
  const LaneSlots first = lane_slots(table, choice.first, lane);
  const LaneSlots second = lane_slots(table, choice.second, lane);
  Fate fate = kPlaced;
  int64_t slot = kNoSlot;
  while (slot == kNoSlot) {
    const uint32_t free_first = match_vector(load_vector_l2(first.digests), kEmptyDigest);
    const int number_first = tile_sum(__popc(free_first), tile);
    // An id that has room enough in its first bucket need not look at the second.
    if (prefers_first(table.bucket_slots, number_first, kBucketDigests)) {
      slot = claim_free(first, free_first, choice.digest, tile);
      continue;
    }
    const uint32_t free_second = match_vector(load_vector_l2(second.digests), kEmptyDigest);
    const int number_second = tile_sum(__popc(free_second), tile);
    if (number_first + number_second > 0) {
      const bool take_first = prefers_first(table.bucket_slots, number_first, number_second);
      slot = claim_free(take_first ? first : second, take_first ? free_first : free_second,
                        choice.digest, tile);
      continue;
    }
    const Victim victim = lowest_rank(table, first, second, visit.pinned_from, tile);
    if (victim.slot == kNoSlot || (placement.refuse_lower && score < victim.rank.score)) {
      const int64_t bytes = static_cast<int64_t>(table.dim()) * element_size(table.rows.type);
      note_leaver(table, placement.leavers, id, score,
                  placement.leavers.given_rows + position * bytes, tile, lane);
      return victim.slot == kNoSlot ? kNoRoom : kOutranked;
    }
    uint32_t claimed = 0;
    if (lane == 0) {
      claimed = atomicCAS(&table.last_steps[victim.slot], victim.rank.last_step, visit.now) ==
                victim.rank.last_step;
    }
    if (__shfl_sync(tile, claimed, threadIdx.x % kWarp - lane)) {
      fate = kReplaced;
      slot = victim.slot;
      note_leaver(table, placement.leavers, table.ids[slot], victim.rank.score,
                  table.rows.row(slot), tile, lane);
      if (lane == 0) {
        const int64_t bucket = slot / table.bucket_slots;
        store_l2(&table.digests[bucket * kBucketDigests + (slot - bucket * table.bucket_slots)],
                 choice.digest);
      }
    }
  }
  if (lane == 0) {
    table.ids[slot] = id;
    store_l2(&table.last_steps[slot], visit.now);
    if (table.scores != nullptr) table.scores[slot] = score;
    slots[position] = table.first_slot + slot;
  }
  write_new_row(table, id, slot, placement.initialize, lane);
  return fate;
}

// What became of the ids that a tile has placed since it last changed tables.
struct Fates {
  const TableView* table = nullptr;
  uint32_t of[4] = {};

  __device__ void flush(bool wanted) {
    constexpr Counter kCounters[4] = {kInserted, kEvicted, kRefused, kCrowded};
    const uint32_t sums[4] = {of[kPlaced] + of[kReplaced], of[kReplaced],
                              of[kOutranked] + of[kNoRoom], of[kNoRoom]};
    for (int c = 0; c < 4; ++c) {
      if (wanted && sums[c] > 0) count(*table, kCounters[c], sums[c]);
      of[c] = 0;
    }
  }
};

__global__ void __launch_bounds__(kThreads)
    insert_kernel(const TableView* __restrict__ tables, const Batch batch, const Visit visit,
                  const Placement placement, int64_t* slots, const Scratch scratch) {
  const int lane = threadIdx.x % kTile;
  const unsigned tile = 0xffu << (threadIdx.x % kWarp - lane);
  const int64_t length = *scratch.length;
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kThreads / kTile;
  Fates fates;
  for (int64_t item = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) / kTile;
       item < length; item += stride) {
    const int64_t position = scratch.list[item];
    const TableView* table = &table_at(tables, batch, position);
    if (table != fates.table) {
      if (fates.table != nullptr) fates.flush(lane == 0);
      fates.table = table;
    }
    const Fate fate = place(*table, batch, visit, placement, position, slots, tile, lane);
    fates.of[kPlaced] += fate == kPlaced;
    fates.of[kReplaced] += fate == kReplaced;
    fates.of[kOutranked] += fate == kOutranked;
    fates.of[kNoRoom] += fate == kNoRoom;
  }
  if (fates.table != nullptr) fates.flush(lane == 0);
}

__global__ void __launch_bounds__(kThreads)
    resolve_kernel(const TableView* __restrict__ tables, const Batch batch, const Visit visit,
                   const Placement placement, int64_t* __restrict__ slots, const Scratch scratch) {
  if (*scratch.length == 0) return;  // nothing was missing
  const int64_t position = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const bool waiting = position < batch.num_ids && is_remembered(slots[position]);
  const TableView* table = nullptr;
  bool refused = false;
  if (waiting) {
    table = &table_at(tables, batch, position);
    const int64_t slot = slots[remembered(slots[position])];
    slots[position] = slot;
    refused = slot == kNoSlot;
    if (!refused) touch(*table, slot - table->first_slot, visit, visit.given(position));
  }
  if (!__ballot_sync(kAllLanes, refused)) return;
  count_warp(table, kRefused, refused);
  // A refused id's other copies were given too, and are given back.
  const Leavers& leavers = placement.leavers;
  if (!refused || leavers.number == nullptr) return;
  const uint64_t at = atomicAdd(reinterpret_cast<unsigned long long*>(leavers.number), 1ull);
  const int64_t bytes = static_cast<int64_t>(table->dim()) * element_size(table->rows.type);
  leavers.ids[at] = batch.ids[position];
  leavers.scores[at] = first_score(table->eviction, visit.now, visit.epoch, visit.given(position));
  for (int64_t b = 0; b < bytes; b += 2) {
    *reinterpret_cast<uint16_t*>(leavers.rows + at * bytes + b) =
        *reinterpret_cast<const uint16_t*>(leavers.given_rows + position * bytes + b);
  }
}

// Blocks that fill the device, for a list whose length only the device knows.
unsigned resident_blocks() {
  int device = 0, processors = 0, blocks = 0;
  HKV_CUDA_CHECK(cudaGetDevice(&device));
  HKV_CUDA_CHECK(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device));
  HKV_CUDA_CHECK(
      cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, insert_kernel, kThreads, 0));
  return static_cast<unsigned>(processors * blocks);
}

}  // namespace

size_t find_or_insert_scratch(int64_t num_ids, const Admissions* admissions) {
  const size_t bytes = layout(num_ids, nullptr).bytes;
  if (admissions == nullptr) return bytes;
  return std::max(bytes, admission_scratch(*admissions, num_ids));
}

void find_or_insert(const TableView* tables, const TableView* only, const Batch& batch,
                    const Visit& visit, const Placement& placement, int64_t* slots, bool* found,
                    void* memory, cudaStream_t stream) {
  if (batch.num_ids == 0) return;
  const Scratch scratch = layout(batch.num_ids, static_cast<char*>(memory));
  find_and_touch(tables, only, batch, visit, slots, found, stream);
  if (placement.admissions != nullptr) {
    admit(tables, batch, visit, *placement.admissions, slots, memory, stream);
  }
  HKV_CUDA_CHECK(cudaMemsetAsync(memory, 0, scratch.zeroed, stream));
  const unsigned grid = grid_for(batch.num_ids);
  if (visit.scores == nullptr) {
    deduplicate_kernel<false><<<grid, kThreads, 0, stream>>>(tables, batch, visit, slots, scratch);
  } else {
    deduplicate_kernel<true><<<grid, kThreads, 0, stream>>>(tables, batch, visit, slots, scratch);
    HKV_CUDA_CHECK_LAUNCH();
    list_kernel<<<grid, kThreads, 0, stream>>>(batch.num_ids, slots, scratch);
  }
  HKV_CUDA_CHECK_LAUNCH();
  const unsigned most = grid_for(batch.num_ids * kTile);
  insert_kernel<<<std::min(most, resident_blocks()), kThreads, 0, stream>>>(
      tables, batch, visit, placement, slots, scratch);
  HKV_CUDA_CHECK_LAUNCH();
  resolve_kernel<<<grid, kThreads, 0, stream>>>(tables, batch, visit, placement, slots, scratch);
  HKV_CUDA_CHECK_LAUNCH();
  if (placement.admissions != nullptr) {
    finish_admission(tables, batch, visit, placement.leavers, slots, stream);
  }
}

}  // namespace torchrec_hkv::hash_table::cuda
