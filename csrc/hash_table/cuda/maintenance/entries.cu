// Touches, frees, selects and exports entries at slots on the GPU, for the tables of a group in one
// launch.

#include "common/cuda_check.h"
#include "hash_table/cuda/bucket.cuh"
#include "hash_table/cuda/entry.cuh"
#include "hash_table/cuda/insert/missing_lists.cuh"
#include "hash_table/cuda/row_matrix.cuh"
#include "hash_table/kernels.h"

namespace torchrec_hkv::hash_table::cuda {
namespace {

constexpr int kRowLanes = 8;           // lanes that copy one entry
constexpr int64_t kMaxTables = 65535;  // limit of the grid's second dimension
constexpr int64_t kMaxBlocks = 4096;   // blocks that search a table

// kOneTable, here and below: the view is a parameter of the launch.
template <bool kOneTable>
__global__ void __launch_bounds__(kThreads)
    touch_kernel(const __grid_constant__ TableView only, const TableView* __restrict__ tables,
                 const Batch batch, const int64_t* __restrict__ slots, const CallContext context) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const bool hit = i < batch.num_ids && slots[i] != kNoSlot;
  const unsigned hits = __ballot_sync(kAllLanes, hit);
  if (!hit) return;
  const TableView& table = kOneTable ? only : table_at(tables, batch, i);
  touch(hits, table, slots[i] - table.first_slot, context, context.given(i));
}

template <bool kOneTable>
__global__ void __launch_bounds__(kThreads)
    erase_kernel(const __grid_constant__ TableView only, const TableView* __restrict__ tables,
                 int32_t num_tables, const int64_t* __restrict__ slots, int64_t n) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= n || slots[i] == kNoSlot) return;
  const TableView& table = kOneTable ? only : tables[table_of_slot(tables, num_tables, slots[i])];
  const int64_t slot = slots[i] - table.first_slot;
  store_l2(digest_of_slot(table, slot), kEmptyDigest);
  store_l2(step_of(table, slot), kFreeStep);
}

// Blocks of one table have one blockIdx.y.
__global__ void __launch_bounds__(kThreads)
    select_kernel(const TableView* __restrict__ tables, int32_t num_tables,
                  const Selection selection, bool* __restrict__ chosen) {
  for (int32_t t = static_cast<int32_t>(blockIdx.y); t < num_tables;
       t += static_cast<int32_t>(gridDim.y)) {
    if (selection.starts[t] < 0) continue;
    const TableView& table = tables[t];
    bool* const out = chosen + selection.starts[t];
    for (int64_t slot = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
         slot < table.num_slots; slot += static_cast<int64_t>(gridDim.x) * kThreads) {
      const uint16_t digest = *digest_of_slot(table, slot);
      const uint32_t step = *step_of(table, slot);
      const uint64_t score = table.scores == nullptr ? step : load_score(table, slot);
      out[slot] = selection.meets(digest, score, step);
    }
  }
}

__global__ void __launch_bounds__(kThreads)
    export_kernel(const TableView* __restrict__ tables, int32_t num_tables,
                  const int64_t* __restrict__ slots, int64_t n, const ExportedEntries out) {
  const int64_t i = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) / kRowLanes;
  if (i >= n) return;
  const int lane = threadIdx.x % kRowLanes;
  const TableView& table = tables[table_of_slot(tables, num_tables, slots[i])];
  const int64_t slot = slots[i] - table.first_slot;
  if (lane == 0) {
    out.ids[i] = id_of_slot(table, slot);
    out.scores[i] = table.scores == nullptr ? *step_of(table, slot) : load_score(table, slot);
  }
  const int64_t frame = table.frames.frame_of(slot);
  copy_to_matrix<kRowLanes>(out.rows, i, table.rows.type, table.rows.at(slot, frame), table.dim(),
                            lane);
  if (out.states.columns == 0) return;
  copy_to_matrix<kRowLanes>(out.states, i, table.states.type, table.states.at(slot, frame),
                            table.states.width, lane);
}

}  // namespace

void touch_slots(const TableView* tables, const TableView* only, const Batch& batch,
                 const int64_t* slots, const CallContext& context, cudaStream_t stream) {
  if (batch.num_ids == 0) return;
  const auto kernel = only != nullptr ? touch_kernel<true> : touch_kernel<false>;
  kernel<<<grid_for(batch.num_ids), kThreads, 0, stream>>>(only != nullptr ? *only : TableView{},
                                                           tables, batch, slots, context);
  HKV_CUDA_CHECK_LAUNCH();
}

void erase_slots(const TableView* tables, const TableView* only, int32_t num_tables,
                 const int64_t* slots, int64_t n, cudaStream_t stream) {
  if (n == 0) return;
  const auto kernel = only != nullptr ? erase_kernel<true> : erase_kernel<false>;
  kernel<<<grid_for(n), kThreads, 0, stream>>>(only != nullptr ? *only : TableView{}, tables,
                                               num_tables, slots, n);
  HKV_CUDA_CHECK_LAUNCH();
}

void select_slots(const TableView* tables, int32_t num_tables, int64_t max_slots,
                  const Selection& selection, bool* chosen, cudaStream_t stream) {
  if (max_slots == 0) return;
  const dim3 grid(static_cast<unsigned>(min(int64_t{grid_for(max_slots)}, kMaxBlocks)),
                  static_cast<unsigned>(min(int64_t{num_tables}, kMaxTables)));
  select_kernel<<<grid, kThreads, 0, stream>>>(tables, num_tables, selection, chosen);
  HKV_CUDA_CHECK_LAUNCH();
}

void export_slots(const TableView* tables, int32_t num_tables, const int64_t* slots, int64_t n,
                  const ExportedEntries& out, cudaStream_t stream) {
  if (n == 0) return;
  export_kernel<<<grid_for(n * kRowLanes), kThreads, 0, stream>>>(tables, num_tables, slots, n,
                                                                  out);
  HKV_CUDA_CHECK_LAUNCH();
}

}  // namespace torchrec_hkv::hash_table::cuda
