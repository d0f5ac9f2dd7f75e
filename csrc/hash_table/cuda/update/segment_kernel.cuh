// The kernel of segments.cu and segments_int8.cu, and its launch.
//
// A unit is 32 neighbouring positions, and the segments that begin there. A tile of lanes takes a
// unit, as many positions at a time as it has lanes. In small batches the tiles of a warp share a
// unit. Each lane looks up the data of one position: the address of its gradient and, at the end of
// a segment, its row. A group with several row classes launches a kernel for each class, which
// reads its units from a list (list_segments.cu).
#pragma once

#include <cstdint>

#include "common/cuda_check.h"
#include "common/dependent_launch.cuh"
#include "hash_table/cuda/offsets.cuh"
#include "hash_table/cuda/update/segment_tile.cuh"
#include "hash_table/cuda/update/update.cuh"

namespace torchrec_hkv::hash_table::cuda {

constexpr int kSegmentThreads = 64;  // of a block; small blocks free their resources early
constexpr int kSegmentWarps = kSegmentThreads / kWarp;

// row_class: of the tables to update, or kAllRowClasses. whole: each tile takes a whole unit.
template <Optimizer kKind, typename Element, int kLanes, int kVectors, int kDepth, bool kPlain,
          int kBlocks>
__global__ void __launch_bounds__(kSegmentThreads, kBlocks) segment_kernel(
    const TableView* __restrict__ tables, const __grid_constant__ UpdateArguments update,
    const __grid_constant__ UpdateScratch scratch,
    const __grid_constant__
    typename SegmentTile<kKind, Element, kLanes, kVectors, kDepth, kPlain>::Memory memory,
    int32_t row_class, bool whole, bool first) {
  extern __shared__ __align__(16) char shared[];
  // The first of several kernels waits for the inputs of all. The next one may start when all
  // blocks of this one have begun.
  if (first) wait_for_kernel_before();
  let_next_kernel_start();
  if (!is_refused(update.batch)) {
    const bool listed = row_class != kAllRowClasses;  // the group has other classes
    using Segments = SegmentTile<kKind, Element, kLanes, kVectors, kDepth, kPlain>;
    constexpr uint32_t kTiles = kWarp / kLanes, kSpans = kLanes / Segments::kSpan;
    const uint32_t n = scratch.short_positions(update.batch.num_ids);
    const uint32_t* const list = listed ? scratch.units.of(row_class) : nullptr;
    const uint32_t units = listed ? scratch.units.number[row_class] : (n + kWarp - 1) / kWarp;
    const auto first_lane = static_cast<uint32_t>(Tile<kLanes>::first_lane());
    const uint32_t begin = whole ? 0 : first_lane;  // within a unit
    const uint32_t positions = whole ? kWarp : Segments::kSpan;
    Segments tile(tables, update, scratch, memory, row_class, shared);
    const uint32_t num_work_items = whole ? (units + kTiles - 1) / kTiles : units * kSpans;
    for (uint32_t work = blockIdx.x * kSegmentWarps + threadIdx.x / kWarp; work < num_work_items;
         work += gridDim.x * kSegmentWarps) {
      const uint32_t unit = whole ? work * kTiles + first_lane / kLanes : work / kSpans;
      const bool is_valid = unit < units;
      const uint32_t at = is_valid ? (listed ? list[unit] : unit) * kWarp + begin +
                                         (whole ? 0 : work % kSpans * Segments::kSpan)
                                   : n;
      tile.update_segments(at, is_valid ? at + positions : n, n);
    }
  }
  if (!first) wait_for_kernel_before();
}

// Blocks that run on a multiprocessor at once, which bounds the registers of a thread. More blocks
// hide more of the latency of memory. For eight lanes of 16-bit rows, spilled registers cost more
// than that gains. Updater: a RowUpdater. vectors: of a lane, four columns each.
template <typename Updater, int kLanes, bool kPlain>
constexpr int blocks_of(int vectors) {
  if (Updater::kStates > 0) return vectors <= 2 ? 8 : 6;
  if (!kPlain) return vectors <= 2 ? 10 : vectors <= 4 ? 8 : 6;
  if (vectors <= 2) return Updater::k16Bits && kLanes == 8 ? 12 : 14;
  // Rows of 8 bits are held until their scale is known.
  if (Updater::kInt8) return vectors <= 4 ? 8 : 6;
  return vectors <= 4 ? 10 : 8;
}

// The arguments of update_segments.
struct SegmentCall {
  const TableView* tables;
  const UpdateArguments& update;
  const UpdateScratch& scratch;
  const GroupShape& shape;
  int32_t row_class;
  bool first;
  cudaStream_t stream;
};

// kDepth: positions in flight.
template <Optimizer kKind, typename Element, int kLanes, int kVectors, int kDepth, bool kPlain>
void launch_segments(const SegmentCall& call) {
  using Segments = SegmentTile<kKind, Element, kLanes, kVectors, kDepth, kPlain>;
  constexpr int kBlocks = blocks_of<typename Segments::Updater, kLanes, kPlain>(
      kVectors * Segments::Updater::kWidth / 4);
  const bool listed = call.scratch.units.any();
  const int32_t columns =
      min(call.shape.widest, max_columns(static_cast<WidthClass>(call.row_class % kWidthClasses)));
  const typename Segments::Memory memory(columns, sizeof(Element), kDepth);
  constexpr int kTiles = kWarp / kLanes;
  const int64_t units = (call.update.batch.num_ids + kWarp - 1) / kWarp;
  const int64_t at_once = int64_t{resident_grid(kBlocks, units * kThreads)} * kSegmentWarps;
  const bool whole = kTiles > 1 && units >= 2 * at_once * kTiles;
  const int64_t warps = whole ? (units + kTiles - 1) / kTiles : units * kLanes / Segments::kSpan;
  const int64_t all = (warps + kSegmentWarps - 1) / kSegmentWarps;
  const int64_t blocks =
      listed ? min(all, int64_t{resident_grid(2 * kBlocks, units * kWarp)}) : all;
  LaunchShape launch_shape{dim3(static_cast<unsigned>(blocks)), kSegmentThreads};
  launch_shape.shared_bytes = kSegmentThreads / kLanes * memory.tile_bytes;
  launch_dependent(segment_kernel<kKind, Element, kLanes, kVectors, kDepth, kPlain, kBlocks>,
                   launch_shape, call.stream, call.tables, call.update, call.scratch, memory,
                   listed ? call.row_class : kAllRowClasses, whole, call.first);
}

// Selects lanes and vectors for rows of a width, and the positions in flight.
template <Optimizer kKind, typename Element, bool kPlain = true>
void launch_for_width(const SegmentCall& call) {
  // A lane has eight columns of 16 bits, or four of another type.
  constexpr bool k16Bits = sizeof(Element) == sizeof(uint16_t);
  // Two wide rows keep the memory as busy as four narrow ones.
  switch (max(call.row_class % kWidthClasses - (k16Bits ? 1 : 0), 0)) {
    case 0:
      return launch_segments<kKind, Element, 8, 1, 4, kPlain>(call);
    case 1:
      return launch_segments<kKind, Element, 16, 1, 4, kPlain>(call);
    case 2:
      return launch_segments<kKind, Element, 32, 1, 4, kPlain>(call);
    case 3:
      return launch_segments<kKind, Element, 32, 2, 4, kPlain>(call);
    case 4:
      return launch_segments<kKind, Element, 32, 4, 2, kPlain>(call);
    case 5:
      if constexpr (!k16Bits) return launch_segments<kKind, Element, 32, 8, 2, kPlain>(call);
  }
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

// Updates rows of 8 bits (segments_int8.cu).
void update_int8_segments(const SegmentCall& call);
// Updates rows of 32 and 16 bits whose update is not plain (segments_extended.cu).
void update_extended_segments(const SegmentCall& call);
// For groups all of whose rows have at most eight columns of 32 or 16 bits (narrow_segments.cu).
bool updates_narrow_segments(const GroupShape& shape, const OptimizerConfig& optimizer);
void update_narrow_segments(const SegmentCall& call);

}  // namespace torchrec_hkv::hash_table::cuda
