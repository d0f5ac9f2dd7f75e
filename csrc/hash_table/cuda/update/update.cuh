// What the kernels of an update share: update.cu says how they work together.
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

// What the kernels of an update share.
struct Update {
  Batch batch;
  Pooling pooling;
  Output<const char> grad;
  OptimizerConfig optimizer;
  const float* learning_rate;
  uint64_t no_slot;
  bool group_four_wide;
};

__device__ __forceinline__ const TableView& table_of(const TableView* tables, const Update& update,
                                                     uint32_t bag) {
  return tables[update.batch.feature_tables[update.batch.feature_of_bag(bag)]];
}

// The end of the run that `at` is in, by a tile whose lanes look at as many keys at once: a hot
// id's run may be half of the batch.
template <int kLanes>
__device__ __forceinline__ int64_t end_of_run(const Pairs& sorted, int64_t at, int64_t n,
                                              uint64_t slot) {
  int64_t low = at, high = n;  // low is in the run, high is not
  for (int64_t step = kLanes; low + step < n; step *= kLanes) {
    if (sorted.key(low + step) != slot) {
      high = low + step;
      break;
    }
    low += step;
  }
  while (high - low > 1) {
    const int64_t stride = (high - low + kLanes) / (kLanes + 1);
    const int64_t look = low + (Tile<kLanes>::lane() + 1) * stride;
    const int same = __popc(Tile<kLanes>::ballot(look < high && sorted.key(look) == slot));
    low += same * stride;
    high = min(high, low + stride);
  }
  return high;
}

// The bag that a position is in. All lanes of a warp.
__device__ __forceinline__ int64_t bag_at(const int64_t* offsets, int64_t num_bags,
                                          int64_t position) {
  int64_t low = 0, high = num_bags;  // low begins at the position or before, high behind it
  while (high - low > 1) {
    const int64_t stride = (high - low + kWarp) / (kWarp + 1);
    const int64_t look = low + (threadIdx.x % kWarp + 1) * stride;
    const bool before = look < high && offsets[look] <= position;
    low += __popc(__ballot_sync(kAllLanes, before)) * stride;
    high = min(high, low + stride);
  }
  return low;
}

template <int kLanes>
__device__ __forceinline__ void note_long_run(const LongRuns& runs, int64_t first, int64_t length) {
  using Lanes = Tile<kLanes>;
  const auto pieces = static_cast<uint32_t>((length + kPieceSize - 1) / kPieceSize);
  uint32_t number = 0, first_piece = 0;
  if (Lanes::lane() == 0) {
    number = atomicAdd(runs.number, 1u);
    first_piece = atomicAdd(runs.pieces, pieces);
    runs.runs[number] =
        LongRun{static_cast<uint32_t>(first), static_cast<uint32_t>(length), first_piece};
  }
  number = Lanes::of_lane(number, 0);
  first_piece = Lanes::of_lane(first_piece, 0);
  for (uint32_t p = Lanes::lane(); p < pieces; p += kLanes) runs.run_of[first_piece + p] = number;
}

// One position of the sorted order, as the lane that looks at it sees it.
struct Neighbour {
  uint32_t table;
  int64_t slot;      // in its table
  int64_t gradient;  // place of its bag's gradient
  float scale;       // of it
};

// Where the gradient of a sorted value is, and how it counts.
struct Share {
  uint32_t table;
  int64_t gradient;  // place of its bag's gradient
  float scale;       // of it
};

__device__ __forceinline__ Share share_of(const Update& update, const uint32_t* bags,
                                          uint32_t value) {
  const Batch& batch = update.batch;
  const uint32_t bag = bags != nullptr ? bags[value] : value;
  const int32_t feature = batch.feature_of_bag(bag);
  Share it;
  it.table = batch.feature_tables[feature];
  it.gradient = batch.output_of(feature, bag - batch.first_bag(feature), update.grad.stride);
  // Where there are weights, values are positions.
  it.scale = update.pooling.weights != nullptr ? update.pooling.weights[value] : 1.0f;
  if (update.pooling.mean) {
    it.scale *= 1.0f / static_cast<float>(batch.offsets[bag + 1] - batch.offsets[bag]);
  }
  return it;
}

__device__ __forceinline__ Neighbour neighbour_at(const TableView* tables, const Update& update,
                                                  const Scratch& scratch, uint64_t key,
                                                  uint32_t value) {
  const Share share = share_of(update, scratch.bags, value);
  return Neighbour{share.table, static_cast<int64_t>(key) - tables[share.table].first_slot,
                   share.gradient, share.scale};
}

// A sorted position, and the keys that tell where its run begins and ends.
struct SortedPlace {
  Pair pair;
  uint64_t before, after, far;  // keys of the neighbours, and of kLongest positions later

  __device__ __forceinline__ static SortedPlace load(const Pairs& sorted, uint32_t at, uint32_t n) {
    constexpr uint64_t kNone = ~0ull;
    SortedPlace place{};
    if (at < n) place.pair = sorted.load(at);
    place.before = at < n && at > 0 ? sorted.key(at - 1) : kNone;
    place.after = at + 1 < n ? sorted.key(at + 1) : kNone;
    place.far = at + kLongest < n ? sorted.key(at + kLongest) : kNone;
    return place;
  }
};

// Writes what is to be sorted, where that is all. Looks at the offsets.
void prepare_update(const Batch& batch, const int64_t* slots, uint64_t no_slot,
                    const Scratch& scratch, cudaStream_t stream);

// Whether sort_by_table sorts such a batch, and is the fastest to do so, as far as batches before
// tell (sort_by_table.cu).
bool sorts_by_table(const GroupShape& shape, const Batch& batch, const PairFormat& format,
                    const UpdateHint* hint);
// Brings pairs of equal slots together, those of each table apart and in the order of the batch.
// The pairs may end in the other half. most_slots: of one table. before_hot, hot_slots: as Scratch
// has them. beside: other kernels take most places when this one begins.
void sort_by_table(const TableView* tables, const Batch& batch, SortedPairs* pairs,
                   int64_t most_slots, uint32_t* before_hot, uint32_t* hot_slots, bool beside,
                   cudaStream_t stream);

// Has a row and its state brought into the second-level cache, where the row leaves before others:
// what is left holds the small states until their neighbours are asked for.
__device__ __forceinline__ void prefetch_row(const TableView& table, int64_t slot) {
  const int64_t frame = table.frames.frame_of(slot);
  if (!table.in_hbm(frame)) return;
  const auto row_bytes = static_cast<uint32_t>(table.rows.bytes());
  const char* const row = table.rows.at(slot, frame);
  if (row_bytes % 16 == 0) {
    prefetch_l2_once(row, row_bytes);
  } else {
    prefetch_l2(row);
  }
  const auto state_bytes = static_cast<uint32_t>(table.states.bytes());
  const char* const state = table.states.at(slot, frame);
  if (state_bytes % 16 != 0) {
    prefetch_l2(state);
  } else if (state_bytes > 0) {
    prefetch_l2(state, state_bytes);
  }
}

// For quick groups: rows of at most kQuickColumns columns, all four wide.
constexpr int32_t kQuickColumns = 4 * kWarp;

// Finds out which slots are repeated (repeats.cu). Clears what must be zeros of a grouping in batch
// order, and looks at the offsets.
void mark_repeats(const Batch& batch, const int64_t* slots, const TouchNotes* notes,
                  const Scratch& scratch, cudaStream_t stream);

// What a lane knows of a position of a batch in its own order, looked up as soon as it is known.
struct AlonePosition {
  int64_t at = 0, slot = kNoSlot;
  uint32_t repeated = 0;  // of its 32 neighbours, a bit each

  __device__ __forceinline__ void look(const Batch& batch, const int64_t* slots,
                                       const Scratch& scratch, int64_t position) {
    at = position;
    if (at >= batch.num_ids) return;
    slot = load_once(slots + at);
    repeated = load_once(&scratch.repeated_positions[at / 32]);
  }
  __device__ __forceinline__ bool is_of(const TableView& table) const {
    return table.has(slot) && !(repeated >> (at % 32) & 1);
  }
};

// Updates rows that stand alone, in the order of the batch.
void update_alone(const TableView* tables, const Update& update, const int64_t* slots,
                  const Scratch& scratch, const GroupShape& shape, cudaStream_t stream);
// The same of narrow rows with a gradient each; false where it is not for such a batch, which is
// then left to update_alone (alone_narrow.cu).
bool update_narrow_alone(const TableView* tables, const Update& update, const int64_t* slots,
                         const Scratch& scratch, const GroupShape& shape, cudaStream_t stream);
// The same of rows of row-wise Adagrad whose bags have several ids and share a gradient
// (alone_shared.cu).
bool update_shared_alone(const TableView* tables, const Update& update, const int64_t* slots,
                         const Scratch& scratch, const GroupShape& shape, cudaStream_t stream);
// In place of prepare_update, after mark_repeats: splits the positions of repeated slots off,
// chains them by slot, and says which these are (split.cu).
void split_repeated(const Batch& batch, const int64_t* slots, const Scratch& scratch,
                    cudaStream_t stream);
// Updates rows of slots that stand at a few positions, by their chains, and says whether there are
// other rows left (chains.cu).
void update_chains(const TableView* tables, const Update& update, const Scratch& scratch,
                   const GroupShape& shape, cudaStream_t stream);
// Lists the runs of the sorted rest of a batch in its own order whose rows are not updated yet, and
// cuts long ones. hint: is told whether anything was sorted (runs.cu).
void list_runs(const Batch& batch, uint64_t no_slot, const Scratch& scratch, UpdateHint* hint,
               cudaStream_t stream);
// Updates the rows of the listed runs, but for long ones, whose pieces it adds up.
void update_runs(const TableView* tables, const Update& update, const Scratch& scratch,
                 const GroupShape& shape, cudaStream_t stream);

// Says how the next batch is to be updated, from how many positions of this one stand alone.
__device__ __forceinline__ void set_hint(UpdateHint* hint, int64_t alone, int64_t num_ids) {
  hint->batch_order = 8 * alone >= 7 * num_ids ? 1 : 0;
}

// Updates the rows of long runs, whose pieces have been added up, and says in the hint how the next
// batch is to be updated; null in batch order, where it is known before (long_runs.cu).
void update_long_runs(const TableView* tables, const Update& update, const Scratch& scratch,
                      UpdateHint* hint, cudaStream_t stream);

// Whether there is stream_runs for an optimizer and such tables.
bool streams_runs(const OptimizerConfig& optimizer, const GroupShape& shape);
// list_runs and update_runs where all positions are sorted, as a stream, for which only long runs
// are listed (stream.cu).
void list_long_runs(const Batch& batch, uint64_t no_slot, const Scratch& scratch,
                    cudaStream_t stream);
void stream_runs(const TableView* tables, const Update& update, const Scratch& scratch,
                 const GroupShape& shape, cudaStream_t stream);
// Updates the rows of all runs but long ones, whose pieces it adds up: the way of all groups and
// optimizers that have no other (segment_update.cu).
void update_segments(const TableView* tables, const Update& update, const Scratch& scratch,
                     const GroupShape& shape, cudaStream_t stream);
// stream_runs where most runs are of one position; false where it is not for such rows, which are
// then left to stream_runs (sorted_rows.cu).
bool update_sorted_rows(const TableView* tables, const Update& update, const Scratch& scratch,
                        const GroupShape& shape, cudaStream_t stream);

// Blocks of which so many are on a multiprocessor at once, but no more than there is work for.
unsigned resident_grid(int blocks_of_processor, int64_t threads);

}  // namespace torchrec_hkv::hash_table::cuda
