// The rows of long runs, whose pieces have been added up, for quick groups. All that is read for a
// row, its pieces' sums too, is on its way at once.
#include "common/chain.cuh"
#include "hash_table/cuda/offsets.cuh"
#include "hash_table/cuda/update/update.cuh"

namespace torchrec_hkv::hash_table::cuda {
namespace {

// Pieces are added up in so many shares, and those one after the other, whoever does it. So runs of
// no more pieces are added up in order, by a warp; of longer ones a warp of a block takes a share.
constexpr uint32_t kShares = kThreads / kWarp;
constexpr int kOfLane = kQuickColumns / kWarp;  // columns, a warp's lanes apart

struct Sum {
  float v[kOfLane];

  // Of pieces' sums that follow each other.
  __device__ __forceinline__ static Sum of(const LongRuns& runs, uint32_t begin, uint32_t end,
                                           int32_t dim) {
    const int32_t lane = threadIdx.x % kWarp;
    Sum sum{};
    const float* from = runs.sums + static_cast<int64_t>(begin) * runs.widest + lane;
#pragma unroll 4
    for (uint32_t p = begin; p < end; ++p, from += runs.widest) {
#pragma unroll
      for (int k = 0; k < kOfLane; ++k) {
        if (lane + k * kWarp < dim) sum.v[k] += from[k * kWarp];
      }
    }
    return sum;
  }
  __device__ __forceinline__ void store(float* to) const {
#pragma unroll
    for (int k = 0; k < kOfLane; ++k) to[threadIdx.x % kWarp + k * kWarp] = v[k];
  }
};

template <bool kColumnStates>
__global__ void __launch_bounds__(kThreads, kColumnStates ? 3 : 4)
    long_runs_kernel(const TableView* __restrict__ tables, const __grid_constant__ Update update,
                     const __grid_constant__ Scratch scratch, UpdateHint* hint) {
  __shared__ float sums[kShares][kQuickColumns];  // of a warp
  wait_for_kernel_before();
  if (hint != nullptr && blockIdx.x == 0 && threadIdx.x == 0) {
    set_hint(hint, *scratch.runs.singles, update.batch.num_ids);
    hint->longest_feature = *scratch.longest_feature;
    hint->hot_slots = *scratch.hot_slots;
  }
  if (is_refused(update.batch)) return;
  const LongRuns& runs = scratch.long_runs;
  const uint32_t warp = threadIdx.x / kWarp;
  const uint32_t number = *runs.number;
  const float rate = *update.learning_rate;
  const auto pieces_of = [](const LongRun& run) {
    return (run.length + static_cast<uint32_t>(kPieceSize) - 1) / static_cast<uint32_t>(kPieceSize);
  };
  const auto table_of_run = [&](const Pair& pair) -> const TableView& {
    const uint32_t value = scratch.pairs.pairs.value_of(pair);
    return table_of(tables, update, scratch.bags != nullptr ? scratch.bags[value] : value);
  };
  const auto load = [&](const TableView& table, int64_t slot) {
    return load_row<1, kColumnStates, kOfLane>(table, slot, update.optimizer);
  };
  const auto gradient = [&](int32_t column) { return Columns<1>::load(&sums[warp][column]); };
  for (uint32_t r = blockIdx.x; r < number; r += gridDim.x) {
    const LongRun run = runs.runs[r];
    const uint32_t pieces = pieces_of(run);
    if (pieces <= kShares) continue;
    const Pair pair = scratch.pairs.pairs.load(run.first);
    const TableView& table = table_of_run(pair);
    const int64_t slot = static_cast<int64_t>(scratch.pairs.pairs.key_of(pair)) - table.first_slot;
    RowInFlight<1, kColumnStates, kOfLane> early{};
    if (warp == 0) early = load(table, slot);
    Sum::of(runs, run.first_piece + pieces * warp / kShares,
            run.first_piece + pieces * (warp + 1) / kShares, table.dim())
        .store(sums[warp]);
    __syncthreads();
    if (warp == 0) {
      Sum sum{};
#pragma unroll
      for (uint32_t w = 0; w < kShares; ++w) {
#pragma unroll
        for (int k = 0; k < kOfLane; ++k) sum.v[k] += sums[w][threadIdx.x + k * kWarp];
      }
      sum.store(sums[0]);
      __syncwarp();
      finish_row(table, slot, early, update.optimizer, rate, gradient);
    }
    __syncthreads();
  }
  for (uint32_t r = warp * gridDim.x + blockIdx.x; r < number; r += kShares * gridDim.x) {
    const LongRun run = runs.runs[r];
    const uint32_t pieces = pieces_of(run);
    if (pieces > kShares) continue;
    const Pair pair = scratch.pairs.pairs.load(run.first);
    const TableView& table = table_of_run(pair);
    const int64_t slot = static_cast<int64_t>(scratch.pairs.pairs.key_of(pair)) - table.first_slot;
    const auto early = load(table, slot);
    Sum::of(runs, run.first_piece, run.first_piece + pieces, table.dim()).store(sums[warp]);
    __syncwarp();
    finish_row(table, slot, early, update.optimizer, rate, gradient);
    __syncwarp();
  }
}

}  // namespace

void update_long_runs(const TableView* tables, const Update& update, const Scratch& scratch,
                      UpdateHint* hint, cudaStream_t stream) {
  if (update.batch.num_ids <= kLongest) return;
  const bool column_states = has_column_states(update.optimizer);
  const auto kernel = column_states ? long_runs_kernel<true> : long_runs_kernel<false>;
  const unsigned blocks = resident_grid(column_states ? 3 : 4, update.batch.num_ids * 4);
  launch_chained(kernel, blocks, kThreads, stream, tables, update, scratch, hint);
}

}  // namespace torchrec_hkv::hash_table::cuda
