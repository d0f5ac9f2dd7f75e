// Touches the found ids of an insertion whose caller states which ids it expects. If that is wrong,
// the id is skipped.
#include "common/cuda_check.h"
#include "hash_table/cuda/bucket.cuh"
#include "hash_table/cuda/insert/insert.cuh"
#include "hash_table/cuda/insert/missing_lists.cuh"
#include "hash_table/cuda/lookup/find.cuh"

namespace torchrec_hkv::hash_table::cuda {
namespace {

__global__ void __launch_bounds__(kThreads)
    touch_expected_kernel(const TableView* __restrict__ tables, const Batch batch,
                          const CallContext context, const bool* __restrict__ expected_present,
                          int64_t* __restrict__ slots, bool* __restrict__ found,
                          const MissingLists missing) {
  const int64_t position = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  for (int64_t i = position; i <= missing.mask; i += static_cast<int64_t>(gridDim.x) * kThreads) {
    missing.table[i] = 0;
  }
  const TableView* table = nullptr;
  int64_t slot = kNoSlot;
  bool wrong = false, listed = false, hit = false;
  if (position < batch.num_ids) {
    table = &table_at(tables, batch, position);
    slot = slots[position];
    const bool present = slot != kNoSlot;
    wrong = present != expected_present[position];
    hit = present && !wrong;
    listed = !present && !wrong;
    if (wrong) slots[position] = kSkipped;
    if (found != nullptr) found[position] = present;
  }
  const unsigned hits = __ballot_sync(kAllLanes, hit);
  if (hit) touch(hits, *table, slot - table->first_slot, context, context.given(position));
  __shared__ BlockListRanges ranges;
  if (count_listed(ranges, missing, listed, false)) {
    append_listed(ranges, missing, listed, false, position);
  }
  count_warp(table, kLookups, wrong, -1);  // begin_kernel counts all positions
}

}  // namespace

void touch_expected(const TableView* tables, const Batch& batch, const CallContext& context,
                    const bool* expected_present, int64_t* slots, bool* found,
                    const MissingLists& missing, cudaStream_t stream) {
  touch_expected_kernel<<<grid_for(batch.num_ids), kThreads, 0, stream>>>(
      tables, batch, context, expected_present, slots, found, missing);
  HKV_CUDA_CHECK_LAUNCH();
}

}  // namespace torchrec_hkv::hash_table::cuda
