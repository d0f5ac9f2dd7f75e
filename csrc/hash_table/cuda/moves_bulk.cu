// Moves by bulk copies through shared memory, which have the link as busy as moves by lanes with a
// fraction of the warps.
#include <algorithm>

#include "common/cuda_check.h"
#include "hash_table/cuda/async_copy.cuh"
#include "hash_table/cuda/moves.cuh"

namespace torchrec_hkv::hash_table::cuda {
namespace {

constexpr int kStages = 2;
// What comes into a stage, of which as much leaves.
constexpr int kStageBytes = 4096;

#if __CUDA_ARCH__ >= 900
// What comes into a frame, and what leaves it, in a stage.
struct Passing {
  char* in = nullptr;   // the frame; null: nothing comes
  char* out = nullptr;  // at home; null: nothing leaves
  uint32_t bytes = 0;
};
#endif

// A warp a block. A lane below `rows` has one row of each stage, and room for what comes and what
// leaves; while a stage's copies from host memory and frames are under way, those of the stage
// before, which have arrived, go on to frames and host memory.
__global__ void __launch_bounds__(kWarp)
    bulk_kernel(const TableView* __restrict__ tables, const Moves moves, uint32_t rows,
                uint32_t room) {
#if __CUDA_ARCH__ >= 900
  extern __shared__ __align__(128) char memory[];  // [kStages][rows][2][room]
  __shared__ CopyBarrier arrived[kStages];
  const uint32_t lane = threadIdx.x;
  if (lane == 0) {
    for (CopyBarrier& barrier : arrived) barrier.init();
    fence_barriers();
  }
  __syncwarp();
  const uint32_t number = *moves.number, of_turn = gridDim.x * rows;
  const uint32_t turns = (number + of_turn - 1) / of_turn;
  const auto place = [&](int stage) { return memory + (stage * rows + lane) * 2 * room; };
  const auto begin = [&](uint32_t turn, int stage) {
    const uint32_t at = turn * of_turn + blockIdx.x * rows + lane;
    Passing row;
    const char *home = nullptr, *frame = nullptr;
    if (lane < rows && at < number) {
      const MoveAt move(tables, moves.num_tables, moves.ordered[at]);
      const RowStore& of = move.table->rows;
      row.bytes = static_cast<uint32_t>(of.bytes());
      frame = of.at(0, move.frame);
      if (move.leaver != kNoSlot) row.out = of.at(move.leaver, kNoFrame);
      if (move.slot != kNoSlot) {
        row.in = of.at(0, move.frame);
        home = of.at(move.slot, kNoFrame);
      }
    }
    const uint32_t rows_of_lane = (row.in != nullptr ? 1 : 0) + (row.out != nullptr ? 1 : 0);
    const uint32_t bytes = __reduce_add_sync(kAllLanes, rows_of_lane * row.bytes);
    if (lane == 0) arrived[stage].expect_bytes(bytes);
    __syncwarp();
    if (row.in != nullptr) copy_bulk(place(stage), home, row.bytes, &arrived[stage]);
    if (row.out != nullptr) copy_bulk(place(stage) + room, frame, row.bytes, &arrived[stage]);
    return row;
  };
  Passing passing[kStages];
  if (turns > 0) passing[0] = begin(0, 0);
  for (uint32_t first = 0; first < turns; first += kStages) {
#pragma unroll
    for (int stage = 0; stage < kStages; ++stage) {
      const uint32_t turn = first + stage;
      if (turn >= turns) break;
      const int next = (stage + 1) % kStages;
      wait_for_bulk_reads();  // of the next stage's room, by the turn before
      __syncwarp();
      if (turn + 1 < turns) passing[next] = begin(turn + 1, next);
      arrived[stage].wait(turn / kStages & 1);
      const Passing& row = passing[stage];
      if (row.out != nullptr) copy_bulk_out(row.out, place(stage) + room, row.bytes);
      if (row.in != nullptr) copy_bulk_out(row.in, place(stage), row.bytes);
      end_bulk_copies_out();
    }
  }
  wait_for_bulk_copies_out();
#endif
}

}  // namespace

void move_in_bulk(const TableView* tables, const Moves& moves, int32_t bulk_bytes, unsigned blocks,
                  cudaStream_t stream) {
  const int rows = std::clamp(kStageBytes / bulk_bytes, 1, kWarp);
  const size_t shared = size_t{2} * kStages * rows * bulk_bytes;
  bulk_kernel<<<blocks, kWarp, shared, stream>>>(tables, moves, static_cast<uint32_t>(rows),
                                                 static_cast<uint32_t>(bulk_bytes));
  HKV_CUDA_CHECK_LAUNCH();
}

}  // namespace torchrec_hkv::hash_table::cuda
