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

// Adds the block's numbers up: one atomic a block where all are of one table. All its threads.
template <bool kOneTable>
__device__ __forceinline__ void count_block(const TableView* table, Counter counter, bool wanted) {
  if (kOneTable) {
    const int number = __syncthreads_count(wanted);
    if (threadIdx.x == 0 && number > 0) count(*table, counter, number);
  } else {
    count_warp(table, counter, wanted);
  }
}

// Writes what the entries of a warp's new ids hold: `busy` says whether the thread has one, whose
// slot in its table is `slot`. All lanes; the row of a leaver, if any, has been read. Tables with
// frames are left to settle_rows.
template <NewRows kRows, bool kOneTable>
__device__ __forceinline__ void write_rows_of_warp(const TableView* mine, bool busy, int64_t id,
                                                   int64_t slot) {
  constexpr int kTiles = kWarp / kTile;
  const int lane = threadIdx.x % kTile;
  const int tile = threadIdx.x % kWarp / kTile;
  for (unsigned left = __ballot_sync(kAllLanes, busy); left;) {
    const int source = nth_lane(left, tile);
    const bool working = tile < __popc(left);
    const int64_t their_id = __shfl_sync(kAllLanes, id, source);
    const int64_t their_slot = __shfl_sync(kAllLanes, slot, source);
    const TableView* table = table_of_lane<kOneTable>(mine, source);
    if (working && table->frames.tags == nullptr) {
      write_new_row<kRows>(*table, their_id, their_slot, kNoFrame, lane);
    }
#pragma unroll
    for (int t = 0; t < kTiles; ++t) left &= left - 1;
  }
}

// Blocks that fill the device: where there is nothing to do, they are all that is launched in vain.
template <typename Kernel>
unsigned resident_blocks(Kernel kernel) {
  int device = 0, processors = 0, blocks = 0;
  HKV_CUDA_CHECK(cudaGetDevice(&device));
  HKV_CUDA_CHECK(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device));
  HKV_CUDA_CHECK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, kThreads, 0));
  return static_cast<unsigned>(processors * blocks);
}

// Places the ids that insert_kernel has left at kMissingFromFull, in the places of others (in
// evict.cu).
void evict_for_missing(const TableView* tables, const TableView* only, const Batch& batch,
                       const Visit& visit, const Placement& placement, int64_t* slots, bool* writer,
                       const Missing& missing, cudaStream_t stream);

// Counts the ids that were placed and that their tables remember as evicted, where the result must
// not depend on chance: before what the call evicts is remembered (in returned.cu). `placed`,
// [positions], is aligned to 8 bytes, and can be read up to there.
void count_returned(const TableView* tables, const Batch& batch, const bool* placed,
                    const uint32_t* any_missing, cudaStream_t stream);

}  // namespace torchrec_hkv::hash_table::cuda
