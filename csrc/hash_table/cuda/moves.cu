#include <algorithm>
#include <cub/block/block_scan.cuh>

#include "common/chain.cuh"
#include "common/cuda_check.h"
#include "hash_table/cuda/exchange.cuh"
#include "hash_table/cuda/insert/insert.cuh"
#include "hash_table/cuda/moves.cuh"

namespace torchrec_hkv::hash_table::cuda {
namespace {

// Some MB of rows are a stretch where a group has as many as host memory holds.
constexpr uint32_t kMostStretches = 1 << 15;
constexpr int kScanThreads = 1024;
static_assert(most_slots_of_set(kFewestOfSet) < 1 << 16, "a leaver's number must fit");

// In the scratch.
struct Layout {
  size_t list;  // behind the counts of stretches, and the number of all
  size_t bytes;
  Moves moves;

  Layout(int64_t num_ids, const MovingRows& moving, char* memory) : moves{} {
    while ((moving.group_slots - 1) >> moves.shift >= kMostStretches) ++moves.shift;
    const auto stretches = static_cast<uint32_t>((moving.group_slots - 1) >> moves.shift) + 1;
    moves.vectors = (stretches + 3) / 4;
    list = (size_t{moves.vectors} + 1) * sizeof(uint4);
    bytes = list + 2 * num_ids * sizeof(Move);
    moves.stretches = reinterpret_cast<uint32_t*>(memory);
    moves.number = moves.stretches + 4 * moves.vectors;
    moves.claimed = reinterpret_cast<Move*>(memory + list);
    moves.ordered = moves.claimed + num_ids;
  }
};

// Frames are given to rows that have none, and the moves listed.
__global__ void __launch_bounds__(kThreads)
    claim_kernel(const TableView* __restrict__ tables, const Batch batch, const Visit visit,
                 const int64_t* __restrict__ slots, const bool* __restrict__ placed,
                 const Moves moves) {
  const unsigned lane = threadIdx.x % kWarp;
  for (int64_t begin = static_cast<int64_t>(blockIdx.x) * kThreads; begin < batch.num_ids;
       begin += static_cast<int64_t>(gridDim.x) * kThreads) {
    const int64_t position = begin + threadIdx.x;
    const TableView* mine = tables;
    int64_t slot = kNoSlot;
    FrameClaim claim;
    if (position < batch.num_ids && !placed[position] && slots[position] >= 0 &&
        slots[position] != kPassedOver) {
      mine = &table_at(tables, batch, position);
      if (mine->frames.tags != nullptr) {
        slot = slots[position] - mine->first_slot;
        claim = claim_frame<false>(*mine, slot, visit);
      }
    }
    count_warp(mine, kFetched, claim.taken);
    count_warp(mine, kHostHits, slot != kNoSlot && (claim.taken || claim.frame == kNoFrame));
    count_warp(mine, kWrittenHome, claim.leaver != kNoSlot);
    const unsigned taken = __ballot_sync(kAllLanes, claim.taken);
    if (taken == 0) continue;
    uint32_t first = 0;
    if (lane == 0) first = atomicAdd(moves.number, static_cast<uint32_t>(__popc(taken)));
    first = __shfl_sync(kAllLanes, first, 0);
    if (!claim.taken) continue;
    const Frames& frames = mine->frames;
    const int64_t place = claim.frame - frames.frame_at(frames.home_of(slot).set, 0);
    Move move{slot, static_cast<int32_t>(mine - tables), static_cast<uint16_t>(place), 0};
    if (claim.leaver != kNoSlot) {
      move.leaver = static_cast<uint16_t>(1 + frames.home_of(claim.leaver).number);
    }
    moves.claimed[first + __popc(taken & ((1u << lane) - 1))] = move;
    atomicAdd(&moves.stretch_of(tables, move), 1u);
  }
}

// Where each stretch's moves begin. One block.
__global__ void __launch_bounds__(kScanThreads) scan_kernel(const Moves moves) {
  using Scan = cub::BlockScan<uint32_t, kScanThreads>;
  constexpr int kVectors = kMostStretches / kScanThreads / 4;  // of a thread
  __shared__ typename Scan::TempStorage storage;
  enter_chain();
  if (*moves.number == 0) return;
  auto* const mine = reinterpret_cast<uint4*>(moves.stretches) + threadIdx.x * kVectors;
  const auto is_one = [&](int k) { return threadIdx.x * kVectors + k < moves.vectors; };
  uint4 counts[kVectors];
  uint32_t all = 0, begin = 0;
#pragma unroll
  for (int k = 0; k < kVectors; ++k) counts[k] = is_one(k) ? mine[k] : uint4{};
#pragma unroll
  for (int k = 0; k < kVectors; ++k) all += counts[k].x + counts[k].y + counts[k].z + counts[k].w;
  Scan(storage).ExclusiveSum(all, begin);
#pragma unroll
  for (int k = 0; k < kVectors; ++k) {
    const uint32_t second = begin + counts[k].x, third = second + counts[k].y;
    const uint32_t fourth = third + counts[k].z;
    if (is_one(k)) mine[k] = {begin, second, third, fourth};
    begin = fourth + counts[k].w;
  }
}

__global__ void __launch_bounds__(kThreads)
    order_kernel(const TableView* __restrict__ tables, const Moves moves) {
  enter_chain();
  const uint32_t number = *moves.number;
  for (uint32_t i = blockIdx.x * kThreads + threadIdx.x; i < number; i += gridDim.x * kThreads) {
    const Move move = moves.claimed[i];
    moves.ordered[atomicAdd(&moves.stretch_of(tables, move), 1u)] = move;
  }
}

// Each four moves are of another warp than the next four, so that what is under way at a time is
// of few stretches. A lane has one of 32 that its warp takes, four by four, one after the other.
__global__ void __launch_bounds__(kThreads)
    exchange_kernel(const TableView* __restrict__ tables, const Moves moves) {
  constexpr uint32_t kNeighbours = 4;
  enter_chain();
  const uint32_t number = *moves.number;
  const uint32_t warp = (blockIdx.x * kThreads + threadIdx.x) / kWarp;
  const uint32_t warps = gridDim.x * (kThreads / kWarp), lane = threadIdx.x % kWarp;
  const uint32_t mine = (lane / kNeighbours * warps + warp) * kNeighbours + lane % kNeighbours;
  for (uint32_t from = 0; from < number; from += warps * kWarp) {
    const bool busy = from + mine < number;
    const MoveAt move(tables, busy ? moves.ordered[from + mine] : Move{});
    exchange_rows(move.table, busy, move.frame, move.leaver, move.slot);
  }
}

}  // namespace

size_t fetch_scratch(int64_t num_ids, const MovingRows& moving) {
  return Layout(num_ids, moving, nullptr).bytes;
}

void fetch_rows(const TableView* tables, const Batch& batch, const Visit& visit,
                const int64_t* slots, const bool* placed, const MovingRows& moving, void* scratch,
                cudaStream_t stream) {
  const Layout layout(batch.num_ids, moving, static_cast<char*>(scratch));
  const Moves& moves = layout.moves;
  HKV_CUDA_CHECK(cudaMemsetAsync(moves.stretches, 0, layout.list, stream));
  const unsigned grid = grid_for(batch.num_ids), multiprocessors = processors();
  claim_kernel<<<std::min(grid, resident_blocks(claim_kernel)), kThreads, 0, stream>>>(
      tables, batch, visit, slots, placed, moves);
  HKV_CUDA_CHECK_LAUNCH();
  launch_chained(scan_kernel, 1, kScanThreads, stream, moves);
  launch_chained(order_kernel, std::min(grid, multiprocessors), kThreads, stream, tables, moves);
  // Blocks on half of the multiprocessors have the link as busy as more do, and leave room to
  // kernels on other streams, such as the backward of the batch before.
  const unsigned blocks = (multiprocessors + 1) / 2;
  if (moving.bulk_bytes > 0 && compute_capability() >= 9) {
    move_in_bulk(tables, moves, moving.bulk_bytes, blocks, stream);
  } else {
    launch_chained(exchange_kernel, std::min(grid, blocks), kThreads, stream, tables, moves);
  }
}

}  // namespace torchrec_hkv::hash_table::cuda
