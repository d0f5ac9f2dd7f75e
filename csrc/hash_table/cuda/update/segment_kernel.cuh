// The kernel of segments.cu and segments_int8.cu, and its launch.
//
// A warp takes 32 neighbouring positions. A tile of its lanes takes as many positions as it has
// lanes, and the segments that begin there. Each lane looks up the data of one position: the
// address of its gradient and, at the end of a segment, its row. Long segments are cut in pieces,
// which tiles sum. A group with several row classes launches a kernel for each class, which reads
// its units of positions from a list (list_segments.cu).
#pragma once

#include <cstdint>

#include "common/chain.cuh"
#include "common/cuda_check.h"
#include "hash_table/cuda/offsets.cuh"
#include "hash_table/cuda/update/segment_tile.cuh"
#include "hash_table/cuda/update/update.cuh"

namespace torchrec_hkv::hash_table::cuda {

constexpr int kSegmentThreads = 64;  // of a block; small blocks free their resources early
constexpr int kSegmentWarps = kSegmentThreads / kWarp;

// row_class: of the tables to update, or kAllRowClasses.
template <Optimizer kKind, typename Element, int kLanes, int kVectors, int kDepth, int kBlocks>
__global__ void __launch_bounds__(kSegmentThreads, kBlocks)
    segment_kernel(const TableView* __restrict__ tables, const __grid_constant__ Update update,
                   const __grid_constant__ Scratch scratch,
                   const __grid_constant__
                   typename SegmentTile<kKind, Element, kLanes, kVectors, kDepth>::Memory memory,
                   int32_t row_class, bool first) {
  extern __shared__ __align__(16) char shared[];
  // The first of several kernels waits for the inputs of all. The next one may start when all
  // blocks of this one have begun.
  if (first) wait_for_kernel_before();
  let_next_kernel_start();
  if (!is_refused(update.batch)) {
    const bool listed = row_class != kAllRowClasses;  // the group has other classes
    using Segments = SegmentTile<kKind, Element, kLanes, kVectors, kDepth>;
    constexpr uint32_t kParts = Segments::Parts::kParts, kSpans = kLanes / Segments::kSpan;
    const uint32_t n = scratch.short_positions(update.batch.num_ids);
    const uint32_t* const list = listed ? scratch.units.of(row_class) : nullptr;
    const uint32_t units = listed ? scratch.units.number[row_class] : (n + kWarp - 1) / kWarp;
    const uint32_t pieces = *scratch.long_segments.pieces;
    constexpr uint32_t kTiles = kWarp / kLanes;
    const uint32_t piece_warps = (pieces * kParts + kTiles - 1) / kTiles;
    const auto first_lane = static_cast<uint32_t>(Tile<kLanes>::first_lane());
    Segments tile(tables, update, scratch, memory, row_class, shared);
    // Pieces come first, as they take longest; first the first parts of all.
    const uint32_t works = piece_warps + units * kSpans;
    for (uint32_t work = blockIdx.x * kSegmentWarps + threadIdx.x / kWarp; work < works;
         work += gridDim.x * kSegmentWarps) {
      if (work < piece_warps) {
        const uint32_t number = work * kTiles + first_lane / kLanes;
        if (number < pieces * kParts) tile.add_piece(number % pieces, number / pieces);
      } else {
        const uint32_t unit = (work - piece_warps) / kSpans;
        const uint32_t span = (work - piece_warps) % kSpans;
        tile.update_segments(
            (listed ? list[unit] : unit) * kWarp + first_lane + span * Segments::kSpan, n);
      }
    }
  }
  if (!first) wait_for_kernel_before();
}

// Blocks that run on a multiprocessor at once. Their number bounds the registers of a thread.
constexpr int blocks_of(int vectors, bool column_states, bool int8) {
  // Rows of 8 bits are held until their scale is known.
  if (int8 && !column_states) return vectors <= 2 ? 10 : vectors <= 4 ? 8 : 6;
  return column_states ? (vectors <= 2 ? 8 : 6) : (vectors <= 2 ? 12 : vectors <= 4 ? 10 : 8);
}

// The arguments of update_segments, except for the class that selects the kernel.
struct SegmentCall {
  const TableView* tables;
  const Update& update;
  const Scratch& scratch;
  const GroupShape& shape;
  int32_t row_class;
  bool first;
  cudaStream_t stream;
};

// kDepth: positions in flight.
template <Optimizer kKind, typename Element, int kLanes, int kVectors, int kDepth>
void launch_segments(const SegmentCall& call) {
  using Segments = SegmentTile<kKind, Element, kLanes, kVectors, kDepth>;
  constexpr int kBlocks = blocks_of(kVectors * Segments::Updater::kWidth / 4,
                                    column_states(kKind) > 0, Segments::Updater::kInt8);
  const bool listed = call.scratch.units.any();
  const int32_t columns =
      min(call.shape.widest, most_columns(static_cast<WidthClass>(call.row_class % kWidthClasses)));
  const typename Segments::Memory memory(columns, sizeof(Element), kDepth,
                                         Segments::Parts::kGradients,
                                         Segments::PieceSummer::kColumns);
  const int64_t n = call.update.batch.num_ids;
  const int64_t warps = (n + kWarp - 1) / kWarp * kLanes / Segments::kSpan +
                        (n / kLongest + 1) * Segments::Parts::kParts * kLanes / kWarp + 1;
  const int64_t all = (warps + kSegmentWarps - 1) / kSegmentWarps;
  const int64_t blocks = listed ? min(all, int64_t{resident_grid(2 * kBlocks, n)}) : all;
  LaunchShape launch_shape{dim3(static_cast<unsigned>(blocks)), kSegmentThreads};
  launch_shape.shared_bytes = kSegmentThreads / kLanes * memory.of_tile;
  launch_chained(segment_kernel<kKind, Element, kLanes, kVectors, kDepth, kBlocks>, launch_shape,
                 call.stream, call.tables, call.update, call.scratch, memory,
                 listed ? call.row_class : kAllRowClasses, call.first);
}

// Calls visit.operator()<kKind>() with the kind whose RowUpdater serves an optimizer.
template <typename Visit>
void with_updater_kind(const OptimizerConfig& optimizer, const Visit& visit) {
  switch (optimizer.kind) {
    case Optimizer::kAdagrad:
      return visit.template operator()<Optimizer::kAdagrad>();
    case Optimizer::kAdam:
      return visit.template operator()<Optimizer::kAdam>();
    default:
      return visit.template operator()<Optimizer::kSgd>();
  }
}

// Rows of 8 bits (segments_int8.cu).
void update_int8_segments(const SegmentCall& call);

}  // namespace torchrec_hkv::hash_table::cuda
