// Expiry on the GPU: one thread for each slot, the tables of a group in one launch.

#include "common/cuda_check.h"
#include "hash_table/cuda/bucket.cuh"
#include "hash_table/cuda/entry.cuh"
#include "hash_table/expiry.h"

namespace torchrec_hkv::hash_table::cuda {
namespace {

constexpr int64_t kMaxTables = 65535;  // limit of the grid's second dimension

// Blocks of one table have one blockIdx.y, so that a block counts with one atomic.
__global__ void __launch_bounds__(kThreads)
    expire_kernel(const TableView* __restrict__ tables, const uint32_t* __restrict__ expire_after,
                  int32_t num_tables, bool all, const CallContext context) {
  for (int32_t t = static_cast<int32_t>(blockIdx.y); t < num_tables;
       t += static_cast<int32_t>(gridDim.y)) {
    const TableView& table = tables[t];
    const Sweep sweep =
        all ? sweep_of_all(expire_after[t]) : sweep_of_call(expire_after[t], context.now());
    const int64_t item = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
    bool expired = false;
    if (item < sweep_items(sweep, table.num_buckets)) {
      const int64_t bucket = sweep.first + item / kBucketDigests * sweep.every;
      const int32_t position = static_cast<int32_t>(item % kBucketDigests);
      // A position beyond the bucket's slots has no step, so it is not read.
      uint32_t* const step = step_of(table, bucket * table.bucket_slots + position);
      expired = position < table.bucket_slots && is_expired(sweep, context, *step);
      if (expired) {
        table.digests[bucket * kBucketDigests + position] = kEmptyDigest;
        *step = kFreeStep;
      }
    }
    const int number = __syncthreads_count(expired);
    if (threadIdx.x == 0 && number > 0) count(table, kExpired, static_cast<uint64_t>(number));
  }
}

}  // namespace

void expire(const TableView* tables, const uint32_t* expire_after, int32_t num_tables, bool all,
            uint32_t max_buckets, const CallContext& context, cudaStream_t stream) {
  const int64_t items = static_cast<int64_t>(max_buckets) * kBucketDigests;
  if (items == 0) return;
  const dim3 grid(grid_for(items), static_cast<unsigned>(min(int64_t{num_tables}, kMaxTables)));
  expire_kernel<<<grid, kThreads, 0, stream>>>(tables, expire_after, num_tables, all, context);
  HKV_CUDA_CHECK_LAUNCH();
}

}  // namespace torchrec_hkv::hash_table::cuda
