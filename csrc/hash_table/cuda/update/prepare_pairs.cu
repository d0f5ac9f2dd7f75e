// Writes the pairs that the update of a batch sorts: a key and a value for each position.
#include "common/cuda_check.h"
#include "common/scan.cuh"
#include "hash_table/cuda/offsets.cuh"
#include "hash_table/cuda/update/update.cuh"

namespace torchrec_hkv::hash_table::cuda {
namespace {

constexpr int kPreparedOfThread = 8;
constexpr int kPrepared = kThreads * kPreparedOfThread;  // positions of a block

// A block marks where bags begin among neighbouring positions, and derives their bags by a scan.
__global__ void __launch_bounds__(kThreads)
    prepare_kernel(const Batch batch, const int64_t* __restrict__ slots, uint64_t no_slot,
                   const UpdateScratch scratch) {
  __shared__ uint32_t bags[kPrepared];  // relative to first_bag
  __shared__ int64_t first_bag;
  using Scan = BlockScan<uint32_t, kThreads, Max>;
  __shared__ Scan::Storage scan;
  if (blockIdx.x == 0) {
    for (int32_t f = threadIdx.x; f < batch.num_features; f += kThreads) {
      const int64_t length = batch.feature_start(f + 1) - batch.feature_start(f);
      if (length > 0) atomicMax(scratch.longest_feature, static_cast<uint32_t>(length));
    }
  }
  note_bad_bag(batch, scratch.bad_bag);  // the first kernel of an update to read offsets
  const int64_t num_bags = batch.num_bags;
  const int64_t begin = static_cast<int64_t>(blockIdx.x) * kPrepared;
  const auto count =
      static_cast<int32_t>(min(static_cast<int64_t>(kPrepared), batch.num_ids - begin));
  if (threadIdx.x < kWarp) {
    const int64_t bag = bag_at(batch.offsets, num_bags, begin);
    if (threadIdx.x == 0) first_bag = bag;
  }
  for (int i = threadIdx.x; i < kPrepared; i += kThreads) bags[i] = 0;
  __syncthreads();
  for (int64_t bag = first_bag + 1 + threadIdx.x; bag < num_bags; bag += kThreads) {
    const int64_t at = batch.offsets[bag] - begin;
    if (at >= count) break;
    if (at < 0) continue;  // offsets that decrease
    // The last bag that begins here; earlier ones are empty.
    atomicMax(&bags[at], static_cast<uint32_t>(bag - first_bag));
  }
  __syncthreads();
  uint32_t mine[kPreparedOfThread];
  uint32_t largest = 0, of_block;
#pragma unroll
  for (int k = 0; k < kPreparedOfThread; ++k) {
    mine[k] = largest = max(largest, bags[threadIdx.x * kPreparedOfThread + k]);
  }
  const uint32_t before = Scan::before(scan, largest, of_block);
#pragma unroll
  for (int k = 0; k < kPreparedOfThread; ++k) {
    bags[threadIdx.x * kPreparedOfThread + k] = max(before, mine[k]);
  }
  __syncthreads();
#pragma unroll
  for (int k = 0; k < kPreparedOfThread; ++k) {
    const int i = k * kThreads + threadIdx.x;
    if (i >= count) break;
    const int64_t slot = slots[begin + i];
    const auto bag = static_cast<uint32_t>(first_bag + bags[i]);
    scratch.pairs.pairs.set(begin + i, slot == kNoSlot ? no_slot : static_cast<uint64_t>(slot),
                            scratch.bags == nullptr ? bag : static_cast<uint32_t>(begin + i));
    if (scratch.bags != nullptr) scratch.bags[begin + i] = bag;
  }
}

}  // namespace

void prepare_pairs(const Batch& batch, const int64_t* slots, uint64_t no_slot,
                   const UpdateScratch& scratch, cudaStream_t stream) {
  const int64_t n = batch.num_ids;
  const auto blocks = static_cast<unsigned>((n + kPrepared - 1) / kPrepared);
  prepare_kernel<<<blocks, kThreads, 0, stream>>>(batch, slots, no_slot, scratch);
  HKV_CUDA_CHECK_LAUNCH();
}

}  // namespace torchrec_hkv::hash_table::cuda
