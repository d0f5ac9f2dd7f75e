// Operations on slots that a find returned, in the order of positions. Slots are sorted, so that
// equal slots form a run.
#include "common/cuda_check.h"
#include "hash_table/cuda/bucket.cuh"
#include "hash_table/cuda/hbm_cache/frames.cuh"
#include "hash_table/cuda/row_matrix.cuh"
#include "hash_table/kernels.h"

namespace torchrec_hkv::hash_table::cuda {
namespace {

__device__ __forceinline__ bool is_slot(int64_t slot) { return slot >= 0 && slot != kSkipped; }

// One warp for each position of the sorted order.
__device__ __forceinline__ int64_t warp_index() {
  return (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) / kWarp;
}

// Assigns the last row of each run.
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

// The value after rounding to this type.
__device__ __forceinline__ float rounded(RowType type, float value) {
  float stored;
  char* const to = reinterpret_cast<char*>(&stored);
  store_element(type, to, 0, value);
  return load_element(type, to, 0);
}

// As add_runs_kernel, for a row of 8 bits, which is rounded to nearest after each addition. Called
// by a warp.
__device__ __forceinline__ void add_run_to_int8(const TableView& table, const int64_t* slots,
                                                const int64_t* positions, const RowMatrix& rows,
                                                int64_t first, int64_t n) {
  const int lane = threadIdx.x % kWarp;
  char* const row = row_to_write(table, slots[first] - table.first_slot, lane == 0);
  float scale = *reinterpret_cast<const float*>(row);
  __syncwarp();  // all lanes have read it
  for (int64_t i = first; i < n && slots[i] == slots[first]; ++i) {
    const auto* const from = reinterpret_cast<const float*>(rows.at(positions[i]));
    scale = write_int8_row<kWarp>(row, table.dim(), lane, [&](int32_t c) {
      return __fadd_rn(int8_value(row, scale, c), from[c]);
    });
  }
}

// Adds the rows of a run one after the other, in the order of a CPU. A warp processes 32 columns of
// one run. In a long run 32 loads are in flight; only the additions wait for each other.
__global__ void __launch_bounds__(kThreads)
    add_runs_kernel(const TableView* __restrict__ tables, int32_t num_tables,
                    const int64_t* __restrict__ slots, const int64_t* __restrict__ positions,
                    const RowMatrix rows, int64_t n) {
  const int64_t first = warp_index();
  if (first >= n || !is_slot(slots[first])) return;
  const int64_t slot = slots[first];
  if (first > 0 && slots[first - 1] == slot) return;
  const int lane = threadIdx.x % kWarp;
  const TableView& table = tables[table_of_slot(tables, num_tables, slot)];
  const RowType type = table.rows.type;
  if (type == RowType::kInt8) {
    if (blockIdx.y == 0) add_run_to_int8(table, slots, positions, rows, first, n);
    return;
  }
  const auto first_column = static_cast<int32_t>(blockIdx.y) * kWarp;
  if (first_column >= table.dim()) return;
  const int32_t c = first_column + lane;
  const bool has_column = c < table.dim();
  char* row = row_to_write(table, slot - table.first_slot, lane == 0 && first_column == 0);
  float sum = has_column ? load_element(type, row, c) : 0.0f;
  int number = kWarp;
  for (int64_t i = first; number == kWarp; i += kWarp) {
    const bool same = i + lane < n && slots[i + lane] == slot;
    const int64_t position = same ? positions[i + lane] : 0;
    number = __popc(__ballot_sync(kAllLanes, same));
    const auto given = [&](int k) {
      const int64_t from = __shfl_sync(kAllLanes, position, k);
      // Rounds given rows to the table's type, as on a CPU.
      return has_column ? rounded(type, load_element(rows.type, rows.at(from), c)) : 0.0f;
    };
    if (number == kWarp) {
      float values[kWarp];
#pragma unroll
      for (int k = 0; k < kWarp; ++k) values[k] = given(k);
#pragma unroll
      for (int k = 0; k < kWarp; ++k) sum = rounded(type, sum + values[k]);
    } else {
#pragma unroll 1
      for (int k = 0; k < number; ++k) sum = rounded(type, sum + given(k));
    }
  }
  if (has_column) store_element(type, row, c, sum);
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
  const dim3 grid(grid_for(n * kWarp),
                  add ? static_cast<unsigned>((rows.columns + kWarp - 1) / kWarp) : 1);
  kernel<<<grid, kThreads, 0, stream>>>(tables, num_tables, slots, positions, rows, n);
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
