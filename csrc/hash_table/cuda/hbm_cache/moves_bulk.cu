// Moves by bulk copies through shared memory, which saturate the link with a fraction of the warps.

#include "common/cuda_check.h"
#include "hash_table/cuda/async_copy.cuh"
#include "hash_table/cuda/hbm_cache/moves.cuh"

namespace torchrec_hkv::hash_table::cuda {
namespace {

constexpr int kStages = 2;
// Bytes that a stage loads; it writes as many. Two stages on each multiprocessor saturate the link.
// More in flight would touch pages further apart, and delay other kernels.
constexpr int kStageBytes = 1024;

#if __CUDA_ARCH__ >= 900
// A row that is loaded into a frame, and one that leaves it.
struct RowSwap {
  const char* source = nullptr;  // of the loaded row, in host memory; null: none
  char* out = nullptr;           // place of the leaving row in host memory; null: none
  char* frame = nullptr;
  uint32_t bytes = 0;  // bytes of each; 0: no move

  RowSwap() = default;
  __device__ __forceinline__ explicit RowSwap(const MoveAddresses& move) {
    const RowStore& rows = move.table->rows;
    bytes = static_cast<uint32_t>(rows.bytes());
    frame = rows.at(0, move.frame);
    if (move.victim != kNoSlot) out = rows.at(move.victim, kNoFrame);
    if (move.slot != kNoSlot) source = rows.at(move.slot, kNoFrame);
  }
  __device__ __forceinline__ uint32_t all_bytes() const {
    return ((source != nullptr ? 1 : 0) + (out != nullptr ? 1 : 0)) * bytes;
  }
};
#endif

// Blocks of one warp. For each stage a warp takes the next `rows` moves that no warp has taken. So
// the moves in flight are neighbours, however fast the warps are, and all warps end together. A
// lane below `rows` has one row of each stage, with memory for the loaded and the leaving row.
// While the copies of a stage from host memory and frames are in flight, those of the previous
// stage, which have arrived, are written to frames and host memory.
__global__ void __launch_bounds__(kWarp)
    bulk_kernel(const TableView* __restrict__ tables, const Moves moves, uint32_t rows,
                uint32_t row_bytes) {
#if __CUDA_ARCH__ >= 900
  extern __shared__ __align__(128) char memory[];  // [kStages][rows][2][room]
  __shared__ CopyBarrier arrived[kStages];
  const uint32_t lane = threadIdx.x;
  if (lane == 0) {
    for (CopyBarrier& barrier : arrived) barrier.init();
    fence_barriers();
  }
  __syncwarp();
  const uint32_t number = *moves.number;
  const auto stage_memory = [&](int stage) {
    return memory + (stage * rows + lane) * 2 * row_bytes;
  };
  // The warp takes moves two turns ahead, and loads them one turn ahead.
  uint32_t taken = 0;  // taken by lane 0
  bool loaded = false;
  Move ahead(0, 0, true, 0);
  const auto take = [&] {
    if (lane == 0) taken = atomicAdd(moves.taken, rows);
  };
  const auto load = [&] {
    const uint32_t at = __shfl_sync(kAllLanes, taken, 0) + lane;
    loaded = lane < rows && at < number;
    if (loaded) ahead = moves.ordered[at];
    take();
  };
  const auto begin = [&](int stage) {
    RowSwap row;
    if (loaded) row = RowSwap(MoveAddresses(tables, moves.num_tables, ahead));
    load();
    const uint32_t bytes = __reduce_add_sync(kAllLanes, row.all_bytes());
    if (lane == 0) arrived[stage].expect_bytes(bytes);
    __syncwarp();
    if (row.source != nullptr)
      copy_bulk(stage_memory(stage), row.source, row.bytes, &arrived[stage]);
    if (row.out != nullptr)
      copy_bulk(stage_memory(stage) + row_bytes, row.frame, row.bytes, &arrived[stage]);
    return row;
  };
  take();
  load();
  RowSwap swaps[kStages];
  swaps[0] = begin(0);
  for (uint32_t phase = 0;; phase ^= 1) {
#pragma unroll
    for (int stage = 0; stage < kStages; ++stage) {
      const int next = (stage + 1) % kStages;
      const RowSwap& row = swaps[stage];
      if (!__any_sync(kAllLanes, row.bytes > 0)) {
        wait_for_bulk_copies_out();
        return;
      }
      wait_for_bulk_reads();  // the previous turn's reads of the next stage's memory
      __syncwarp();
      swaps[next] = begin(next);
      arrived[stage].wait(phase);
      if (row.out != nullptr) copy_bulk_out(row.out, stage_memory(stage) + row_bytes, row.bytes);
      if (row.source != nullptr) copy_bulk_out(row.frame, stage_memory(stage), row.bytes);
      end_bulk_copies_out();
    }
  }
#endif
}

}  // namespace

void move_in_bulk(const TableView* tables, const Moves& moves, int32_t bulk_bytes, unsigned blocks,
                  cudaStream_t stream) {
  const int rows = max(1, min(kStageBytes / bulk_bytes, kWarp));
  const size_t shared = size_t{2} * kStages * rows * bulk_bytes;
  bulk_kernel<<<blocks, kWarp, shared, stream>>>(tables, moves, static_cast<uint32_t>(rows),
                                                 static_cast<uint32_t>(bulk_bytes));
  HKV_CUDA_CHECK_LAUNCH();
}

}  // namespace torchrec_hkv::hash_table::cuda
