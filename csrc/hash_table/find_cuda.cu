// Finding on the GPU. A warp works on 32 ids: each lane hashes one, then tiles of four lanes look
// for them, each lane reading 32 of a line's 128 bytes, several ids of a tile at once, so that
// their loads overlap; the second bucket is read only where the first has no match. At the end each
// lane has the slot of its own id.
#include "common/cuda_check.h"
#include "hash_table/bucket_cuda.cuh"
#include "hash_table/find_cuda.cuh"
#include "hash_table/kernels.h"

namespace torchrec_hkv::hash_table::cuda {
namespace {

constexpr int kFindLanes = 4;
constexpr int kTilesOfWarp = kWarp / kFindLanes;
constexpr int kIdsInFlight = 2;                      // of a tile
constexpr int kVectors = kLineVectors / kFindLanes;  // a lane reads
// Blocks of a multiprocessor, which bound the registers of a thread.
constexpr int resident_blocks_of(bool touch) { return touch ? 4 : 5; }

constexpr uint32_t kNowhere = ~0u;
constexpr uint32_t kInSecond = kBucketDigests;  // added to positions in the second bucket

// One id on its way, as one of its lanes sees it.
struct Probe {
  int64_t id;
  uint32_t table;
  uint32_t bucket;
  uint32_t second;   // the other bucket; kNowhere once it is the one that is looked at
  uint32_t digest;   // in both halves
  uint32_t matches;  // of the lane's 16 digests, those to look at: match_pairs
  uint32_t place;    // of a hit: position in its bucket, see kInSecond
  bool searching;
  bool room;  // the lane has seen a free slot
  uint4 digests[kVectors];
};

__device__ __forceinline__ void load_digests(Probe& probe, const TableView& table, int lane) {
  const uint4* line = reinterpret_cast<const uint4*>(digest_line(table, probe.bucket));
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    probe.digests[v] = load_vector_once(line + v * kFindLanes + lane);
  }
}

// Which of the lane's digests equal the one in both halves of `pair`: bit 31 - j stands for the
// upper half of word j, bit 15 - j for its lower half.
__device__ __forceinline__ uint32_t match_pairs(const Probe& probe, uint32_t pair) {
  uint32_t matches = 0;
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const uint32_t words[4] = {probe.digests[v].x, probe.digests[v].y, probe.digests[v].z,
                               probe.digests[v].w};
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      // A half is zero exactly where neither it nor its lower 15 bits plus 2^15 - 1 reach bit 15.
      const uint32_t x = words[w] ^ pair;
      const uint32_t zero = ~(((x & 0x7fff7fffu) + 0x7fff7fffu) | x) & 0x80008000u;
      matches |= zero >> (4 * v + w);
    }
  }
  return matches;
}
// Position in the bucket of a bit of match_pairs.
__device__ __forceinline__ uint32_t position_of(int bit, int lane) {
  const int word = 15 - (bit & 15);
  return (word / 4 * kFindLanes + lane) * kVectorDigests + word % 4 * 2 + (bit >> 4);
}

// kOneTable: the view comes with the launch and not from memory. early: last steps are brought near
// before it is known that their ids are the right ones. That gains where the ids of many tables are
// spread; one table gains nothing, and of a hot id all lanes would ask for one address.
template <bool kTouch, bool kOneTable>
__global__ void __launch_bounds__(kThreads, resident_blocks_of(kTouch))
    find_kernel(const __grid_constant__ TableView only, const TableView* __restrict__ tables,
                const Batch batch, const Visit visit, int64_t* __restrict__ slots,
                const Found found, const Missing missing, bool early) {
  const int lane = threadIdx.x % kFindLanes;
  const int warp_lane = threadIdx.x % kWarp;
  const int tile = warp_lane / kFindLanes;
  const auto of_tile = [&](unsigned ballot, int number) {
    return ballot >> (number * kFindLanes) & ((1u << kFindLanes) - 1);
  };
  const int64_t at = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (kTouch) {  // the scratch of the kernels to come, a share of it for each thread
    for (int64_t i = at; i <= missing.mask; i += static_cast<int64_t>(gridDim.x) * kThreads) {
      missing.table[i] = 0;
    }
  }
  const bool given = at < batch.num_ids;
  const int64_t id = given ? batch.ids[at] : 0;
  uint32_t table_index = 0;
  if (!kOneTable && given) table_index = batch.feature_tables[batch.feature_of(at)];
  const TableView& own_table = kOneTable ? only : tables[table_index];
  const BucketChoice choice = choose_buckets(id, own_table.num_buckets);
  uint32_t place = kNowhere;
  bool room = false;
  const unsigned all_given = __ballot_sync(kAllLanes, given);
#pragma unroll 1
  for (int turn = 0; turn < kFindLanes; turn += kIdsInFlight) {
    Probe probes[kIdsInFlight];
#pragma unroll
    for (int k = 0; k < kIdsInFlight; ++k) {
      Probe& probe = probes[k];
      const int owner = (turn + k) * kTilesOfWarp + tile;
      probe.id = __shfl_sync(kAllLanes, id, owner);
      if (!kOneTable) probe.table = __shfl_sync(kAllLanes, table_index, owner);
      probe.bucket = __shfl_sync(kAllLanes, choice.first, owner);
      probe.second = __shfl_sync(kAllLanes, choice.second, owner);
      probe.digest = __shfl_sync(kAllLanes, static_cast<uint32_t>(choice.digest), owner);
      probe.digest *= 0x00010001u;
      probe.searching = all_given >> owner & 1;
      probe.room = false;
      probe.place = kNowhere;
      if (probe.searching) load_digests(probe, kOneTable ? only : tables[probe.table], lane);
    }
#pragma unroll
    for (int k = 0; k < kIdsInFlight; ++k) {
      probes[k].matches = probes[k].searching ? match_pairs(probes[k], probes[k].digest) : 0;
    }
    // Each round looks at one match of each lane.
    for (bool working = true; working;) {
      uint32_t candidates[kIdsInFlight];
      int64_t stored[kIdsInFlight];
#pragma unroll
      for (int k = 0; k < kIdsInFlight; ++k) {
        Probe& probe = probes[k];
        candidates[k] = kNowhere;
        if (probe.matches != 0) {
          const TableView& table = kOneTable ? only : tables[probe.table];
          candidates[k] = position_of(__ffs(static_cast<int>(probe.matches)) - 1, lane);
          probe.matches &= probe.matches - 1;
          const int64_t slot =
              static_cast<int64_t>(probe.bucket) * table.bucket_slots + candidates[k];
          stored[k] = table.ids[slot];
          // Most are hits, and will be touched.
          if (kTouch && early) prefetch_l2(&table.last_steps[slot]);
        }
      }
      bool reload[kIdsInFlight];
      working = false;
#pragma unroll
      for (int k = 0; k < kIdsInFlight; ++k) {
        Probe& probe = probes[k];
        const bool hit = candidates[k] != kNowhere && stored[k] == probe.id;
        const unsigned hits = of_tile(__ballot_sync(kAllLanes, hit), tile);
        const unsigned more = of_tile(__ballot_sync(kAllLanes, probe.matches != 0), tile);
        reload[k] = false;
        if (hit) probe.place = candidates[k] + (probe.second == kNowhere ? kInSecond : 0);
        if (hits != 0) {
          probe.searching = false;
          probe.matches = 0;
        } else if (probe.searching && more == 0) {
          if (kTouch) probe.room |= match_pairs(probe, kEmptyDigest) != 0;
          // A table of one bucket has no second one to look at.
          if (probe.second == kNowhere || probe.second == probe.bucket) {
            probe.searching = false;
          } else {
            probe.bucket = probe.second;
            probe.second = kNowhere;
            load_digests(probe, kOneTable ? only : tables[probe.table], lane);
            reload[k] = true;
          }
        }
      }
#pragma unroll
      for (int k = 0; k < kIdsInFlight; ++k) {
        if (reload[k]) probes[k].matches = match_pairs(probes[k], probes[k].digest);
        working |= probes[k].searching;
      }
      working = __any_sync(kAllLanes, working);
    }
    // What the tiles have found goes to the lanes whose ids they were.
#pragma unroll
    for (int k = 0; k < kIdsInFlight; ++k) {
      const int my_tile = warp_lane % kTilesOfWarp;
      const unsigned hits = of_tile(__ballot_sync(kAllLanes, probes[k].place != kNowhere), my_tile);
      const unsigned rooms = of_tile(__ballot_sync(kAllLanes, probes[k].room), my_tile);
      const int source = my_tile * kFindLanes + (hits != 0 ? __ffs(static_cast<int>(hits)) - 1 : 0);
      const uint32_t theirs = __shfl_sync(kAllLanes, probes[k].place, source);
      if (warp_lane / kTilesOfWarp == turn + k) {
        place = theirs;
        room = rooms != 0;
      }
    }
  }
  const bool there = place != kNowhere;
  if (kTouch && __syncthreads_or(given && !there) && threadIdx.x == 0) *missing.any = 1;
  if (!given) return;
  int64_t result = kTouch && !room ? kMissingFromFull : kNoSlot;
  bool writer = false;
  if (there) {
    const uint32_t bucket = place < kInSecond ? choice.first : choice.second;
    const int64_t slot =
        static_cast<int64_t>(bucket) * own_table.bucket_slots + place % kBucketDigests;
    result = own_table.first_slot + slot;
    if (kTouch) writer = touch(own_table, slot, visit, visit.given(at), found.writer != nullptr);
  }
  slots[at] = result;
  if (kTouch && found.there != nullptr) found.there[at] = there;
  if (kTouch && found.writer != nullptr) found.writer[at] = writer;
}

template <bool kTouch>
void launch_find(const TableView* tables, const TableView* only, const Batch& batch,
                 const Visit& visit, int64_t* slots, const Found& found, const Missing& missing,
                 bool spread, cudaStream_t stream) {
  if (batch.num_ids == 0) return;
  const unsigned grid = grid_for(batch.num_ids);
  if (only != nullptr) {
    find_kernel<kTouch, true>
        <<<grid, kThreads, 0, stream>>>(*only, nullptr, batch, visit, slots, found, missing, false);
  } else {
    find_kernel<kTouch, false><<<grid, kThreads, 0, stream>>>(TableView{}, tables, batch, visit,
                                                              slots, found, missing, spread);
  }
  HKV_CUDA_CHECK_LAUNCH();
}

}  // namespace

void find(const TableView* tables, const TableView* only, const Batch& batch, int64_t* slots,
          cudaStream_t stream) {
  launch_find<false>(tables, only, batch, Visit{}, slots, Found{}, Missing{}, false, stream);
}

void find_and_touch(const TableView* tables, const TableView* only, const Batch& batch,
                    const Visit& visit, int64_t* slots, const Found& found, const Missing& missing,
                    bool spread, cudaStream_t stream) {
  launch_find<true>(tables, only, batch, visit, slots, found, missing, spread, stream);
}

}  // namespace torchrec_hkv::hash_table::cuda
