// Functions that the kernels of an update share. update.cu describes how they work together.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "hash_table/cuda/bucket.cuh"
#include "hash_table/cuda/row_vector.cuh"
#include "hash_table/cuda/tile.cuh"
#include "hash_table/cuda/update/row_update.cuh"
#include "hash_table/cuda/update/scratch.cuh"
#include "hash_table/kernels.h"

namespace torchrec_hkv::hash_table::cuda {

// Arguments that the kernels of an update share.
struct UpdateArguments {
  Batch batch;
  Pooling pooling;
  Output<const char> grad;
  OptimizerConfig optimizer;
  const float* learning_rate;
  uint64_t no_slot;
  bool group_four_wide;
};

__device__ __forceinline__ const TableView& table_of(const TableView* tables, const Batch& batch,
                                                     uint32_t bag) {
  return tables[batch.feature_tables[batch.feature_of_bag(bag)]];
}

// The end of the segment that contains `at`. A tile searches, one key for each lane, because a hot
// id's segment may be most of the batch.
template <int kLanes>
__device__ __forceinline__ int64_t end_of_segment(const Pairs& sorted, int64_t at, int64_t n,
                                                  uint64_t slot) {
  int64_t low = at, high = n;  // low is in the segment, high is not in it
  for (int64_t step = kLanes; low + step < n; step *= kLanes) {
    if (sorted.key(low + step) != slot) {
      high = low + step;
      break;
    }
    low += step;
  }
  while (high - low > 1) {
    const int64_t stride = (high - low + kLanes) / (kLanes + 1);
    const int64_t probe = low + (Tile<kLanes>::lane() + 1) * stride;
    const int same = __popc(Tile<kLanes>::ballot(probe < high && sorted.key(probe) == slot));
    low += same * stride;
    high = min(high, low + stride);
  }
  return high;
}

// The bag of a position. Called by all lanes of a warp.
__device__ __forceinline__ int64_t bag_at(const int64_t* offsets, int64_t num_bags,
                                          int64_t position) {
  int64_t low = 0, high = num_bags;  // low begins at the position or before, high after it
  while (high - low > 1) {
    const int64_t stride = (high - low + kWarp) / (kWarp + 1);
    const int64_t probe = low + (threadIdx.x % kWarp + 1) * stride;
    const bool before = probe < high && offsets[probe] <= position;
    low += __popc(__ballot_sync(kAllLanes, before)) * stride;
    high = min(high, low + stride);
  }
  return low;
}

// Lists a long segment. Called by all lanes of a tile.
template <int kLanes>
__device__ __forceinline__ void append_long_segment(const LongSegments& longs, int64_t first,
                                                    int64_t length) {
  using Lanes = Tile<kLanes>;
  LongSegment segment{static_cast<uint32_t>(first), static_cast<uint32_t>(length), 0, 0};
  const uint32_t pieces = segment.pieces();
  uint32_t number = 0, first_piece = 0;
  if (Lanes::lane() == 0) {
    number = pieces > kPieceWarps ? longs.capacity - 1 - atomicAdd(longs.number_many, 1u)
                                  : atomicAdd(longs.number, 1u);
    segment.first_piece = first_piece = atomicAdd(longs.pieces, pieces);
    longs.segments[number] = segment;
  }
  number = Lanes::of_lane(number, 0);
  first_piece = Lanes::of_lane(first_piece, 0);
  for (uint32_t p = Lanes::lane(); p < pieces; p += kLanes) {
    longs.segment_of[first_piece + p] = number;
  }
}

// The gradient of a sorted value, and its scale.
struct GradientRef {
  uint32_t table;
  int64_t gradient;  // position of its bag's gradient
  float scale;       // of the gradient
};

__device__ __forceinline__ GradientRef gradient_ref_of(const UpdateArguments& update,
                                                       const UpdateScratch& scratch,
                                                       uint32_t value) {
  const Batch& batch = update.batch;
  const uint32_t bag = scratch.bag_of(value);
  const int32_t feature = batch.feature_of_bag(bag);
  GradientRef ref;
  ref.table = batch.feature_tables[feature];
  ref.gradient = batch.output_of(feature, bag - batch.first_bag(feature), update.grad.stride);
  // With weights, values are positions.
  ref.scale = update.pooling.weights != nullptr ? update.pooling.weights[value] : 1.0f;
  if (update.pooling.mean) {
    ref.scale *= 1.0f / static_cast<float>(batch.offsets[bag + 1] - batch.offsets[bag]);
  }
  return ref;
}

// A sorted position, and the keys that determine the begin and end of its segment.
struct SortedPosition {
  Pair pair;
  uint64_t before, after, far;  // keys of the neighbours, and of the position kLongest later

  __device__ __forceinline__ static SortedPosition load(const Pairs& sorted, uint32_t at,
                                                        uint32_t n) {
    constexpr uint64_t kNone = ~0ull;
    SortedPosition position{};
    if (at < n) position.pair = sorted.load(at);
    position.before = at < n && at > 0 ? sorted.key(at - 1) : kNone;
    position.after = at + 1 < n ? sorted.key(at + 1) : kNone;
    position.far = at + kLongest < n ? sorted.key(at + kLongest) : kNone;
    return position;
  }
};

// Writes the pairs of all positions, and checks the offsets (prepare_pairs.cu).
void prepare_pairs(const Batch& batch, const int64_t* slots, uint64_t no_slot,
                   const UpdateScratch& scratch, cudaStream_t stream);

// Whether sort_by_table can sort such a batch, and is the fastest according to earlier batches
// (sort_by_table.cu).
bool sorts_by_table(const GroupShape& shape, const Batch& batch, const PairFormat& format,
                    const UpdateHint* hint);
// Groups the pairs of equal slots, separately by table and in the order of the batch. The result
// may be in the other half. max_slots: of one table. hot_slots: as in UpdateScratch.
// on_side_stream: whether other kernels occupy most of the GPU when this one begins.
void sort_by_table(const TableView* tables, const Batch& batch, SortedPairs* pairs,
                   int64_t max_slots, uint32_t* hot_slots, bool on_side_stream,
                   cudaStream_t stream);

// Copies the pairs of short segments to scratch.short_pairs, in the order of their bags
// (order_by_bag.cu).
void order_by_bag(const Batch& batch, uint64_t no_slot, const UpdateScratch& scratch,
                  cudaStream_t stream);

// Lists long segments, counts segments of one position and, in groups of several row classes, lists
// the units of each class (list_segments.cu).
void list_segments(const TableView* tables, const Batch& batch, uint64_t no_slot,
                   const UpdateScratch& scratch, cudaStream_t stream);

// Sums the gradients of the pieces of long segments. Later kernels of the update may begin
// meanwhile (sum_pieces.cu).
void sum_pieces(const TableView* tables, const UpdateArguments& update,
                const UpdateScratch& scratch, const GroupShape& shape, cudaStream_t stream);

// Whether update_segments supports an optimizer and a row class.
bool updates_segments(const OptimizerConfig& optimizer, int32_t row_class);
// Updates the rows of all segments but long ones, for tables of this row class. first: whether it
// is the first of the kernels that may overlap (segments.cu).
void update_segments(const TableView* tables, const UpdateArguments& update,
                     const UpdateScratch& scratch, const GroupShape& shape, int32_t row_class,
                     bool first, cudaStream_t stream);
// As update_segments, for any optimizer and rows of any width; row_class may be kAllRowClasses
// (any_segments.cu).
void update_any_segments(const TableView* tables, const UpdateArguments& update,
                         const UpdateScratch& scratch, const GroupShape& shape, int32_t row_class,
                         cudaStream_t stream);
// Updates the rows of long segments, whose pieces have been summed, and writes the hint for the
// next batch (long_segments.cu).
void update_long_segments(const TableView* tables, const UpdateArguments& update,
                          const UpdateScratch& scratch, const GroupShape& shape, UpdateHint* hint,
                          cudaStream_t stream);

// Number of blocks of a grid: so many per multiprocessor, but not more than the threads need.
unsigned resident_grid(int blocks_of_processor, int64_t threads);

}  // namespace torchrec_hkv::hash_table::cuda
