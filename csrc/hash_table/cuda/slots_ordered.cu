// Operations on slots that a find gave, several for one slot in the order of their positions. Slots
// come sorted, so that those of one slot are a run.
#include "common/cuda_check.h"
#include "hash_table/cuda/bucket.cuh"
#include "hash_table/cuda/frames.cuh"
#include "hash_table/cuda/row_matrix.cuh"
#include "hash_table/kernels.h"

namespace torchrec_hkv::hash_table::cuda {
namespace {

__device__ __forceinline__ bool is_slot(int64_t slot) { return slot >= 0 && slot != kPassedOver; }

// A warp a position of the sorted order.
__device__ __forceinline__ int64_t warp_index() {
  return (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) / kWarp;
}

// The last row of each run stays.
__global__ void __launch_bounds__(kThreads)
    assign_last_kernel(const TableView* __restrict__ tables, int32_t num_tables,
                       const int64_t* __restrict__ slots, const int64_t* __restrict__ positions,
                       const RowMatrix rows, int64_t n) {
  const int64_t i = warp_index();
  if (i >= n || !is_slot(slots[i]) || (i + 1 < n && slots[i + 1] == slots[i])) return;
  const int lane = threadIdx.x % kWarp;
  const TableView& table = tables[table_of_slot(tables, num_tables, slots[i])];
  char* to = row_to_write(table, slots[i] - table.first_slot, lane == 0);
  copy_from_matrix<kWarp>(rows, positions[i], table.rows.type, to, table.dim(), lane);
}

// As stored in a row of this type, and read again.
__device__ __forceinline__ float rounded(RowType type, float value) {
  float stored;
  char* const to = reinterpret_cast<char*>(&stored);
  store_element(type, to, 0, value);
  return load_element(type, to, 0);
}

// A run's rows are added to its row one after the other.
__global__ void __launch_bounds__(kThreads)
    add_runs_kernel(const TableView* __restrict__ tables, int32_t num_tables,
                    const int64_t* __restrict__ slots, const int64_t* __restrict__ positions,
                    const RowMatrix rows, int64_t n) {
  const int64_t first = warp_index();
  if (first >= n || !is_slot(slots[first])) return;
  const int64_t slot = slots[first];
  if (first > 0 && slots[first - 1] == slot) return;
  const TableView& table = tables[table_of_slot(tables, num_tables, slot)];
  const RowStore& store = table.rows;
  char* row = row_to_write(table, slot - table.first_slot, threadIdx.x % kWarp == 0);
  for (int32_t c = threadIdx.x % kWarp; c < store.width; c += kWarp) {
    float sum = load_element(store.type, row, c);
#pragma unroll 4
    for (int64_t i = first; i < n && slots[i] == slot; ++i) {
      sum = rounded(store.type, sum + load_element(rows.type, rows.at(positions[i]), c));
    }
    store_element(store.type, row, c, sum);
  }
}

__global__ void __launch_bounds__(kThreads)
    last_scores_kernel(const TableView* __restrict__ tables, int32_t num_tables,
                       const int64_t* __restrict__ slots, const int64_t* __restrict__ positions,
                       const uint64_t* __restrict__ scores, int64_t n) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= n || !is_slot(slots[i]) || (i + 1 < n && slots[i + 1] == slots[i])) return;
  const TableView& table = tables[table_of_slot(tables, num_tables, slots[i])];
  if (table.eviction != Eviction::kCustomized) return;
  table.scores[slots[i] - table.first_slot] = scores[positions[i]];
}

}  // namespace

void write_rows_in_order(const TableView* tables, int32_t num_tables, const int64_t* slots,
                         const int64_t* positions, const RowMatrix& rows, int64_t n, bool add,
                         cudaStream_t stream) {
  if (n == 0) return;
  const auto kernel = add ? add_runs_kernel : assign_last_kernel;
  kernel<<<grid_for(n * kWarp), kThreads, 0, stream>>>(tables, num_tables, slots, positions, rows,
                                                       n);
  HKV_CUDA_CHECK_LAUNCH();
}

void keep_last_scores(const TableView* tables, int32_t num_tables, const int64_t* slots,
                      const int64_t* positions, const uint64_t* scores, int64_t n,
                      cudaStream_t stream) {
  if (n == 0) return;
  last_scores_kernel<<<grid_for(n), kThreads, 0, stream>>>(tables, num_tables, slots, positions,
                                                           scores, n);
  HKV_CUDA_CHECK_LAUNCH();
}

}  // namespace torchrec_hkv::hash_table::cuda
