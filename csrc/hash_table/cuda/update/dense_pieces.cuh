// Pieces of dense runs, those of ids that stand several times in most bags of a feature, as one hot
// id may. In the sorted order a bag's positions follow each other. Its gradient is read once for
// all of them, and added as often as it stands there, so that sums are those of other pieces, bit
// for bit. So other pieces may go this way, too, as the few of sorted_rows.cu do.
#pragma once

#include <cstdint>

#include "hash_table/cuda/update/stream_tasks.cuh"
#include "hash_table/cuda/update/update.cuh"

namespace torchrec_hkv::hash_table::cuda {

// All lanes of a warp. first: the pair of the lane's position among the piece's first ones. Rows
// have at most kQuickColumns columns, in multiples of four.
template <typename Element, bool kScaled>
__device__ __forceinline__ void add_dense_piece(const TableView* tables, const Update& update,
                                                const Scratch& scratch, const Task& piece,
                                                Pair first) {
  constexpr int kAhead =
      6;  // gradients under way at once; more would take registers from the stream
  const Pairs& sorted = scratch.pairs.pairs;
  const int lane = threadIdx.x % kWarp;
  const int32_t column = lane * 4;
  const Element* const gradients = reinterpret_cast<const Element*>(update.grad.data) + column;
  int32_t dim = 0;
  Pair pair = first;
  Columns<4> sum = Columns<4>::zero();
  for (uint32_t at = piece.at; at < piece.end; at += kWarp) {
    const int count = static_cast<int>(min(static_cast<uint32_t>(kWarp), piece.end - at));
    const bool mine = lane < count;
    const Share share = mine ? share_of(update, scratch.bags, sorted.value_of(pair)) : Share{};
    const uint32_t next = at + kWarp + lane;  // on its way meanwhile
    if (next < piece.end) pair = sorted.load_for_value(next);
    if (at == piece.at) dim = tables[__shfl_sync(kAllLanes, share.table, 0)].rows.width;
    const int64_t before = __shfl_up_sync(kAllLanes, share.gradient, 1);
    // Where a bag's positions begin.
    unsigned begins = __ballot_sync(kAllLanes, mine && (lane == 0 || before != share.gradient));
    while (begins) {
      StoredColumns<Element> gradient[kAhead];
      int from[kAhead + 1];
#pragma unroll
      for (int k = 0; k < kAhead; ++k) {
        from[k] = begins ? __ffs(static_cast<int>(begins)) - 1 : count;
        begins &= begins - 1;
        const int64_t its = __shfl_sync(kAllLanes, share.gradient, from[k] % kWarp);
        gradient[k] = StoredColumns<Element>::zero();
        if (from[k] < count && column < dim) {
          gradient[k] = StoredColumns<Element>::load(gradients + its);
        }
      }
      from[kAhead] = begins ? __ffs(static_cast<int>(begins)) - 1 : count;
#pragma unroll
      for (int k = 0; k < kAhead; ++k) {
        const Columns<4> its = gradient[k].widened(update.grad.type);
#pragma unroll 1
        for (int i = from[k]; i < from[k + 1]; ++i) {
          sum.add(kScaled ? __shfl_sync(kAllLanes, share.scale, i) : 1.0f, its);
        }
      }
    }
  }
  if (column < dim) {
    const LongRuns& runs = scratch.long_runs;
    sum.store(runs.sums + static_cast<int64_t>(piece.piece) * runs.widest + column);
  }
}

}  // namespace torchrec_hkv::hash_table::cuda
