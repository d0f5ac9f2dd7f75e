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
struct Tasks {
  uint32_t pieces, number;  // number: of all tasks
  uint32_t share;           // of pieces among the tasks that have some, times 2^32
  // A run of so many positions is dense: where an id stands in a feature's bags, it stands in them
  // twice, on average, or more.
  uint32_t dense_length;

  __device__ __forceinline__ Tasks(uint32_t of_pieces, const Batch& batch)
      : pieces(of_pieces),
        number(of_pieces + (static_cast<uint32_t>(batch.num_ids) + kSegment - 1) / kSegment),
        dense_length(2 * (static_cast<uint32_t>(batch.num_bags) /
                          static_cast<uint32_t>(batch.num_features))) {
    // A piece is of a run of more than kLongest positions, so there are more segments than pieces,
    // and the share is below 1. It is rounded down; the last one of the tasks makes up for that.
    static_assert(kLongest >= 4 * kSegment);
    const uint32_t with_pieces = number - number / 8 - 1;
    share = pieces == 0
                ? 0
                : static_cast<uint32_t>((static_cast<uint64_t>(pieces) << 32) / with_pieces);
  }
  // So many pieces are among the first tasks.
  __device__ __forceinline__ uint32_t pieces_before(uint32_t task) const {
    return min(pieces, __umulhi(task, share));
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
      at = (number - before) * kSegment;
      end = min(n, at + kSegment);
    }
  }
};

// Of one position what tells where its run begins and ends.
struct Place {
  Pair pair;
  uint64_t before, after, far;  // keys of the neighbours, and of kLongest positions later

  __device__ __forceinline__ static Place load(const Pairs& sorted, uint32_t at, uint32_t n) {
    constexpr uint64_t kNone = ~0ull;
    Place place{};
    if (at < n) place.pair = sorted.load(at);
    place.before = at < n && at > 0 ? sorted.key(at - 1) : kNone;
    place.after = at + 1 < n ? sorted.key(at + 1) : kNone;
    place.far = at + kLongest < n ? sorted.key(at + kLongest) : kNone;
    return place;
  }
};

}  // namespace torchrec_hkv::hash_table::cuda
