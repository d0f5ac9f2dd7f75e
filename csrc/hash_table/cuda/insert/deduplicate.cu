// Chooses the position that represents a missing id if scores are given.
#include "common/cuda_check.h"
#include "hash_table/cuda/bucket.cuh"
#include "hash_table/cuda/insert/insert.cuh"
#include "hash_table/cuda/insert/missing_lists.cuh"

namespace torchrec_hkv::hash_table::cuda {
namespace {

// The position with the highest score represents its id, so that the id is refused only if all its
// scores are too low. slots[] holds the id's entry of the scratch table until choose_kernel
// replaces it.
__global__ void __launch_bounds__(kThreads)
    deduplicate_kernel(const TableView* __restrict__ tables, const Batch batch,
                       const CallContext context, int64_t* __restrict__ slots,
                       const MissingLists missing) {
  const int64_t position = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (position >= batch.num_ids || !is_missing(slots[position])) return;
  const TableView& table = table_at(tables, batch, position);
  const int64_t id = batch.ids[position];
  const auto claim = static_cast<uint32_t>(position + 1);
  for (uint32_t at = scratch_hash(table, id);; ++at) {
    const uint32_t index = at & missing.mask;
    uint32_t occupant = load_l2(&missing.table[index]);
    if (occupant == 0) occupant = atomicCAS(&missing.table[index], 0u, claim);
    int64_t other = static_cast<int64_t>(occupant) - 1;
    if (occupant != 0 && !same_id<false>(tables, table, batch, other, id)) continue;
    while (occupant != 0 && context.given(position) > context.given(other)) {
      const uint32_t seen = atomicCAS(&missing.table[index], occupant, claim);
      if (seen == occupant) break;
      occupant = seen;
      other = static_cast<int64_t>(occupant) - 1;
    }
    slots[position] = encode_reference(index);
    return;
  }
}
__global__ void __launch_bounds__(kThreads)
    choose_kernel(int64_t n, int64_t* __restrict__ slots, const MissingLists missing) {
  const int64_t position = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (position >= n || !is_reference(slots[position])) return;
  const int64_t chosen = static_cast<int64_t>(missing.table[decode_reference(slots[position])]) - 1;
  slots[position] = chosen == position ? kNoSlot : encode_reference(chosen);
  if (chosen != position && load_l2(missing.any_reference) == 0) *missing.any_reference = 1;
}

}  // namespace

void choose_by_score(const TableView* tables, const Batch& batch, const CallContext& context,
                     int64_t* slots, const MissingLists& missing, cudaStream_t stream) {
  const unsigned grid = grid_for(batch.num_ids);
  deduplicate_kernel<<<grid, kThreads, 0, stream>>>(tables, batch, context, slots, missing);
  HKV_CUDA_CHECK_LAUNCH();
  choose_kernel<<<grid, kThreads, 0, stream>>>(batch.num_ids, slots, missing);
  HKV_CUDA_CHECK_LAUNCH();
}

}  // namespace torchrec_hkv::hash_table::cuda
