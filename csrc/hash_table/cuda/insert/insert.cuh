// What the kernels that place new ids share: positions are looked at by a thread each, rows are
// written by tiles of lanes.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "common/cuda_check.h"
#include "hash_table/cuda/bucket.cuh"
#include "hash_table/cuda/insert/missing.cuh"
#include "hash_table/cuda/insert/new_row.cuh"
#include "hash_table/cuda/insert/place.cuh"

namespace torchrec_hkv::hash_table::cuda {

// The table of a lane of the warp.
template <bool kOneTable>
__device__ __forceinline__ const TableView* table_of_lane(const TableView* mine, int lane) {
  if (kOneTable) return mine;
  return reinterpret_cast<const TableView*>(
      __shfl_sync(kAllLanes, reinterpret_cast<unsigned long long>(mine), lane));
}

// Lane of the bit with number `n` of a mask; the highest lane's where there are fewer.
__device__ __forceinline__ int nth_lane(unsigned mask, int n) {
  for (; n > 0 && (mask & (mask - 1)); --n) mask &= mask - 1;
  return __ffs(static_cast<int>(mask)) - 1;
}

// How often something happened to the ids of a warp: added to a counter of each lane's table, of
// one table when the kernel ends, else at once. All lanes.
template <bool kOneTable, Counter kCounter>
struct Tally {
  uint32_t number = 0;  // of the warp so far, where all are of one table

  __device__ __forceinline__ void add(const TableView* table, bool wanted) {
    if (kOneTable) {
      number += __popc(__ballot_sync(kAllLanes, wanted));
    } else {
      count_warp(table, kCounter, wanted);
    }
  }
  __device__ __forceinline__ void finish(const TableView& table) const {
    if (kOneTable && number > 0 && threadIdx.x % kWarp == 0) count(table, kCounter, number);
  }
};

// A row that the lanes of a warp are to write.
struct RowToWrite {
  const TableView* table;
  uint64_t source;  // row_source of the id
  int64_t slot;
};

// Writes what the entries of a warp's new ids hold: `busy` says whether the thread has one, whose
// slot in its table is `slot`. All lanes; `rows`: the warp's, in shared memory. The row of a
// leaver, if any, has been read. Tables with frames are left to settle_rows.
template <NewRows kRows, bool kOneTable>
__device__ __forceinline__ void write_rows_of_warp(RowToWrite* rows, const TableView* mine,
                                                   bool busy, int64_t id, int64_t slot) {
  constexpr int kTiles = kWarp / kTile;
  const int lane = threadIdx.x % kTile;
  const int tile = threadIdx.x % kWarp / kTile;
  busy = busy && mine->frames.tags == nullptr;
  const unsigned lanes = __ballot_sync(kAllLanes, busy);
  const int number = __popc(lanes);
  if (busy) {
    rows[__popc(lanes & ((1u << threadIdx.x % kWarp) - 1))] =
        RowToWrite{mine, row_source<kRows>(*mine, id), slot};
  }
  __syncwarp();
#pragma unroll 1
  for (int at = tile; at < number; at += kTiles) {
    const RowToWrite row = rows[at];
    write_new_row<kRows>(kOneTable ? *mine : *row.table, row.source, row.slot, kNoFrame, lane);
  }
  __syncwarp();  // the next call writes there
}

// Multiprocessors of the device.
inline unsigned processors() {
  int device = 0, number = 0;
  HKV_CUDA_CHECK(cudaGetDevice(&device));
  HKV_CUDA_CHECK(cudaDeviceGetAttribute(&number, cudaDevAttrMultiProcessorCount, device));
  return static_cast<unsigned>(number);
}

// Blocks that fill the device: where there is nothing to do, they are all that is launched in vain.
template <typename Kernel>
unsigned resident_blocks(Kernel kernel) {
  int blocks = 0;
  HKV_CUDA_CHECK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, kThreads, 0));
  return processors() * static_cast<unsigned>(blocks);
}

// Places the ids of the second list, whose buckets are full, in the places of others (in evict.cu).
// deduplicated: every missing id is missing at one position only.
void evict_for_missing(const TableView* tables, const TableView* only, const Batch& batch,
                       const Visit& visit, const Placement& placement, int64_t* slots, bool* writer,
                       const Missing& missing, bool deduplicated, cudaStream_t stream);

// Counts the ids that were placed and that their tables remember as evicted, where the result must
// not depend on chance: before what the call evicts is remembered (in returned.cu). `placed`,
// [positions], is aligned to 8 bytes, and can be read up to there.
void count_returned(const TableView* tables, const Batch& batch, const Visit& visit,
                    const int64_t* slots, const bool* placed, const uint32_t* any_missing,
                    cudaStream_t stream);

}  // namespace torchrec_hkv::hash_table::cuda
