// Makes lists for the update kernels from the sorted pairs: long segments and, in groups of several
// row classes, the units of each class. Counts the segments of one position.
#include "common/cuda_check.h"
#include "hash_table/cuda/update/update.cuh"

namespace torchrec_hkv::hash_table::cuda {
namespace {

constexpr int kListRounds = 4;

__global__ void __launch_bounds__(kThreads)
    list_long_segments_kernel(const Batch batch, uint64_t no_slot,
                              const __grid_constant__ UpdateScratch scratch) {
  __shared__ int singles_of_block;
  const Pairs& sorted = scratch.pairs.pairs;
  const int64_t n = batch.num_ids;
  // With a hot slot, most blocks lie within one segment.
  const int64_t first_of_block = static_cast<int64_t>(blockIdx.x) * kListRounds * kThreads;
  const int64_t last_of_block = first_of_block + kListRounds * kThreads - 1;
  if (first_of_block > 0 && last_of_block < n &&
      sorted.key(first_of_block - 1) == sorted.key(last_of_block)) {
    return;
  }
  if (threadIdx.x == 0) singles_of_block = 0;
  __syncthreads();
  int singles = 0;
#pragma unroll
  for (int k = 0; k < kListRounds; ++k) {
    const int64_t at = first_of_block + k * kThreads + threadIdx.x;
    const auto key_at = [&](int64_t i) { return i >= 0 && i < n ? sorted.key(i) : no_slot; };
    const uint64_t key = key_at(at);
    const uint64_t before = key_at(at - 1), after = key_at(at + 1), far = key_at(at + kLongest);
    const bool begins = key != no_slot && before != key;
    singles += begins && after != key ? 1 : 0;
    for (unsigned longs = __ballot_sync(kAllLanes, begins && far == key); longs;
         longs &= longs - 1) {
      const int source = __ffs(static_cast<int>(longs)) - 1;
      const int64_t first = __shfl_sync(kAllLanes, at, source);
      const uint64_t source_key = __shfl_sync(kAllLanes, key, source);
      append_long_segment<kWarp>(scratch.long_segments, first,
                                 end_of_segment<kWarp>(sorted, first, n, source_key) - first);
    }
  }
  singles = __reduce_add_sync(kAllLanes, singles);
  if (threadIdx.x % kWarp == 0 && singles > 0) atomicAdd(&singles_of_block, singles);
  __syncthreads();
  if (threadIdx.x == 0 && singles_of_block > 0) {
    atomicAdd(scratch.unique, static_cast<uint32_t>(singles_of_block));
  }
}

// A warp processes the positions of one unit.
__global__ void __launch_bounds__(kThreads)
    list_units_kernel(const TableView* __restrict__ tables, const Batch batch, uint64_t no_slot,
                      const __grid_constant__ UpdateScratch scratch) {
  __shared__ uint32_t found[kRowClasses], first[kRowClasses];
  if (threadIdx.x < kRowClasses) found[threadIdx.x] = 0;
  __syncthreads();
  const Pairs& sorted = scratch.short_pairs;
  const uint32_t at = blockIdx.x * kThreads + threadIdx.x;
  uint32_t classes = 0;
  if (at < scratch.short_positions(batch.num_ids)) {
    const Pair pair = sorted.load(at);
    if (sorted.key_of(pair) != no_slot) {
      const TableView& table = table_of(tables, batch, scratch.bag_of(sorted.value_of(pair)));
      classes = 1u << row_class_of(table.dim(), table.rows.type);
    }
  }
  classes = __reduce_or_sync(kAllLanes, classes);
  const auto lane = static_cast<int32_t>(threadIdx.x % kWarp);
  const bool is_class_lane = lane < kRowClasses && (classes >> lane & 1) != 0;
  const uint32_t number = is_class_lane ? atomicAdd(&found[lane], 1u) : 0;
  __syncthreads();
  if (threadIdx.x < kRowClasses && found[threadIdx.x] > 0) {
    first[threadIdx.x] = atomicAdd(&scratch.units.number[threadIdx.x], found[threadIdx.x]);
  }
  __syncthreads();
  if (is_class_lane) scratch.units.of(lane)[first[lane] + number] = at / kWarp;
}

}  // namespace

void list_segments(const TableView* tables, const Batch& batch, uint64_t no_slot,
                   const UpdateScratch& scratch, cudaStream_t stream) {
  const int64_t threads = (batch.num_ids + kListRounds - 1) / kListRounds;
  list_long_segments_kernel<<<grid_for(threads), kThreads, 0, stream>>>(batch, no_slot, scratch);
  HKV_CUDA_CHECK_LAUNCH();
  if (!scratch.units.any()) return;
  list_units_kernel<<<grid_for(batch.num_ids), kThreads, 0, stream>>>(tables, batch, no_slot,
                                                                      scratch);
  HKV_CUDA_CHECK_LAUNCH();
}

}  // namespace torchrec_hkv::hash_table::cuda
