// Rows that stand at one position of the batch, where the rows of a bag share its gradient, updated
// by row-wise Adagrad. Rows and states come to shared memory, several rows of a tile under way, and
// take no registers meanwhile; gradients come to registers, once a bag. Each lane copies what it
// works on itself, so lanes don't wait for each other.
//
// A state is four bytes at a random place, and costs the memory as much as a good part of its row.
// But the states of a table lie close together, and its positions follow each other in the batch.
// So states leave the second-level cache after rows do, and where lines of 128 bytes serve several
// positions, whole ones come.
#include "common/cuda_check.h"
#include "hash_table/cuda/async_copy.cuh"
#include "hash_table/cuda/pool/bag_tile.cuh"
#include "hash_table/cuda/update/row_updaters.cuh"
#include "hash_table/cuda/update/update.cuh"

namespace torchrec_hkv::hash_table::cuda {
namespace {

// Small blocks make room for the next without waiting for others.
constexpr int kSharedThreads = 64;
constexpr int kSharedBlocks = 10;     // of a multiprocessor, which bound registers
constexpr int kRowsUnderWay = 6;      // of a tile
constexpr int kPositionsOfTile = 32;  // about

// What the update of a row reads, as the tile's lanes have it.
template <typename Updater>
struct alignas(16) SharedRow {
  float value[Updater::kLanes * Updater::kVectors * 4];
  float state[4];  // the first
};

// ids_of_bag: what bags are expected to have; where they don't, first positions are looked up
// again. by_lines: whole lines of states are read.
template <typename Updater, typename Element>
__global__ void __launch_bounds__(kSharedThreads, kSharedBlocks)
    shared_kernel(const TableView* __restrict__ tables, const __grid_constant__ Update update,
                  const int64_t* __restrict__ slots, const __grid_constant__ Scratch scratch,
                  const BagTiling tiling, uint32_t ids_of_bag, bool by_lines) {
  using Gradient = typename Updater::Gradient;
  using Stored = typename Gradient::template Stored<Element>;
  constexpr int kLanes = Updater::kLanes;
  __shared__ SharedRow<Updater> places[kSharedThreads / kLanes][kRowsUnderWay];
  SharedRow<Updater>* const ring = places[threadIdx.x / kLanes];
  const Batch& batch = update.batch;
  const int64_t number = (static_cast<int64_t>(blockIdx.x) * kSharedThreads + threadIdx.x) / kLanes;
  AlonePosition position;  // the lane's
  const auto look = [&](int64_t at) { position.look(batch, slots, scratch, at); };
  // All that says what the tile has to do is on its way at once.
  const BagRange range = tiling.range_of(batch, number);
  if (range.bags > 0) look(range.first * ids_of_bag + Tile<kLanes>::lane());
  const uint32_t refused = batch.refused != nullptr ? load_l2(batch.refused) : 0;
  const float rate = *update.learning_rate;
  const BagTile<kLanes> tile(batch, tiling, number);
  if (tile.feature < batch.num_features && refused == 0) {
    const TableView& table = tables[batch.feature_tables[tile.feature]];
    const int lane = tile.lane();
    Updater updater(table, update.optimizer);
    const int32_t dim = updater.dim, state_width = updater.state_width;
    const uint64_t policy = evict_last();
    const bool weighted = update.pooling.weights != nullptr;
    const float bag_scale = tile.mean_scale(update.pooling.mean);
    const int64_t gradients = batch.output_of(tile.feature, tile.sample, update.grad.stride);
    const int64_t stride = batch.output_stride(tile.feature, update.grad.stride);
    // The gradient that rows are being updated by, and the one after it on its way.
    int summed_bag = -1;
    Gradient sum = Gradient::zero();
    float squares = 0.0f;
    Stored next;
    bool begun = false;
    // Counted from the tile's first position, to take few registers.
    const auto count = static_cast<uint32_t>(tile.end - tile.begin);
    const auto bag_end = static_cast<uint32_t>(tile.ends - tile.begin);
    for (uint32_t chunk = 0; chunk < count; chunk += kLanes) {
      const uint32_t mine = chunk + lane;
      int bag = 0;
      for (int b = 0; b < tile.bags - 1; ++b) bag += mine >= tile.of_lane(bag_end, b) ? 1 : 0;
      float scale = tile.of_lane(bag_scale, bag);
      bool alone = false;
      if (mine < count) {
        const int64_t at = tile.begin + mine;
        if (chunk != 0 || at != position.at) look(at);
        alone = position.is_of(table);
        if (weighted) scale *= update.pooling.weights[at];
      }
      const auto slot = static_cast<uint32_t>(position.slot - table.first_slot);
      unsigned to_begin = tile.ballot(alone), to_finish = to_begin;
      // Begins to copy the next row, if there is one; a group of copies in any case.
      const auto begin = [&](SharedRow<Updater>& to) {
        if (to_begin != 0) {
          const int source = __ffs(static_cast<int>(to_begin)) - 1;
          to_begin &= to_begin - 1;
          const uint64_t its = tile.of_lane(slot, source);
          const float* const from = updater.rows + its * dim;
#pragma unroll
          for (int i = 0; i < Updater::kVectors; ++i) {
            const int32_t column = Gradient::column(i);
            if (column < dim) copy_async<16>(&to.value[column], from + column);
          }
          if (lane == 0) {
            const float* const state = updater.states + its * state_width;
            if (by_lines) {
              copy_async_of_line<4>(to.state, state, policy);
            } else {
              copy_async_cached<4>(to.state, state, policy);
            }
          }
        }
        end_copies();
      };
#pragma unroll
      for (int k = 0; k < kRowsUnderWay; ++k) begin(ring[k]);
      // Begins to read the gradient of the first of the positions that has another. With weights
      // each has: most find it in L1.
      const auto read_next = [&] {
        const unsigned others = tile.ballot(weighted || bag != summed_bag) & to_finish;
        if (others == 0) return;
        const int source = __ffs(static_cast<int>(others)) - 1;
        next = Stored::load(update.grad, gradients + tile.of_lane(bag, source) * stride, dim,
                            !weighted);
      };
      read_next();
      if (!begun) {  // while the first rows are on their way
        updater.set_terms(rate);
        begun = true;
      }
      int place = 0;
      while (to_finish != 0) {
        const int source = __ffs(static_cast<int>(to_finish)) - 1;
        to_finish &= to_finish - 1;
        wait_for_copies<kRowsUnderWay - 1>();
        SharedRow<Updater>& from = ring[place];
        place = place + 1 == kRowsUnderWay ? 0 : place + 1;
        const uint64_t its = tile.of_lane(slot, source);
        typename Updater::Row row;
        row.values = updater.rows + its * dim;
        row.state = updater.states + its * state_width;
        row.value = Gradient::zero();
#pragma unroll
        for (int i = 0; i < Updater::kVectors; ++i) {
          const int32_t column = Gradient::column(i);
          if (column < dim) row.value.v[i] = Columns<4>::load(&from.value[column]);
        }
        row.old_square = tile.of_lane(lane == 0 ? from.state[0] : 0.0f, 0);  // who copied it
        begin(from);
        const int its_bag = tile.of_lane(bag, source);
        if (weighted || its_bag != summed_bag) {
          summed_bag = its_bag;
          sum = Gradient::zero();
          sum.template add<Element>(tile.of_lane(scale, source), next, update.grad.type);
          squares = Updater::squares_of(sum);
          read_next();
        }
        updater.finish(row, sum, squares);
      }
    }
  }
}

}  // namespace

bool update_shared_alone(const TableView* tables, const Update& update, const int64_t* slots,
                         const Scratch& scratch, const GroupShape& shape, cudaStream_t stream) {
  const Batch& batch = update.batch;
  if (update.optimizer.kind != Optimizer::kRowWiseAdagrad) return false;
  if (!is_plain(update.optimizer, shape) || !shape.rows_in_hbm) return false;
  if (shape.most_slots >= int64_t{1} << 32) return false;
  if (batch.num_ids < 2 * batch.num_bags) return false;  // rows have gradients of their own
  const bool narrow = shape.widest <= 4 * kWarp / 2;
  // With weights a gradient is read and summed for each row, which wide rows wait for.
  if (!narrow && update.pooling.weights != nullptr) return false;
  // Where a line's states serve one position of a feature or more.
  constexpr int64_t kOfLine = 128 / sizeof(float);
  const bool by_lines = batch.num_ids * kOfLine >= shape.most_slots * batch.num_features;
  const auto launch = [&]<int kVectors, typename Element>() {
    using Updater = PlainUpdater<Optimizer::kRowWiseAdagrad, kVectors>;
    const auto kernel = shared_kernel<Updater, Element>;
    const BagTiling tiling(batch, kPositionsOfTile, std::min(kMostBags, Updater::kLanes));
    const int64_t threads = tiling.tiles(batch) * Updater::kLanes;
    const auto blocks = static_cast<unsigned>((threads + kSharedThreads - 1) / kSharedThreads);
    const auto ids_of_bag = static_cast<uint32_t>(batch.num_ids / batch.num_bags);
    kernel<<<blocks, kSharedThreads, 0, stream>>>(tables, update, slots, scratch, tiling,
                                                  ids_of_bag, by_lines);
    HKV_CUDA_CHECK_LAUNCH();
  };
  choose_element(update.grad.type, [&]<typename Element>() {
    if (narrow) {
      launch.template operator()<1, Element>();
    } else {
      launch.template operator()<2, Element>();
    }
  });
  return true;
}

}  // namespace torchrec_hkv::hash_table::cuda
