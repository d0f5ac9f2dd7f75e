// Data and functions that the insertion kernels share. One thread processes a position; a tile of
// lanes writes a row.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "common/cuda_check.h"
#include "common/dependent_launch.cuh"
#include "hash_table/cuda/bucket.cuh"
#include "hash_table/cuda/insert/missing_lists.cuh"
#include "hash_table/cuda/insert/new_row.cuh"
#include "hash_table/cuda/insert/place.cuh"

namespace torchrec_hkv::hash_table::cuda {

// The table of a lane of the warp.
template <bool kOneTable>
__device__ __forceinline__ const TableView* table_of_lane(const TableView* table, int lane) {
  if (kOneTable) return table;
  return in_global(reinterpret_cast<const TableView*>(
      __shfl_sync(kAllLanes, reinterpret_cast<unsigned long long>(table), lane)));
}

// The table that a pointer in shared memory refers to. A single table is a parameter of the launch,
// the tables of a group are in global memory.
template <bool kOneTable>
__device__ __forceinline__ const TableView& stored_table(const TableView* stored) {
  return kOneTable ? *stored : *in_global(stored);
}

// Lane of the n-th set bit of a mask, or the highest lane if there are fewer bits.
__device__ __forceinline__ int nth_lane(unsigned mask, int n) {
  for (; n > 0 && (mask & (mask - 1)); --n) mask &= mask - 1;
  return __ffs(static_cast<int>(mask)) - 1;
}

// Counts events of a warp's ids in a counter of each lane's table: with one table in `finish`, at
// the end of the kernel; otherwise at once. Called by all lanes.
template <bool kOneTable, Counter kCounter>
struct WarpCounter {
  uint32_t number = 0;  // of the warp so far, if there is one table

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

// A row for the lanes of a warp to write.
struct RowToWrite {
  const TableView* table;
  uint64_t source;  // row_source of the id
  int64_t slot;
};

// Writes the rows of a warp's new ids. busy: whether the lane has a new id; slot: its slot in the
// table; rows: of the warp, in shared memory. The rows of evicted entries must have been copied
// before. place_rows_in_frames writes those of tables with frames. Called by all lanes.
template <NewRows kRows, bool kOneTable>
__device__ __forceinline__ void write_rows_of_warp(RowToWrite* rows, const TableView* table,
                                                   bool busy, int64_t id, int64_t slot) {
  constexpr int kTiles = kWarp / kTile;
  const int lane = threadIdx.x % kTile;
  const int tile = threadIdx.x % kWarp / kTile;
  busy = busy && table->frames.tags == nullptr;
  const unsigned lanes = __ballot_sync(kAllLanes, busy);
  const int number = __popc(lanes);
  if (busy) {
    rows[__popc(lanes & ((1u << threadIdx.x % kWarp) - 1))] =
        RowToWrite{table, row_source<kRows>(*table, id), slot};
  }
  __syncwarp();
#pragma unroll 1
  for (int at = tile; at < number; at += kTiles) {
    const RowToWrite row = rows[at];
    write_new_row<kRows>(kOneTable ? *table : stored_table<false>(row.table), row.source, row.slot,
                         kNoFrame, lane);
  }
  __syncwarp();  // the next call overwrites `rows`
}

// Number of blocks that fill the device. This limits the cost of a launch without work.
template <typename Kernel>
unsigned resident_blocks(Kernel kernel) {
  int blocks = 0;
  HKV_CUDA_CHECK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, kThreads, 0));
  return multiprocessors() * static_cast<unsigned>(blocks);
}

// Replaces find_and_touch if Placement::expected_present is given, after a find that touched
// nothing. Ids for which that is wrong are skipped (in touch_expected.cu).
void touch_expected(const TableView* tables, const Batch& batch, const CallContext& context,
                    const bool* expected_present, int64_t* slots, bool* found,
                    const MissingLists& missing, cudaStream_t stream);

// If scores are given: the position with the highest score represents a missing id and is its only
// position that stays missing (in deduplicate.cu).
void choose_by_score(const TableView* tables, const Batch& batch, const CallContext& context,
                     int64_t* slots, const MissingLists& missing, cudaStream_t stream);

// Places the ids of the second list, whose buckets are full, by evicting entries (in evict.cu).
// deduplicated: every missing id is missing at one position only.
void evict_for_missing(const TableView* tables, const TableView* only, const Batch& batch,
                       const CallContext& context, const Placement& placement, int64_t* slots,
                       bool* writer, const MissingLists& missing, bool deduplicated,
                       cudaStream_t stream);

// Counts placed ids that their tables remember as evicted, if the result must be deterministic.
// Called before the ids that the call evicts are remembered (in count_returned.cu). placed:
// [positions], aligned to 8 bytes and readable up to a multiple of 8 bytes.
void count_returned(const TableView* tables, const Batch& batch, const CallContext& context,
                    const int64_t* slots, const bool* placed, const uint32_t* any_missing,
                    cudaStream_t stream);

}  // namespace torchrec_hkv::hash_table::cuda
