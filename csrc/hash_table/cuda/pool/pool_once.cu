// Pooling of large batches of one feature where each bag has one id: rows are copied as they are.
// Bulk copies bring a warp's rows to shared memory and from there to their outputs, so they take no
// registers, and few warps keep the memory busy. No more are on a multiprocessor than that takes:
// the memory is slower with more of them, and the grouping beside (update.cu) finds room.
//
// On sm_90. Bags of other numbers of ids are pooled one after the other; they are not expected.
#include "common/chain.cuh"
#include "common/cuda_check.h"
#include "hash_table/cuda/async_copy.cuh"
#include "hash_table/cuda/bucket.cuh"
#include "hash_table/cuda/offsets.cuh"
#include "hash_table/cuda/pool/pool_tiles.h"
#include "hash_table/cuda/row_vector.cuh"

namespace torchrec_hkv::hash_table::cuda {
namespace {

constexpr int kOnceWarps = 2;  // of a block; none needs another
constexpr int kOnceBags = 16;  // of a warp
constexpr int32_t kOnceColumns = 4 * kWarp;
constexpr int kOnceBytes = kOnceBags * kOnceColumns * static_cast<int>(sizeof(float));  // of a warp
// Shared memory that a block takes, twice what it needs: so a multiprocessor has five in the
// percent of its memory that the kernel prefers, which leaves the grouping beside 60 KiB of cache
// in place of 28 (docs/measurements/training_step_gpu_kernels.md).
constexpr size_t kOnceShared = size_t{2} * kOnceWarps * kOnceBytes;
constexpr int kOncePercent = 80;

// The lane's columns of a position's row; of an initial one where that is not there.
__device__ __forceinline__ Columns<4> row_columns(const TableView& table, const Batch& batch,
                                                  int64_t position, int64_t slot, int32_t column) {
  const int64_t in_table = slot - table.first_slot;
  if (static_cast<uint64_t>(in_table) < static_cast<uint64_t>(table.num_slots)) {
    return Columns<4>::load(reinterpret_cast<const float*>(table.rows.homes) +
                            in_table * table.dim() + column);
  }
  return Columns<4>::initial(table.initial_rows, batch.ids[position], table.column_offset + column);
}

// Bags of any number of ids, or of offsets that can't be followed: so many from the first on.
[[maybe_unused]] __device__ __noinline__ void pool_one_by_one(const TableView& table,
                                                              const Batch& batch,
                                                              const int64_t* slots, int64_t first,
                                                              int bags, char* outputs,
                                                              int64_t stride) {
  const int32_t column = threadIdx.x % kWarp * 4;
  for (int bag = 0; bag < bags; ++bag) {
    const int64_t begin = batch.offsets[first + bag], end = batch.offsets[first + bag + 1];
    const bool bad = is_bad_bag(batch, first + bag, begin, end);
    if (bad && column == 0) refuse_bag(batch, first + bag, begin, end);
    if (column >= table.dim()) continue;
    Columns<4> sum = Columns<4>::zero();
#pragma unroll 1
    for (int64_t at = begin; !bad && at < end; ++at) {
      sum.add(1.0f, row_columns(table, batch, at, slots[at], column));
    }
    sum.store(reinterpret_cast<float*>(outputs + bag * stride) + column);
  }
}

// Rows of those of the bags whose ids have none.
[[maybe_unused]] __device__ __noinline__ void set_initial(const TableView& table,
                                                          const Batch& batch, int64_t first,
                                                          unsigned missing, char* rows) {
  const int32_t column = threadIdx.x % kWarp * 4, dim = table.dim();
  for (; missing; missing &= missing - 1) {
    const int bag = __ffs(static_cast<int>(missing)) - 1;
    if (column < dim) {
      row_columns(table, batch, first + bag, kNoSlot, column)
          .store(reinterpret_cast<float*>(rows) + bag * dim + column);
    }
  }
}

// A warp has little to do, but waits for each instruction, having few others beside: so there are
// few before its copies begin.
__global__ void __launch_bounds__(kOnceWarps* kWarp, 16)
    pool_once_kernel(const TableView* __restrict__ tables, const __grid_constant__ Batch batch,
                     const int64_t* __restrict__ slots, const __grid_constant__ Output<char> out) {
#if __CUDA_ARCH__ >= 900
  extern __shared__ __align__(128) char shared[];
  __shared__ CopyBarrier barriers[kOnceWarps];
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  CopyBarrier& barrier = barriers[warp];
  if (lane == 0) barrier.init();
  fence_barriers();
  __syncwarp();
  wait_for_kernel_before();  // which may have written slots, or what says of bags
  const int64_t first = (static_cast<int64_t>(blockIdx.x) * kOnceWarps + warp) * kOnceBags;
  if (first >= batch.num_bags) return;
  // All that the copies need is on its way at once.
  const TableView& table = tables[batch.feature_tables[0]];
  const int bags = static_cast<int>(min(static_cast<int64_t>(kOnceBags), batch.num_bags - first));
  // Of the lane's bag, whose position is its number where all bags before have one.
  const bool there = lane < bags;
  const int64_t position = first + lane;
  int64_t begin = position, end = position + 1, slot = kNoSlot;
  if (there) {
    begin = batch.offsets[position];
    end = batch.offsets[position + 1];
    slot = slots[position];
  }
  const int64_t first_slot = table.first_slot;
  const auto num_slots = static_cast<uint64_t>(table.num_slots);
  const char* const homes = table.rows.homes;
  const int32_t row_bytes = table.dim() * static_cast<int32_t>(sizeof(float));
  const int64_t stride = batch.output_stride(0, out.stride) * static_cast<int64_t>(sizeof(float));
  char* const outputs = out.at(batch.output_of(0, first, out.stride));
  if (__any_sync(kAllLanes, begin != position || end != position + 1)) {
    pool_one_by_one(table, batch, slots, first, bags, outputs, stride);
    return;
  }
  const int64_t in_table = slot - first_slot;
  const bool has_row = there && static_cast<uint64_t>(in_table) < num_slots;
  char* const rows = shared + warp * kOnceBytes;
  const unsigned present = __ballot_sync(kAllLanes, has_row);
  if (lane == 0) barrier.expect_bytes(__popc(present) * row_bytes);
  __syncwarp();
  if (has_row) {
    // What leaves the second-level cache last: see kManyOnce.
    copy_bulk(rows + lane * row_bytes, homes + in_table * row_bytes, row_bytes, &barrier,
              evict_last());
  }
  const unsigned missing = ~present & ((1u << bags) - 1);
  if (missing) set_initial(table, batch, first, missing, rows);
  barrier.wait(0);
  fence_before_bulk();
  __syncwarp();
  if (stride == row_bytes) {
    if (lane == 0) copy_bulk_out(outputs, rows, bags * row_bytes);
  } else if (there) {
    copy_bulk_out(outputs + lane * stride, rows + lane * row_bytes, row_bytes);
  }
  end_bulk_copies_out();
  wait_for_bulk_reads();
#endif
}

}  // namespace

bool pool_once(const TableView* tables, const Batch& batch, const int64_t* slots, Pooling pooling,
               Output<char> out, const GroupShape& shape, cudaStream_t stream) {
  if (batch.num_ids != batch.num_bags || batch.num_ids < kManyOnce) return false;
  if (batch.num_features != 1) return false;
  if (pooling.mean || pooling.weights != nullptr) return false;
  if (!shape.float32_rows || out.type != RowType::kFloat32 || !shape.rows_in_hbm) return false;
  // Narrower rows would need more warps.
  if (shape.widest > kOnceColumns || shape.widest <= kOnceColumns / 2) return false;
  if (compute_capability() < 9) return false;
  constexpr int64_t kBlockBags = kOnceWarps * kOnceBags;
  const int64_t blocks = (batch.num_bags + kBlockBags - 1) / kBlockBags;
  LaunchShape launch{dim3(static_cast<unsigned>(blocks)), kOnceWarps * kWarp, kOnceShared};
  launch.shared_percent = kOncePercent;
  launch_chained(pool_once_kernel, launch, stream, tables, batch, slots, out);
  return true;
}

}  // namespace torchrec_hkv::hash_table::cuda
