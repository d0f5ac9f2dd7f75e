// Counts ids that are not admitted yet in the order of the batch, as the CPU does: if all cells of
// a set are taken, the order decides which id replaces which.

#include "common/cuda_check.h"
#include "hash_table/cuda/insert/admission.cuh"
#include "hash_table/cuda/insert/insert.cuh"

namespace torchrec_hkv::hash_table::cuda {
namespace {

// Lists the owners, keyed by a hash of their sets. Sets may share a key: only the order within a
// set matters.
__global__ void __launch_bounds__(kListThreads, 2)
    list_owners_kernel(const Batch batch, const Admission* __restrict__ admissions,
                       const int64_t* __restrict__ slots,
                       const __grid_constant__ AdmissionScratch scratch) {
  list_in_order(
      batch.num_ids, take_block(scratch.blocks), scratch.blocks,
      [&](int64_t position) { return is_owner(scratch, slots, position); },
      [&](uint32_t place, int64_t position) {
        const int32_t table = batch.feature_tables[batch.feature_of(position)];
        const uint64_t set = set_of(admissions[table], batch.ids[position]);
        const auto queue = static_cast<uint32_t>(
            mix64(set + (static_cast<uint64_t>(table) << 40)) >> (64 - scratch.queue_bits));
        scratch.pairs.pairs.set(place, queue, static_cast<uint32_t>(position));
        scratch.sort.count(0, place, queue);
      },
      [&](uint32_t number) { *scratch.number = number; });
}

// The thread of a queue's first id counts the whole queue.
__global__ void __launch_bounds__(kThreads)
    count_queues_kernel(const Batch batch, const CallContext context,
                        const Admission* __restrict__ admissions, const int64_t* __restrict__ slots,
                        const __grid_constant__ AdmissionScratch scratch) {
  const uint32_t number = *scratch.number;
  const Pairs& sorted = scratch.pairs.pairs;
  for (uint32_t first = blockIdx.x * kThreads + threadIdx.x; first < number;
       first += gridDim.x * kThreads) {
    const uint64_t queue = sorted.key(first);
    if (first > 0 && sorted.key(first - 1) == queue) continue;
    for (uint32_t i = first; i < number && sorted.key(i) == queue; ++i) {
      const int64_t position = sorted.value(i);
      const Admission& admission = admissions[batch.feature_tables[batch.feature_of(position)]];
      uint32_t* const times = &scratch.times[decode_reference(slots[position])];
      *times = count_in_cell(admission, batch.ids[position], *times, context.now());
    }
  }
}

}  // namespace

void count_in_order(const Batch& batch, const CallContext& context, const Admission* admissions,
                    const int64_t* slots, const AdmissionScratch& scratch, cudaStream_t stream) {
  list_owners_kernel<<<static_cast<unsigned>(listing_blocks(batch.num_ids)), kListThreads, 0,
                       stream>>>(batch, admissions, slots, scratch);
  HKV_CUDA_CHECK_LAUNCH();
  AdmissionScratch sorted = scratch;
  sort_small(&sorted.pairs, scratch.number, scratch.sort, stream);
  const unsigned grid = min(grid_for(batch.num_ids), resident_blocks(count_queues_kernel));
  count_queues_kernel<<<grid, kThreads, 0, stream>>>(batch, context, admissions, slots, sorted);
  HKV_CUDA_CHECK_LAUNCH();
}

}  // namespace torchrec_hkv::hash_table::cuda
