// Copies rows and states of entries to a matrix and back, on the GPU, eight lanes for each entry.
#include "common/cuda_check.h"
#include "hash_table/cuda/bucket.cuh"
#include "hash_table/cuda/entry.cuh"
#include "hash_table/cuda/hbm_cache/frames.cuh"
#include "hash_table/cuda/maintenance/restore.cuh"
#include "hash_table/slot_values.h"
#include "hash_table/sync_kernels.h"

namespace torchrec_hkv::hash_table::cuda {
namespace {

constexpr int kLanes = 8;

__device__ __forceinline__ int64_t entry_of_thread() {
  return (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) / kLanes;
}

// Rows of the matrix are aligned to their elements only.
__device__ __forceinline__ void copy_floats(float* to, const float* from, int32_t n, int lane) {
  for (int32_t c = lane; c < n; c += kLanes) to[c] = from[c];
}

__global__ void __launch_bounds__(kThreads)
    read_kernel(const __grid_constant__ TableView table, const int64_t* __restrict__ slots,
                int64_t n, const ValueMatrix out, uint32_t* __restrict__ last_steps,
                uint64_t* __restrict__ scores) {
  const int64_t i = entry_of_thread();
  if (i >= n) return;
  const int lane = threadIdx.x % kLanes;
  const int64_t slot = slots[i];
  const int32_t states = out.states ? table.states.width : 0;
  float* const to = out.at(i);
  if (slot == kNoSlot) {
    for (int32_t c = lane; c < table.dim() + states; c += kLanes) to[c] = 0.0f;
    if (lane == 0) {
      last_steps[i] = 0;
      if (scores != nullptr) scores[i] = 0;
    }
    return;
  }
  const int64_t frame = table.frames.frame_of(slot);
  copy_floats(to, reinterpret_cast<const float*>(table.rows.at(slot, frame)), table.dim(), lane);
  copy_floats(to + table.dim(), reinterpret_cast<const float*>(table.states.at(slot, frame)),
              states, lane);
  if (lane != 0) return;
  last_steps[i] = *step_of(table, slot);
  if (scores != nullptr) scores[i] = load_score(table, slot);
}

__global__ void __launch_bounds__(kThreads)
    write_kernel(const __grid_constant__ TableView table, const int64_t* __restrict__ slots,
                 int64_t n, const int64_t* __restrict__ ids, const ValueMatrix from,
                 const uint32_t* __restrict__ last_steps, const uint64_t* __restrict__ scores) {
  const int64_t i = entry_of_thread();
  if (i >= n) return;
  const int lane = threadIdx.x % kLanes;
  const int64_t slot = slots[i];
  if (slot < 0 || slot >= table.num_slots) return;
  if (*digest_of_slot(table, slot) == kEmptyDigest || id_of_slot(table, slot) != ids[i]) return;
  const int64_t frame = frame_to_write(table.frames, slot, lane == 0);
  const float* const values = from.at(i);
  copy_floats(reinterpret_cast<float*>(table.rows.at(slot, frame)), values, table.dim(), lane);
  if (from.states) {
    copy_floats(reinterpret_cast<float*>(table.states.at(slot, frame)), values + table.dim(),
                table.states.width, lane);
  }
  if (lane != 0) return;
  if (scores != nullptr) table.scores[slot] = scores[i];
  restore_step(table, slot, last_steps[i]);
}

}  // namespace

void read_values(const TableView& table, const int64_t* slots, int64_t n, const ValueMatrix& out,
                 uint32_t* last_steps, uint64_t* scores, cudaStream_t stream) {
  if (n == 0) return;
  read_kernel<<<grid_for(n * kLanes), kThreads, 0, stream>>>(table, slots, n, out, last_steps,
                                                             scores);
  HKV_CUDA_CHECK_LAUNCH();
}

void write_values(const TableView& table, const int64_t* slots, int64_t n, const int64_t* ids,
                  const ValueMatrix& from, const uint32_t* last_steps, const uint64_t* scores,
                  cudaStream_t stream) {
  if (n == 0) return;
  write_kernel<<<grid_for(n * kLanes), kThreads, 0, stream>>>(table, slots, n, ids, from,
                                                              last_steps, scores);
  HKV_CUDA_CHECK_LAUNCH();
}

}  // namespace torchrec_hkv::hash_table::cuda
