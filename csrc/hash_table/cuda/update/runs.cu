// Updates of the rows of a batch in its own order that are left when unique rows and chains are
// done: the runs of the sorted rest are listed, and tiles of lanes take one after the other. What a
// tile needs of the next run is under way while it works on one.
#include "common/chain.cuh"
#include "common/cuda_check.h"
#include "hash_table/cuda/offsets.cuh"
#include "hash_table/cuda/update/row_updaters.cuh"
#include "hash_table/cuda/update/update.cuh"

namespace torchrec_hkv::hash_table::cuda {
namespace {

constexpr int kRunBlocks = 2;   // of a multiprocessor
constexpr int kListBlocks = 2;  // of one, where others run beside

// Positions from `at` on that have its key, found by one thread.
__device__ __forceinline__ int64_t length_of_run(const Pairs& sorted, int64_t at, int64_t n,
                                                 uint64_t key) {
  int64_t low = at, step = 1;  // low is in the run
  while (low + step < n && sorted.key(low + step) == key) {
    low += step;
    step *= 2;
  }
  int64_t high = min(low + step, n);  // high is not
  while (high - low > 1) {
    const int64_t middle = low + (high - low) / 2;
    (sorted.key(middle) == key ? low : high) = middle;
  }
  return high - at;
}

__global__ void __launch_bounds__(kThreads)
    list_runs_kernel(const Batch batch, uint64_t no_slot, const __grid_constant__ Scratch scratch,
                     UpdateHint* hint) {
  constexpr int kWarps = kThreads / kWarp;
  __shared__ uint32_t places[2][kWarps];  // of singles, of longer ones
  wait_for_kernel_before();
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const int64_t n = *scratch.sorted;
  if (blockIdx.x == 0 && threadIdx.x == 0) hint->sorts_rest = n > 0;
  const Pairs& sorted = scratch.pairs.pairs;
  for (int64_t first = static_cast<int64_t>(blockIdx.x) * kThreads; first < n;
       first += static_cast<int64_t>(gridDim.x) * kThreads) {
    const int64_t at = first + threadIdx.x;
    const uint64_t key = at < n ? sorted.key(at) : no_slot;
    bool begins = key != no_slot && (at == 0 || sorted.key(at - 1) != key);
    int64_t length = begins ? length_of_run(sorted, at, n, key) : 0;
    if (begins && scratch.chains.has_updated(key, length, static_cast<uint32_t>(n))) {
      begins = false;
      length = 0;
    }
    const bool is_short = begins && length <= kLongest;
    const unsigned lists[2] = {__ballot_sync(kAllLanes, length == 1),
                               __ballot_sync(kAllLanes, is_short && length > 1)};
    if (lane < 2) places[lane][warp] = __popc(lists[lane]);
    __syncthreads();
    if (threadIdx.x < 2) {
      uint32_t* const mine = places[threadIdx.x];
      uint32_t sum = 0;
      for (int w = 0; w < kWarps; ++w) {
        const uint32_t before = sum;
        sum += mine[w];
        mine[w] = before;
      }
      uint32_t* const number = threadIdx.x == 0 ? scratch.runs.singles : scratch.runs.number;
      const uint32_t begin = sum > 0 ? atomicAdd(number, sum) : 0;
      for (int w = 0; w < kWarps; ++w) mine[w] += begin;
    }
    __syncthreads();
    const unsigned lower = (1u << lane) - 1;
    if (length == 1) {
      const uint32_t place = places[0][warp] + __popc(lists[0] & lower);
      *(scratch.runs.last - place) = static_cast<uint32_t>(at);
    } else if (is_short) {
      const uint32_t place = places[1][warp] + __popc(lists[1] & lower);
      scratch.runs.longer[place] = Part{static_cast<uint32_t>(at), static_cast<uint32_t>(length)};
    }
    for (unsigned longs = __ballot_sync(kAllLanes, begins && !is_short); longs;
         longs &= longs - 1) {
      const int source = __ffs(static_cast<int>(longs)) - 1;
      note_long_run<kWarp>(scratch.long_runs, __shfl_sync(kAllLanes, at, source),
                           __shfl_sync(kAllLanes, length, source));
    }
    __syncthreads();  // the next turn writes there
  }
}

// kAhead: positions whose gradients are under way at once, beside the row.
template <typename Updater, typename Element, int kAhead>
__global__ void __launch_bounds__(kThreads, kRunBlocks)
    run_kernel(const TableView* __restrict__ tables, const __grid_constant__ Update update,
               const __grid_constant__ Scratch scratch) {
  using Gradient = typename Updater::Gradient;
  constexpr uint32_t kLanes = Updater::kLanes;
  const Tile<kLanes> tile;
  const uint32_t lane = tile.lane();
  wait_for_kernel_before();
  if (is_refused(update.batch)) return;
  const LongRuns& long_runs = scratch.long_runs;
  // Pieces come first, as they take longest.
  const uint32_t pieces = *long_runs.pieces;
  const uint32_t longer = pieces + *scratch.runs.number;
  const uint32_t parts = longer + *scratch.runs.singles;
  const uint32_t stride = gridDim.x * (kThreads / kLanes);
  const auto part_at = [&](uint32_t i) {
    if (i >= parts) return Part{0, 0};
    if (i >= longer) return Part{*(scratch.runs.last - (i - longer)), 1};
    if (i >= pieces) return scratch.runs.longer[i - pieces];
    const LongRun& run = long_runs.runs[long_runs.run_of[i]];
    const uint32_t begin = (i - run.first_piece) * static_cast<uint32_t>(kPieceSize);
    return Part{run.first + begin, min(run.length - begin, static_cast<uint32_t>(kPieceSize))};
  };
  const Pairs& sorted = scratch.pairs.pairs;
  // Pairs stay as they are stored until they are used, since taking them apart would wait for them.
  const auto first_pair_at = [&](const Part& part) {
    return lane < part.length ? sorted.load(part.first + lane) : Pair{};
  };
  const auto key_at = [&](const Pair& stored) {  // of the part: its first position's
    return sorted.key_of(Pair{tile.of_lane(stored.key, 0), 0});
  };
  const auto share_at = [&](const Part& part, uint32_t begin, const Pair& stored) {
    if (begin + lane >= part.length) return Share{};
    return share_of(update, scratch.bags, sorted.value_of(stored));
  };
  auto i = static_cast<uint32_t>(tile.number());
  if (i >= parts) return;
  Part part = part_at(i);
  Part next = part_at(i + stride);
  const Pair first_pair = first_pair_at(part);
  uint64_t key = key_at(first_pair);
  Share share = share_at(part, 0, first_pair);
  const float rate = *update.learning_rate;
  uint32_t table = tile.of_lane(share.table, 0);
  Updater updater(tables[table], update.optimizer, rate);
  int32_t dim = tables[table].dim();
  int64_t first_slot = tables[table].first_slot;
  for (;;) {
    const Part after = part_at(i + 2 * stride);
    const Pair next_pair = first_pair_at(next);
    const bool whole = i >= pieces;
    const int64_t slot = static_cast<int64_t>(key) - first_slot;
    typename Updater::Row row;
    if (whole) row = updater.load(slot);
    Gradient sum = Gradient::zero();
    for (uint32_t begin = 0; begin < part.length; begin += kLanes) {
      if (begin > 0) {
        const bool given = begin + lane < part.length;
        const int64_t at = part.first + begin + lane;
        share = share_at(part, begin, given ? sorted.load_for_value(at) : Pair{});
      }
      const uint32_t count = min(kLanes, part.length - begin);
      for (uint32_t group = 0; group < count; group += kAhead) {
        typename Gradient::template Stored<Element> gradient[kAhead];
#pragma unroll
        for (uint32_t k = 0; k < kAhead; ++k) {
          if (group + k >= count) break;
          gradient[k] = Gradient::template Stored<Element>::load(
              update.grad, tile.of_lane(share.gradient, group + k), dim);
        }
#pragma unroll
        for (uint32_t k = 0; k < kAhead; ++k) {
          if (group + k >= count) break;
          sum.template add<Element>(tile.of_lane(share.scale, group + k), gradient[k],
                                    update.grad.type);
        }
      }
    }
    if (whole) {
      updater.finish(slot, row, sum);
    } else {
      sum.store(long_runs.sums + static_cast<int64_t>(i) * long_runs.widest, dim);
    }
    i += stride;
    if (i >= parts) return;
    part = next;
    next = after;
    key = key_at(next_pair);
    share = share_at(part, 0, next_pair);
    const uint32_t its_table = tile.of_lane(share.table, 0);
    if (its_table != table) {
      table = its_table;
      updater = Updater(tables[table], update.optimizer, rate);
      dim = tables[table].dim();
      first_slot = tables[table].first_slot;
    }
  }
}

}  // namespace

void list_runs(const Batch& batch, uint64_t no_slot, const Scratch& scratch, UpdateHint* hint,
               cudaStream_t stream) {
  // The number of positions is not known here; no more blocks than may be resident: they run beside
  // others.
  const unsigned blocks = resident_grid(kListBlocks, batch.num_ids);
  launch_chained(list_runs_kernel, blocks, kThreads, stream, batch, no_slot, scratch, hint);
}

void update_runs(const TableView* tables, const Update& update, const Scratch& scratch,
                 const GroupShape& shape, cudaStream_t stream) {
  const int64_t n = update.batch.num_ids;
  const auto launch = [&]<typename Updater, typename Element>() {
    // As many rows, or gradients, under way as registers allow.
    const auto kernel = run_kernel < Updater, Element, Updater::kColumnStates ? 4 : 8 > ;
    launch_chained(kernel, resident_grid(kRunBlocks, n / 2 * Updater::kLanes), kThreads, stream,
                   tables, update, scratch);
  };
  choose_plain_updater(update.optimizer, shape, [&]<typename Updater>() {
    choose_element(update.grad.type,
                   [&]<typename Element>() { launch.template operator()<Updater, Element>(); });
  });
}

}  // namespace torchrec_hkv::hash_table::cuda
