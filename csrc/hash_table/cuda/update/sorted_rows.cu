// Updates of the rows of the sorted order where most of them stand at one position, and have more
// than 64 columns, none of which has a state, in a batch of one feature. A warp takes neighbouring
// positions and ends with them, for the memory serves tiles that read first and write last faster
// than warps that always do both, as those of the stream (stream.cu) do. Gradients, and the rows of
// the runs that end there, come to shared memory, several positions under way; each lane copies
// what it works on itself, so lanes don't wait for each other. States of neighbouring slots are
// neighbours, too: a lane reads and writes that of its position, all of a warp's at once.
#include "common/chain.cuh"
#include "common/cuda_check.h"
#include "hash_table/cuda/async_copy.cuh"
#include "hash_table/cuda/offsets.cuh"
#include "hash_table/cuda/update/dense_pieces.cuh"
#include "hash_table/cuda/update/row_updaters.cuh"
#include "hash_table/cuda/update/stream_tasks.cuh"
#include "hash_table/cuda/update/update.cuh"

namespace torchrec_hkv::hash_table::cuda {
namespace {

constexpr int kSortedThreads = 128;
constexpr int kSortedBlocks = 5;  // of a multiprocessor
constexpr int kUnderWay = 6;      // positions of a warp

// What is copied for a position: the gradient, and the row where a run ends.
template <typename Element>
struct alignas(16) SortedPosition {
  float value[kQuickColumns];
  Element gradient[kQuickColumns];
};

// Adds up the pieces of long runs, of which there are few.
template <typename Element, bool kScaled>
__device__ __forceinline__ void add_pieces(const TableView* tables, const Update& update,
                                           const Scratch& scratch, uint32_t pieces, uint32_t warp,
                                           uint32_t warps) {
  const LongRuns& runs = scratch.long_runs;
  for (uint32_t p = warp; p < pieces; p += warps) {
    const LongRun& run = runs.runs[runs.run_of[p]];
    const uint32_t from = (p - run.first_piece) * static_cast<uint32_t>(kPieceSize);
    Task task{};
    task.piece = p;
    task.at = run.first + from;
    task.end = task.at + min(run.length - from, static_cast<uint32_t>(kPieceSize));
    const uint32_t at = task.at + threadIdx.x % kWarp;
    const Pair first = at < task.end ? scratch.pairs.pairs.load_for_value(at) : Pair{};
    add_dense_piece<Element, kScaled>(tables, update, scratch, task, first);
  }
}

// kScaled: whether gradients have scales, by mean or weights.
template <typename Updater, typename Element, bool kScaled>
__global__ void __launch_bounds__(kSortedThreads, kSortedBlocks)
    sorted_rows_kernel(const TableView* __restrict__ tables, const __grid_constant__ Update update,
                       const __grid_constant__ Scratch scratch) {
  __shared__ SortedPosition<Element> places[kSortedThreads / kWarp][kUnderWay];
  SortedPosition<Element>* const ring = places[threadIdx.x / kWarp];
  const Batch& batch = update.batch;
  const int lane = threadIdx.x % kWarp;
  const int32_t column = lane * 4;
  const uint32_t warp = (blockIdx.x * kSortedThreads + threadIdx.x) / kWarp;
  const auto n = static_cast<uint32_t>(batch.num_ids);
  const Pairs& sorted = scratch.pairs.pairs;
  // What is read before the wait is not written by the kernel before this one, which may only
  // refuse a bag that is noted already.
  const uint32_t refused = batch.refused != nullptr ? load_l2(batch.refused) : 0;
  const int64_t bad_bag = *scratch.bad_bag;
  const uint32_t pieces = *scratch.long_runs.pieces;
  const float rate = *update.learning_rate;
  // The next chunk. The runs that begin in the first one are the warp's own.
  uint32_t at = warp * kWarp;
  const uint32_t tile_end = at + kWarp;
  SortedPlace place = SortedPlace::load(sorted, at + lane, n);
  if (refused != 0 || bad_bag != 0) at = n;
  const TableView& table = tables[batch.feature_tables[0]];
  const int64_t first_slot = table.first_slot;
  const int32_t dim = table.rows.width, state_width = table.states.width;
  float* const rows = reinterpret_cast<float*>(table.rows.homes) + column;
  float* const states = reinterpret_cast<float*>(table.states.homes);
  const bool has_column = column < dim;
  const Element* const gradients = reinterpret_cast<const Element*>(update.grad.data) +
                                   batch.output_of(0, 0, update.grad.stride) + column;
  const int64_t stride = batch.output_stride(0, update.grad.stride);
  const uint64_t policy = evict_last();
  RowTerms terms{};
  bool waits = true;
  Columns<4> sum = Columns<4>::zero();
  bool carried = false;  // the chunk begins in a run that the warp has begun
  while (at < n) {
    const uint64_t key = sorted.key_of(place.pair);
    const bool begins = place.before != key;
    const unsigned begin_mask = __ballot_sync(kAllLanes, begins);
    const unsigned long_mask = __ballot_sync(kAllLanes, begins && place.far == key);
    const unsigned begun = begin_mask & ((2u << lane) - 1);
    const int from = 31 - __clz(static_cast<int>(begun));  // where the position's run begins
    const bool mine = at + lane < n && key != update.no_slot &&
                      (begun == 0 ? carried : !(long_mask >> from & 1) && at + from < tile_end);
    unsigned to_begin = __ballot_sync(kAllLanes, mine), to_finish = to_begin;
    const bool ends = mine && place.after != key;
    const unsigned end_mask = __ballot_sync(kAllLanes, ends);
    carried = (to_begin >> 31) && !(end_mask >> 31);
    const auto slot = static_cast<uint32_t>(static_cast<int64_t>(key) - first_slot);
    float square = 0.0f;  // of row-wise Adagrad, the mean of squares of the lane's row
    if constexpr (Updater::kAdapts) {
      if (ends) square = states[static_cast<int64_t>(slot) * state_width];
    }
    const uint32_t value = sorted.value_of(place.pair);
    uint32_t bag = value;
    float scale = 1.0f;
    if (mine) {
      if (scratch.bags != nullptr) bag = scratch.bags[value];
      if constexpr (kScaled) scale = share_of(update, scratch.bags, value).scale;
    }
    const auto of_lane = [&](auto its, int source) { return __shfl_sync(kAllLanes, its, source); };
    // Begins to copy what the next position needs, if there is one; a group of copies in any case.
    const auto begin = [&](SortedPosition<Element>& to) {
      if (to_begin != 0) {
        const int source = __ffs(static_cast<int>(to_begin)) - 1;
        to_begin &= to_begin - 1;
        const float* const row = rows + static_cast<int64_t>(of_lane(slot, source)) * dim;
        const Element* const gradient = gradients + of_lane(bag, source) * stride;
        if (has_column) {
          if (end_mask >> source & 1) copy_async(&to.value[column], row, policy);
          copy_async<4 * sizeof(Element)>(&to.gradient[column], gradient);
        }
      }
      end_copies();
    };
#pragma unroll
    for (int k = 0; k < kUnderWay; ++k) begin(ring[k]);
    if (waits) {
      wait_for_kernel_before();  // which counts the update
      terms = begin_row(update.optimizer, rate, static_cast<float>(*table.optimizer_step));
    }
    waits = false;
    int turn = 0;
    while (to_finish != 0) {
      const int source = __ffs(static_cast<int>(to_finish)) - 1;
      to_finish &= to_finish - 1;
      wait_for_copies<kUnderWay - 1>();
      SortedPosition<Element>& arrived = ring[turn];
      turn = turn + 1 == kUnderWay ? 0 : turn + 1;
      auto stored = StoredColumns<Element>::zero();
      Columns<4> row = Columns<4>::zero();
      if (has_column) {
        stored = StoredColumns<Element>::load(&arrived.gradient[column]);
        row = Columns<4>::load(&arrived.value[column]);  // used where a run ends
      }
      begin(arrived);
      sum.add(kScaled ? of_lane(scale, source) : 1.0f, stored.widened(update.grad.type));
      if (!(end_mask >> source & 1)) continue;
      RowTerms its = terms;
      if constexpr (Updater::kAdapts) {
        const float renewed =
            adapt_row(update.optimizer, warp_sum(sum.dot(sum)), dim, of_lane(square, source), &its);
        if (lane == source) square = renewed;
      }
      float unused = 0.0f;
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        row.v[k] = move_column<Updater::kColumns>(update.optimizer, its, row.v[k], sum.v[k], unused,
                                                  unused);
      }
      float* const to = rows + static_cast<int64_t>(of_lane(slot, source)) * dim;
      if (has_column) row.store(to);
      sum = Columns<4>::zero();
    }
    if constexpr (Updater::kAdapts) {
      if (ends) states[static_cast<int64_t>(slot) * state_width] = square;
    }
    at += kWarp;
    if (!carried) break;
    place = SortedPlace::load(sorted, at + lane, n);
  }
  if (refused == 0 && bad_bag == 0) {
    add_pieces<Element, kScaled>(tables, update, scratch, pieces, warp,
                                 gridDim.x * (kSortedThreads / kWarp));
  }
  wait_for_kernel_before();  // all threads
}

}  // namespace

bool update_sorted_rows(const TableView* tables, const Update& update, const Scratch& scratch,
                        const GroupShape& shape, cudaStream_t stream) {
  if (has_column_states(update.optimizer) || shape.widest <= 4 * kWarp / 2) return false;
  if (update.batch.num_features != 1) return false;
  const auto launch = [&]<typename Updater, typename Element>() {
    const auto kernel = update.pooling.mean || update.pooling.weights != nullptr
                            ? sorted_rows_kernel<Updater, Element, true>
                            : sorted_rows_kernel<Updater, Element, false>;
    const int64_t blocks = (update.batch.num_ids + kSortedThreads - 1) / kSortedThreads;
    launch_chained(kernel, static_cast<unsigned>(blocks), kSortedThreads, stream, tables, update,
                   scratch);
  };
  return choose_plain_updater(update.optimizer, shape, [&]<typename Updater>() {
    if constexpr (!Updater::kColumnStates) {
      choose_element(update.grad.type,
                     [&]<typename Element>() { launch.template operator()<Updater, Element>(); });
    }
  });
}

}  // namespace torchrec_hkv::hash_table::cuda
