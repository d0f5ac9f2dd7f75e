// Finds the changed slots of a table, on the GPU.
#include "common/cuda_check.h"
#include "hash_table/cuda/bucket.cuh"
#include "hash_table/cuda/entry.cuh"
#include "hash_table/slot_changes.h"
#include "hash_table/sync_kernels.h"

namespace torchrec_hkv::hash_table::cuda {
namespace {

__global__ void __launch_bounds__(kThreads)
    slot_changes_kernel(const __grid_constant__ TableView table, const SlotChanges request) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= request.n) return;
  const int64_t slot = request.first + i;
  request.changes[i] =
      request.of(*digest_of_slot(table, slot), *step_of(table, slot), request.had_entry[i],
                 request.marked != nullptr && request.marked[i]);
}

// Writes only differences: most entries are still in their slots, so little crosses the link.
__global__ void __launch_bounds__(kThreads)
    exchange_contents_kernel(const SlotContents contents, const int64_t* __restrict__ slots,
                             const int64_t* __restrict__ ids, const bool* __restrict__ occupied,
                             int64_t n, int64_t* __restrict__ previous) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= n) return;
  const int64_t slot = slots[i];
  const int64_t previous_id = contents.ids[slot];
  previous[i] = previous_id;
  if (previous_id != ids[i]) contents.ids[slot] = ids[i];
  if (contents.occupied[slot] != occupied[i]) contents.occupied[slot] = occupied[i];
}

}  // namespace

void exchange_contents(const SlotContents& contents, const int64_t* slots, const int64_t* ids,
                       const bool* occupied, int64_t n, int64_t* previous, cudaStream_t stream) {
  if (n == 0) return;
  exchange_contents_kernel<<<grid_for(n), kThreads, 0, stream>>>(contents, slots, ids, occupied, n,
                                                                 previous);
  HKV_CUDA_CHECK_LAUNCH();
}

void slot_changes(const TableView& table, const SlotChanges& request, cudaStream_t stream) {
  if (request.n == 0) return;
  slot_changes_kernel<<<grid_for(request.n), kThreads, 0, stream>>>(table, request);
  HKV_CUDA_CHECK_LAUNCH();
}

}  // namespace torchrec_hkv::hash_table::cuda
