// The backward of the usual groups: dims are multiples of four and at most 128, so that one vector
// a lane is a row.
#include "common/cuda_check.h"
#include "hash_table/bag_tile.cuh"
#include "hash_table/row_updaters.cuh"
#include "hash_table/update_cuda.cuh"

namespace torchrec_hkv::hash_table::cuda {
namespace {

__global__ void __launch_bounds__(kThreads)
    plan_kernel(const TableView* tables, int32_t num_tables, UpdatePlan* plan, uint32_t positions,
                const LongRuns runs) {
  for (int32_t t = threadIdx.x; t < num_tables; t += kThreads) ++*tables[t].optimizer_step;
  if (threadIdx.x == 0) {
    plan->mode = 2 * static_cast<uint64_t>(plan->alone) >= plan->positions ? 1 : 0;
    plan->alone = 0;
    plan->positions = positions;
    *runs.number = *runs.pieces = 0;
  }
}

__global__ void __launch_bounds__(kThreads)
    mark_kernel(const int64_t* __restrict__ slots, int64_t n, const Repeats repeats,
                const UpdatePlan* plan) {
  if (plan->mode == 0) return;
  const int64_t position = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const int64_t slot = position < n ? slots[position] : kNoSlot;
  const unsigned given = __ballot_sync(kAllLanes, slot != kNoSlot);
  if (slot == kNoSlot) return;
  const uint32_t number = repeats.bit_of(slot);
  // One lane a bit, so that a hot row's lanes don't queue at one address.
  const unsigned peers = __match_any_sync(given, number);
  if (peers & ((1u << threadIdx.x % kWarp) - 1)) return;
  const uint32_t bit = 1u << (number & 31);
  if (load_l2(&repeats.twice[number >> 5]) & bit) return;
  const bool before = atomicOr(&repeats.seen[number >> 5], bit) & bit;
  if (before || (peers & (peers - 1))) atomicOr(&repeats.twice[number >> 5], bit);
}

// A tile takes neighbouring bags. Rows that stand alone get their update here, so that the bag's
// gradient is read once for all of them; the others, and positions without a row, get their sort
// keys. kAhead: rows that a tile has under way at once.
template <typename Updater, int kAhead, int kBlocks>
__global__ void __launch_bounds__(kThreads, kBlocks)
    alone_kernel(const TableView* __restrict__ tables, const __grid_constant__ Update update,
                 const int64_t* __restrict__ slots, const __grid_constant__ Scratch scratch,
                 const BagTiling tiling) {
  using Gradient = typename Updater::Gradient;
  constexpr int kLanes = Updater::kLanes;
  const Batch& batch = update.batch;
  const BagTile<kLanes> tile(batch, tiling);
  const bool in_batch_order = update.plan->mode != 0;
  int alone_count = 0;
  if (tile.feature < batch.num_features) {
    const TableView& table = tables[batch.feature_tables[tile.feature]];
    const int64_t first_slot = table.first_slot;
    const int32_t dim = table.dim();
    const Updater updater(table, update.optimizer, *update.learning_rate);
    const float bag_scale = tile.mean_scale(update.pooling.mean);
    const float* const gradients =
        update.grad.data + tile.sample * update.grad.stride + batch.feature_columns[tile.feature];
    const auto first_bag = static_cast<uint32_t>(tile.feature * batch.batch_size + tile.sample);
    for (int64_t chunk = tile.begin; chunk < tile.end; chunk += kLanes) {
      const int64_t at = chunk + tile.lane();
      const int bag = tile.bag_of(at);
      float scale = tile.of_lane(bag_scale, bag);
      int64_t slot = kNoSlot;
      bool alone = false;
      if (at < tile.end) {
        slot = slots[at];
        alone = slot != kNoSlot && in_batch_order && !scratch.repeats.repeated(slot);
        scratch.keys_in.set(
            at, slot == kNoSlot || alone ? update.no_slot : static_cast<uint64_t>(slot));
        scratch.positions_in[at] = static_cast<uint32_t>(at);
        scratch.bags[at] = first_bag + static_cast<uint32_t>(bag);
        if (update.pooling.weights != nullptr) scale *= update.pooling.weights[at];
      }
      unsigned left = tile.ballot(alone);
      alone_count += __popc(left);
      while (left) {
        Gradient gradient[kAhead];
        typename Updater::Row row[kAhead];
        int64_t its_slot[kAhead];
        float its_scale[kAhead];
        int number = 0;  // of rows
#pragma unroll
        for (int k = 0; k < kAhead; ++k) {
          if (left == 0) break;
          number = k + 1;
          const int source = __ffs(static_cast<int>(left)) - 1;
          left &= left - 1;
          its_slot[k] = tile.of_lane(slot, source) - first_slot;
          its_scale[k] = tile.of_lane(scale, source);
          row[k] = updater.load(its_slot[k]);
          gradient[k] =
              Gradient::load(gradients + tile.of_lane(bag, source) * update.grad.stride, dim);
        }
#pragma unroll
        for (int k = 0; k < kAhead; ++k) {
          if (k >= number) break;
          Gradient sum = Gradient::zero();
          sum.add(its_scale[k], gradient[k]);
          updater.finish(its_slot[k], row[k], sum);
        }
      }
    }
  }
  constexpr int kTiles = kThreads / kLanes;
  __shared__ int counts[kTiles];
  if (tile.lane() == 0) counts[threadIdx.x / kLanes] = alone_count;
  __syncthreads();
  if (threadIdx.x == 0 && in_batch_order) {
    int sum = 0;
    for (const int count : counts) sum += count;
    if (sum > 0) atomicAdd(&update.plan->alone, static_cast<uint32_t>(sum));
  }
}

// A tile takes as many neighbours of the sorted order as it has lanes, and updates the rows of the
// runs that begin among them. kAhead: positions whose gradients are under way at once, with the
// rows of the runs that end there.
template <typename Updater, int kAhead, int kBlocks>
__global__ void __launch_bounds__(kThreads, kBlocks)
    sorted_kernel(const TableView* __restrict__ tables, const __grid_constant__ Update update,
                  const __grid_constant__ Scratch scratch) {
  using Gradient = typename Updater::Gradient;
  constexpr int kLanes = Updater::kLanes;
  const Tile<kLanes> tile;
  const int64_t n = update.batch.num_ids;
  const int lane = tile.lane();
  const int64_t first = tile.number() * kLanes;
  const int64_t at = first + lane;
  const uint64_t key = at < n ? scratch.keys[at] : update.no_slot;
  uint64_t before = __shfl_up_sync(tile.mask(), key, 1, kLanes);
  if (lane == 0) before = at > 0 && at < n ? scratch.keys[at - 1] : update.no_slot;
  uint64_t after = __shfl_down_sync(tile.mask(), key, 1, kLanes);
  if (lane == kLanes - 1) after = at + 1 < n ? scratch.keys[at + 1] : update.no_slot;
  const bool given = key != update.no_slot;
  const bool begins = given && (at == 0 || key != before);
  const bool ends = given && key != after;
  const unsigned begin_lanes = tile.ballot(begins);
  const unsigned end_lanes = tile.ballot(ends);
  if (update.plan->mode == 0) {
    const int singles = __syncthreads_count(begins && ends);
    if (threadIdx.x == 0 && singles > 0) {
      atomicAdd(&update.plan->alone, static_cast<uint32_t>(singles));
    }
  }
  if (begin_lanes == 0) return;
  const int first_begin = __ffs(static_cast<int>(begin_lanes)) - 1;
  const int last_begin = kWarp - 1 - __clz(static_cast<int>(begin_lanes));
  // The last run may go on behind these positions.
  int limit = __popc(tile.ballot(given));  // those without a row come last
  int64_t tail_end = 0;
  if (tile.of_lane(given && !ends, kLanes - 1)) {
    const int64_t begin = first + last_begin;
    const uint64_t its_key = tile.of_lane(key, kLanes - 1);
    const int64_t end = end_of_run<kLanes>(scratch.keys, first + kLanes - 1, n, its_key);
    if (end - begin > kLongest) {
      note_long_run<kLanes>(scratch.long_runs, begin, end - begin);
      limit = last_begin;
    } else {
      tail_end = end;
    }
  }
  Neighbour mine{};
  if (lane >= first_begin && lane < limit) {
    mine = neighbour_at(tables, update, scratch, at, key);
    if (begins) {
      prefetch_update(tables[mine.table], mine, update);
    } else {
      prefetch_l2(update.grad.data + mine.gradient,
                  static_cast<uint32_t>(tables[mine.table].dim()) * sizeof(float));
    }
  }
  const float rate = *update.learning_rate;
  uint32_t table_index = tile.of_lane(mine.table, first_begin);
  Updater updater(tables[table_index], update.optimizer, rate);
  int32_t dim = tables[table_index].dim();
  Gradient sum = Gradient::zero();
  for (int group = first_begin; group < limit;) {
    const uint32_t its_table = tile.of_lane(mine.table, group);
    if (its_table != table_index) {
      table_index = its_table;
      updater = Updater(tables[table_index], update.optimizer, rate);
      dim = tables[table_index].dim();
    }
    // Neighbours of one table.
    const unsigned other = ~(tile.ballot(lane < limit && mine.table == table_index) >> group);
    const int take = other == 0 ? kAhead : min(kAhead, __ffs(static_cast<int>(other)) - 1);
    Gradient gradient[kAhead];
    typename Updater::Row row[kAhead];
    int64_t slot[kAhead];
#pragma unroll
    for (int k = 0; k < kAhead; ++k) {
      if (k >= take) break;
      gradient[k] = Gradient::load(update.grad.data + tile.of_lane(mine.gradient, group + k), dim);
      if (end_lanes >> (group + k) & 1) {
        slot[k] = tile.of_lane(mine.slot, group + k);
        row[k] = updater.load(slot[k]);
      }
    }
#pragma unroll
    for (int k = 0; k < kAhead; ++k) {
      if (k >= take) break;
      sum.add(tile.of_lane(mine.scale, group + k), gradient[k]);
      if (!(end_lanes >> (group + k) & 1)) continue;
      updater.finish(slot[k], row[k], sum);
      sum = Gradient::zero();
    }
    group += take;
  }
  if (tail_end == 0) return;
  // Its first positions, of the same table as the last of these, have been added.
  const int64_t slot = tile.of_lane(mine.slot, kLanes - 1);
  auto row = updater.load(slot);
  for (int64_t chunk = first + kLanes; chunk < tail_end; chunk += kLanes) {
    const int count = static_cast<int>(min(static_cast<int64_t>(kLanes), tail_end - chunk));
    Neighbour its{};
    if (lane < count) {
      its = neighbour_at(tables, update, scratch, chunk + lane, scratch.keys[chunk + lane]);
      prefetch_l2(update.grad.data + its.gradient, static_cast<uint32_t>(dim) * sizeof(float));
    }
    for (int group = 0; group < count; group += kAhead) {
      Gradient gradient[kAhead];
#pragma unroll
      for (int k = 0; k < kAhead; ++k) {
        if (group + k >= count) break;
        gradient[k] = Gradient::load(update.grad.data + tile.of_lane(its.gradient, group + k), dim);
      }
#pragma unroll
      for (int k = 0; k < kAhead; ++k) {
        if (group + k >= count) break;
        sum.add(tile.of_lane(its.scale, group + k), gradient[k]);
      }
    }
  }
  updater.finish(slot, row, sum);
}

// A warp a piece of a long run.
__global__ void __launch_bounds__(kThreads)
    quick_piece_kernel(const TableView* __restrict__ tables, const __grid_constant__ Update update,
                       const __grid_constant__ Scratch scratch) {
  using Gradient = LaneColumns<kWarp, 1>;
  constexpr int kAhead = 8;
  const Tile<kWarp> tile;
  const LongRuns& runs = scratch.long_runs;
  const int64_t warps = static_cast<int64_t>(gridDim.x) * kThreads / kWarp;
  const int64_t pieces = *runs.pieces;
  for (int64_t p = tile.number(); p < pieces; p += warps) {
    const LongRun& whole = runs.runs[runs.run_of[p]];
    const int64_t begin = (p - whole.first_piece) * kPieceSize;
    const int64_t end = min(begin + kPieceSize, static_cast<int64_t>(whole.length));
    const uint64_t key = scratch.keys[whole.first];
    const auto neighbour = [&](int64_t chunk) {
      Neighbour its{};
      if (chunk + tile.lane() < end) {
        its = neighbour_at(tables, update, scratch, whole.first + chunk + tile.lane(), key);
        prefetch_l2(update.grad.data + its.gradient,
                    static_cast<uint32_t>(tables[its.table].dim()) * sizeof(float));
      }
      return its;
    };
    Neighbour next = neighbour(begin);
    const int32_t dim = tables[tile.of_lane(next.table, 0)].dim();
    Gradient sum = Gradient::zero();
    for (int64_t chunk = begin; chunk < end; chunk += kWarp) {
      const int count = static_cast<int>(min(static_cast<int64_t>(kWarp), end - chunk));
      const Neighbour its = next;
      if (chunk + kWarp < end) next = neighbour(chunk + kWarp);
      for (int group = 0; group < count; group += kAhead) {
        Gradient gradient[kAhead];
#pragma unroll
        for (int k = 0; k < kAhead; ++k) {
          const int64_t offset = tile.of_lane(its.gradient, group + k);
          gradient[k] =
              group + k < count ? Gradient::load(update.grad.data + offset, dim) : Gradient::zero();
        }
#pragma unroll
        for (int k = 0; k < kAhead; ++k) sum.add(tile.of_lane(its.scale, group + k), gradient[k]);
      }
    }
    sum.store(runs.sums + p * runs.widest, dim);
  }
}

}  // namespace

void mark_repeats(const TableView* tables, int32_t num_tables, const Update& update,
                  const int64_t* slots, const Scratch& scratch, cudaStream_t stream) {
  const int64_t n = update.batch.num_ids;
  plan_kernel<<<1, kThreads, 0, stream>>>(tables, num_tables, update.plan, static_cast<uint32_t>(n),
                                          scratch.long_runs);
  HKV_CUDA_CHECK_LAUNCH();
  // `seen` and `twice` lie side by side.
  HKV_CUDA_CHECK(cudaMemsetAsync(scratch.repeats.seen, 0,
                                 2 * scratch.repeats.words() * sizeof(uint32_t), stream));
  mark_kernel<<<grid_for(n), kThreads, 0, stream>>>(slots, n, scratch.repeats, update.plan);
  HKV_CUDA_CHECK_LAUNCH();
}

void update_alone(const TableView* tables, const Update& update, const int64_t* slots,
                  const Scratch& scratch, const GroupShape& shape, cudaStream_t stream) {
  choose_updater(update.optimizer, shape, [&]<typename Updater>() {
    // As many rows under way as registers allow.
    const auto kernel = alone_kernel < Updater, Updater::kColumnStates ? 2 : 3, 2 > ;
    const BagTiling tiling(update.batch, Updater::kLanes);
    kernel<<<grid_for(tiling.tiles(update.batch) * Updater::kLanes), kThreads, 0, stream>>>(
        tables, update, slots, scratch, tiling);
  });
  HKV_CUDA_CHECK_LAUNCH();
}

void update_sorted(const TableView* tables, const Update& update, const Scratch& scratch,
                   const GroupShape& shape, cudaStream_t stream) {
  choose_updater(update.optimizer, shape, [&]<typename Updater>() {
    // Rows and gradients have been prefetched: many tiles do more than many rows a tile.
    const auto kernel = sorted_kernel<Updater, 1, 4>;
    kernel<<<grid_for(update.batch.num_ids), kThreads, 0, stream>>>(tables, update, scratch);
  });
  HKV_CUDA_CHECK_LAUNCH();
}

void sum_pieces(const TableView* tables, const Update& update, const Scratch& scratch,
                unsigned blocks, cudaStream_t stream) {
  quick_piece_kernel<<<blocks, kThreads, 0, stream>>>(tables, update, scratch);
  HKV_CUDA_CHECK_LAUNCH();
}

}  // namespace torchrec_hkv::hash_table::cuda
