// Converts the packed ids and last steps of a GPU table to and from arrays. One thread for each
// slot.
#include "common/cuda_check.h"
#include "hash_table/cuda/bucket.cuh"
#include "hash_table/cuda/entry.cuh"
#include "hash_table/packed_entries_kernels.h"

namespace torchrec_hkv::hash_table::cuda {
namespace {

__global__ void __launch_bounds__(kThreads)
    read_kernel(const __grid_constant__ TableView table, const int64_t* __restrict__ slots,
                int64_t n, int64_t* __restrict__ ids, uint32_t* __restrict__ last_steps) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= n) return;
  const int64_t slot = slots != nullptr ? slots[i] : i;
  if (ids != nullptr) ids[i] = id_of_slot(table, slot);
  if (last_steps != nullptr) last_steps[i] = *step_of(table, slot);
}

__global__ void __launch_bounds__(kThreads)
    load_kernel(const __grid_constant__ TableView table, const int64_t* __restrict__ ids,
                const uint32_t* __restrict__ last_steps) {
  const int64_t slot = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  // Every bucket has a slot: all are covered.
  if (slot < table.num_buckets)
    reinterpret_cast<uint4*>(table.oldest.get())[slot] = uint4{0, 0, 0, 0};
  if (slot >= table.num_slots) return;
  const PackedEntry entry = entry_of(table, slot);
  const bool free = *digest_of_slot(table, slot) == kEmptyDigest;
  if (!free) write_packed_id(entry, hash_of_id(ids[slot]));
  *entry.step() = free ? kFreeStep : last_steps[slot];
}

}  // namespace

void read_entries(const TableView& table, const int64_t* slots, int64_t n, int64_t* ids,
                  uint32_t* last_steps, cudaStream_t stream) {
  if (n == 0) return;
  read_kernel<<<grid_for(n), kThreads, 0, stream>>>(table, slots, n, ids, last_steps);
  HKV_CUDA_CHECK_LAUNCH();
}

void load_entries(const TableView& table, const int64_t* ids, const uint32_t* last_steps,
                  cudaStream_t stream) {
  if (table.num_slots == 0) return;
  load_kernel<<<grid_for(table.num_slots), kThreads, 0, stream>>>(table, ids, last_steps);
  HKV_CUDA_CHECK_LAUNCH();
}

}  // namespace torchrec_hkv::hash_table::cuda
