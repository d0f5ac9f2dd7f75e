// What the warps of the stream (stream.cu) work on, and how they find it.
#pragma once

#include <cstdint>

#include "hash_table/cuda/update/update.cuh"

namespace torchrec_hkv::hash_table::cuda {

constexpr uint32_t kSegment = 32;  // positions; longer ones last too long at the end
constexpr uint32_t kNoPiece = ~0u;

// What warps work on: pieces of long runs and segments. Pieces are listed about in the order of the
// tables, and spread over the segments, so that what is worked on at a time reads the gradients of
// a few tables' features, which the second-level cache holds. As pieces last longest, they end
// early: the last eighth of the tasks are segments.
//
// Where it is known which positions of a feature are those of a hot slot, and these are a long run,
// no segments are there: a warp would find nothing to do in each of them.
struct Tasks {
  uint32_t pieces, number;  // number: of all tasks
  uint32_t share;           // of pieces among the tasks that have some, times 2^32
  // A run of so many positions is dense: where an id stands in a feature's bags, it stands in them
  // twice, on average, or more.
  uint32_t dense_length;
  bool in_ranges;  // segments are of features' positions that are not of hot slots
  // Of the feature with the lane's number: these positions, and how many segments are before them.
  uint32_t begin, end, segments_before;

  // All lanes of a warp.
  __device__ __forceinline__ Tasks(const Batch& batch, const Scratch& scratch)
      : pieces(*scratch.long_runs.pieces),
        dense_length(2 * (static_cast<uint32_t>(batch.num_bags) /
                          static_cast<uint32_t>(batch.num_features))) {
    static_assert(kMostRanges == kWarp);
    const auto segments_of = [](uint32_t positions) {
      return (positions + kSegment - 1) / kSegment;
    };
    const int lane = threadIdx.x % kWarp;
    const auto n = static_cast<uint32_t>(batch.num_ids);
    const uint32_t before_hot = scratch.before_hot[lane];
    uint32_t segments = segments_of(n);
    in_ranges = __shfl_sync(kAllLanes, before_hot, 0) != 0;
    begin = end = n;
    segments_before = 0;
    if (in_ranges) {
      if (lane < batch.num_features) {
        begin = static_cast<uint32_t>(batch.feature_start(lane));
        end = begin + before_hot - 1;
      }
      const uint32_t own = segments_of(end - begin);
      segments = own;
#pragma unroll
      for (int offset = 1; offset < kWarp; offset *= 2) {
        const uint32_t other = __shfl_up_sync(kAllLanes, segments, offset);
        if (lane >= offset) segments += other;
      }
      segments_before = segments - own;
      // Two are enough for what follows; those that are too many have no positions.
      segments = max(__shfl_sync(kAllLanes, segments, kWarp - 1), 2u);
    }
    number = pieces + segments;
    // The share is below 1, and rounded down; the last one of the tasks makes up for that.
    const uint32_t with_pieces = max(number - number / 8 - 1, pieces + 1);
    share = pieces == 0
                ? 0
                : static_cast<uint32_t>((static_cast<uint64_t>(pieces) << 32) / with_pieces);
  }
  // So many pieces are among the first tasks.
  __device__ __forceinline__ uint32_t pieces_before(uint32_t task) const {
    return min(pieces, __umulhi(task, share));
  }
  // Where the positions of a segment begin and end. All lanes.
  __device__ __forceinline__ uint2 range_of(uint32_t segment, uint32_t n) const {
    if (!in_ranges) return {segment * kSegment, min(n, (segment + 1) * kSegment)};
    // Of several features that begin with the same segment only the last has any.
    const int feature = __popc(__ballot_sync(kAllLanes, segments_before <= segment)) - 1;
    const uint32_t first = __shfl_sync(kAllLanes, segments_before, feature);
    const uint32_t at = __shfl_sync(kAllLanes, begin, feature) + (segment - first) * kSegment;
    return {at, min(__shfl_sync(kAllLanes, end, feature), at + kSegment)};
  }
};

// What a warp works on, the next task that no warp has begun.
struct Task {
  uint32_t number;
  uint32_t following;  // the warp's next one, as lane 0 knows
  uint32_t piece;      // or kNoPiece
  uint32_t at, end;    // its next chunk; where it ends
  bool dense;          // it is a piece of a dense run
  bool carried;        // the chunk begins in a run that the segment has begun

  __device__ __forceinline__ void begin(uint32_t numbered, const Tasks& tasks, uint32_t workers,
                                        uint32_t n, const Scratch& scratch) {
    number = numbered;
    carried = dense = false;
    piece = kNoPiece;
    if (number >= tasks.number) return;
    if (threadIdx.x % kWarp == 0) following = workers + atomicAdd(scratch.ticket, 1u);
    const uint32_t before = tasks.pieces_before(number);
    if (tasks.pieces_before(number + 1) > before) {
      piece = before;
      const LongRun& run = scratch.long_runs.runs[scratch.long_runs.run_of[piece]];
      const uint32_t from = (piece - run.first_piece) * static_cast<uint32_t>(kPieceSize);
      dense = run.length >= tasks.dense_length;
      at = run.first + from;
      end = at + min(run.length - from, static_cast<uint32_t>(kPieceSize));
    } else {
      const uint2 range = tasks.range_of(number - before, n);
      at = range.x;
      end = range.y;
    }
  }
};

}  // namespace torchrec_hkv::hash_table::cuda
