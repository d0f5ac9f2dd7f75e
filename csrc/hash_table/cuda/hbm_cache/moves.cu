
#include "common/cuda_check.h"
#include "common/dependent_launch.cuh"
#include "common/scan.cuh"
#include "hash_table/cuda/hbm_cache/exchange.cuh"
#include "hash_table/cuda/hbm_cache/moves.cuh"
#include "hash_table/cuda/insert/insert.cuh"

namespace torchrec_hkv::hash_table::cuda {
namespace {

// In a group as large as host memory, a bin (moves.cuh) has some MB of rows.
constexpr uint32_t kMaxBins = 1 << 15;
constexpr int kScanThreads = 1024;

// Layout of the scratch.
struct MovesLayout {
  size_t list;  // after the counts of bins, the total number and the number of taken moves
  size_t bytes;
  Moves moves;

  MovesLayout(int64_t num_ids, const FrameMoves& moving, char* memory) : moves{} {
    while ((moving.group_slots - 1) >> moves.shift >= kMaxBins) ++moves.shift;
    const auto bins = static_cast<uint32_t>((moving.group_slots - 1) >> moves.shift) + 1;
    moves.vectors = (bins + 3) / 4;
    moves.num_tables = moving.num_tables;
    list = (size_t{moves.vectors} + 1) * sizeof(uint4);
    bytes = list + num_ids * (2 * sizeof(Move) + sizeof(uint8_t));
    moves.bins = reinterpret_cast<uint32_t*>(memory);
    moves.number = moves.bins + 4 * moves.vectors;
    moves.taken = moves.number + 1;
    moves.claimed = reinterpret_cast<Move*>(memory + list);
    moves.ordered = moves.claimed + num_ids;
    moves.new_ways = reinterpret_cast<uint8_t*>(moves.ordered + num_ids);
  }
};

// Counts of a warp, for one table at a time, so that few atomics go to the table's counters.
struct ClaimCounters {
  const TableView* table = nullptr;
  uint32_t fetched = 0, host_hits = 0, written_back = 0;

  // has_slot: whether the lane counts. Called by all lanes.
  __device__ __forceinline__ void add(const TableView* lane_table, bool has_slot, bool is_fetched,
                                      bool is_host_hit, bool is_written_back) {
    const unsigned lanes = __ballot_sync(kAllLanes, has_slot);
    if (lanes == 0) return;
    const TableView* const first =
        table_of_lane<false>(lane_table, __ffs(static_cast<int>(lanes)) - 1);
    if (first != table) flush();
    table = first;
    if (!__all_sync(kAllLanes, !has_slot || lane_table == first)) {
      count_warp(lane_table, kFetched, is_fetched);
      count_warp(lane_table, kHostHits, is_host_hit);
      count_warp(lane_table, kWrittenBack, is_written_back);
      return;
    }
    fetched += __popc(__ballot_sync(kAllLanes, is_fetched));
    host_hits += __popc(__ballot_sync(kAllLanes, is_host_hit));
    written_back += __popc(__ballot_sync(kAllLanes, is_written_back));
  }
  __device__ __forceinline__ void flush() {
    if (threadIdx.x % kWarp == 0) {
      if (fetched > 0) count(*table, kFetched, fetched);
      if (host_hits > 0) count(*table, kHostHits, host_hits);
      if (written_back > 0) count(*table, kWrittenBack, written_back);
    }
    fetched = host_hits = written_back = 0;
  }
};

// Gives frames to rows without one, and lists the moves. A block has a part of the batch, and adds
// the number of its moves once for all its threads.
__global__ void __launch_bounds__(kThreads)
    claim_kernel(const TableView* __restrict__ tables, const Batch batch, const CallContext context,
                 const int64_t* __restrict__ slots, const bool* __restrict__ placed, bool others,
                 const Moves moves) {
  __shared__ uint32_t of_warps[kThreads / kWarp];
  __shared__ uint32_t listed_before;
  const unsigned lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const int64_t rounds = (batch.num_ids + kThreads - 1) / kThreads;
  const int64_t from = rounds * blockIdx.x / gridDim.x * kThreads;
  const int64_t to = rounds * (blockIdx.x + 1) / gridDim.x * kThreads;
  ClaimCounters counters;
  for (int64_t begin = from; begin < to; begin += kThreads) {
    const int64_t position = begin + threadIdx.x;
    const TableView* lane_table = tables;
    int64_t slot = kNoSlot;
    bool is_new = false;
    FrameClaim claim;
    if (position < batch.num_ids && slots[position] >= 0 && slots[position] != kSkipped) {
      is_new = placed[position];
      lane_table = &table_at(tables, batch, position);
      if (lane_table->frames.tags != nullptr && (is_new || others)) {
        slot = slots[position] - lane_table->first_slot;
        claim = is_new ? claim_frame<true>(*lane_table, slot, context)
                       : claim_frame<false>(*lane_table, slot, context);
      }
    }
    int64_t way = -1;
    if (claim.frame != kNoFrame) {
      way = claim.frame - lane_table->frames.frame_at(lane_table->frames.set_position(slot).set, 0);
    }
    if (is_new) moves.new_ways[position] = static_cast<uint8_t>(1 + way);
    const bool was_present = slot != kNoSlot && !is_new;
    const bool is_loaded = was_present && claim.taken, is_evicted = claim.victim != kNoSlot;
    counters.add(lane_table, slot != kNoSlot, is_loaded,
                 is_loaded || (was_present && claim.frame == kNoFrame), is_evicted);
    const unsigned listed = __ballot_sync(kAllLanes, is_loaded || is_evicted);
    if (lane == 0) of_warps[warp] = static_cast<uint32_t>(__popc(listed));
    __syncthreads();
    if (threadIdx.x == 0) {
      uint32_t all = 0;
      for (const uint32_t number : of_warps) all += number;
      if (all > 0) listed_before = atomicAdd(moves.number, all);
    }
    __syncthreads();
    uint32_t at = listed_before + __popc(listed & ((1u << lane) - 1));
    for (unsigned w = 0; w < warp; ++w) at += of_warps[w];
    __syncthreads();  // the next round overwrites both
    if (!is_loaded && !is_evicted) continue;
    const Move move(lane_table->first_slot + slot, way, is_new,
                    is_evicted ? 1 + lane_table->frames.set_position(claim.victim).number : 0);
    moves.claimed[at] = move;
    atomicAdd(&moves.bin_of(move), 1u);
  }
  counters.flush();
}

// Computes the begin of each bin's moves. One block.
__global__ void __launch_bounds__(kScanThreads) scan_kernel(const Moves moves) {
  using Scan = BlockScan<uint32_t, kScanThreads>;
  constexpr int kVectors = kMaxBins / kScanThreads / 4;  // of a thread
  __shared__ Scan::Storage storage;
  begin_dependent_kernel();
  if (*moves.number == 0) return;
  auto* const thread_bins = reinterpret_cast<uint4*>(moves.bins) + threadIdx.x * kVectors;
  const auto is_one = [&](int k) { return threadIdx.x * kVectors + k < moves.vectors; };
  uint4 counts[kVectors];
  uint32_t all = 0, of_block;
#pragma unroll
  for (int k = 0; k < kVectors; ++k) counts[k] = is_one(k) ? thread_bins[k] : uint4{};
#pragma unroll
  for (int k = 0; k < kVectors; ++k) all += counts[k].x + counts[k].y + counts[k].z + counts[k].w;
  uint32_t begin = Scan::before(storage, all, of_block);
#pragma unroll
  for (int k = 0; k < kVectors; ++k) {
    const uint32_t second = begin + counts[k].x, third = second + counts[k].y;
    const uint32_t fourth = third + counts[k].z;
    if (is_one(k)) thread_bins[k] = {begin, second, third, fourth};
    begin = fourth + counts[k].w;
  }
}

__global__ void __launch_bounds__(kThreads) order_kernel(const Moves moves) {
  begin_dependent_kernel();
  const uint32_t number = *moves.number;
  for (uint32_t i = blockIdx.x * kThreads + threadIdx.x; i < number; i += gridDim.x * kThreads) {
    const Move move = moves.claimed[i];
    moves.ordered[atomicAdd(&moves.bin_of(move), 1u)] = move;
  }
}

// Groups of four moves go to different warps, so that the moves in flight are of few bins. A
// warp takes 32 moves, eight groups of four, and a lane has one of them.
__global__ void __launch_bounds__(kThreads)
    exchange_kernel(const TableView* __restrict__ tables, const Moves moves) {
  constexpr uint32_t kNeighbours = 4;
  const uint32_t number = *moves.number;
  const uint32_t warp = (blockIdx.x * kThreads + threadIdx.x) / kWarp;
  const uint32_t warps = gridDim.x * (kThreads / kWarp), lane = threadIdx.x % kWarp;
  const uint32_t lane_move = (lane / kNeighbours * warps + warp) * kNeighbours + lane % kNeighbours;
  for (uint32_t from = 0; from < number; from += warps * kWarp) {
    const bool busy = from + lane_move < number;
    const MoveAddresses move(tables, moves.num_tables,
                             busy ? moves.ordered[from + lane_move] : Move(0, 0, true, 0));
    exchange_rows(move.table, busy, move.frame, move.victim, move.slot);
  }
}

}  // namespace

size_t moves_scratch(int64_t num_ids, const FrameMoves& moving) {
  return MovesLayout(num_ids, moving, nullptr).bytes;
}

Moves claim_frames(const TableView* tables, const Batch& batch, const CallContext& context,
                   const int64_t* slots, const bool* placed, bool others, const FrameMoves& moving,
                   void* scratch, cudaStream_t stream) {
  const MovesLayout layout(batch.num_ids, moving, static_cast<char*>(scratch));
  const Moves& moves = layout.moves;
  HKV_CUDA_CHECK(cudaMemsetAsync(moves.bins, 0, layout.list, stream));
  const unsigned grid = grid_for(batch.num_ids);
  claim_kernel<<<min(grid, resident_blocks(claim_kernel)), kThreads, 0, stream>>>(
      tables, batch, context, slots, placed, others, moves);
  HKV_CUDA_CHECK_LAUNCH();
  launch_dependent(scan_kernel, 1, kScanThreads, stream, moves);
  launch_dependent(order_kernel, min(grid, multiprocessors()), kThreads, stream, moves);
  return moves;
}

void move_rows(const TableView* tables, const Batch& batch, const Moves& moves,
               const FrameMoves& moving, cudaStream_t stream) {
  // Not chained, because the stream may have to wait for other streams in between.
  if (moving.bulk_bytes > 0 && compute_capability() >= 9) {
    move_in_bulk(tables, moves, moving.bulk_bytes, multiprocessors(), stream);
  } else {
    // Blocks on half of the multiprocessors saturate the link, and leave room for kernels of other
    // streams, such as the backward of the previous batch.
    exchange_kernel<<<min(grid_for(batch.num_ids), (multiprocessors() + 1) / 2), kThreads, 0,
                      stream>>>(tables, moves);
    HKV_CUDA_CHECK_LAUNCH();
  }
}

}  // namespace torchrec_hkv::hash_table::cuda
