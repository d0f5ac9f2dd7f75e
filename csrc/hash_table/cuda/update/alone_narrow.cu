// Rows of at most 64 columns that stand at one position of the batch, updated by plain updaters.
// Of such rows a lane holds little, and what it waits for is the memory: they come to shared memory
// with their states and gradients, several rows of a tile under way, as in pool_tiles.cu. So they
// take no registers, twice as many tiles are there as would find registers otherwise, and the next
// row is on its way while one is worked on. Each lane copies what it works on itself, so lanes
// don't wait for each other.
#include "common/cuda_check.h"
#include "hash_table/cuda/async_copy.cuh"
#include "hash_table/cuda/pool/bag_tile.cuh"
#include "hash_table/cuda/update/row_updaters.cuh"
#include "hash_table/cuda/update/update.cuh"

namespace torchrec_hkv::hash_table::cuda {
namespace {

constexpr int kNarrowThreads = 128;

// What the update of a row reads, as the tile's lanes have it.
template <typename Updater, typename Element>
struct alignas(16) NarrowRow {
  static constexpr int kColumns = Updater::kLanes * 4;
  float value[kColumns];
  float states[Updater::kStates > 0 ? Updater::kStates : 1][Updater::kStates > 0 ? kColumns : 4];
  Element gradient[kColumns];
  float once[4];  // the first: what the state has once a row
};

constexpr int kNarrowBlocks = 6;  // of a multiprocessor, which bound registers
// Rows of a tile under way, some 3 KiB: more take L1 from all else.
constexpr int rows_under_way(int states) { return states == 0 ? 6 : states == 1 ? 4 : 3; }

// ids_of_bag: what bags are expected to have; where they don't, first positions are looked up
// again.
template <typename Updater, typename Element>
__global__ void __launch_bounds__(kNarrowThreads, kNarrowBlocks)
    narrow_kernel(const TableView* __restrict__ tables, const __grid_constant__ Update update,
                  const int64_t* __restrict__ slots, const __grid_constant__ Scratch scratch,
                  const BagTiling tiling, uint32_t ids_of_bag) {
  using Gradient = typename Updater::Gradient;
  using Place = NarrowRow<Updater, Element>;
  constexpr int kLanes = Updater::kLanes;
  constexpr int kUnderWay = rows_under_way(Updater::kStates);
  __shared__ Place places[kNarrowThreads / kLanes][kUnderWay];
  Place* const ring = places[threadIdx.x / kLanes];
  const Batch& batch = update.batch;
  const int64_t number = (static_cast<int64_t>(blockIdx.x) * kNarrowThreads + threadIdx.x) / kLanes;
  AlonePosition ahead;  // the lane's next one
  const auto look = [&](int64_t at) { ahead.look(batch, slots, scratch, at); };
  // All that says what the tile has to do is on its way at once.
  const BagRange range = tiling.range_of(batch, number);
  if (range.bags > 0) look(range.first * ids_of_bag + Tile<kLanes>::lane());
  const uint32_t refused = batch.refused != nullptr ? load_l2(batch.refused) : 0;
  const float rate = *update.learning_rate;
  const BagTile<kLanes> tile(batch, tiling, number);
  if (tile.feature < batch.num_features && refused == 0) {
    const TableView& table = tables[batch.feature_tables[tile.feature]];
    const int64_t first_slot = table.first_slot;
    const int lane = tile.lane();
    const int32_t column = lane * 4;
    Updater updater(table, update.optimizer);
    const int32_t dim = updater.dim, state_width = updater.state_width;
    // Adam's rows and moments leave the second-level cache last: see alone.cu.
    constexpr bool kStay = Updater::kStates >= 2;
    const uint64_t policy = kStay ? evict_last() : 0;
    const auto copy_columns = [&](float* to, const float* from) {
      if constexpr (kStay) {
        copy_async(to, from, policy);
      } else {
        copy_async<16>(to, from);
      }
    };
    const bool mine = column < dim;
    bool begun = false;
    const float bag_scale = tile.mean_scale(update.pooling.mean);
    const int64_t stride = batch.output_stride(tile.feature, update.grad.stride);
    const Element* const gradients =
        reinterpret_cast<const Element*>(update.grad.data) +
        batch.output_of(tile.feature, tile.sample, update.grad.stride) + column;
    for (int64_t chunk = tile.begin; chunk < tile.end; chunk += kLanes) {
      const int64_t at = chunk + lane;
      const int bag = tile.bag_of(at);
      float scale = tile.of_lane(bag_scale, bag);
      int64_t slot = kNoSlot;
      bool alone = false;
      if (at < tile.end) {
        if (at != ahead.at) look(at);
        slot = ahead.slot;
        alone = ahead.is_of(table);
        if (update.pooling.weights != nullptr) scale *= update.pooling.weights[at];
      }
      slot -= first_slot;
      if (chunk + kLanes < tile.end) look(at + kLanes);
      unsigned to_begin = tile.ballot(alone), to_finish = to_begin;
      // Begins to copy the next row, if there is one; a group of copies in any case.
      const auto begin = [&](Place& to) {
        if (to_begin != 0) {
          const int source = __ffs(static_cast<int>(to_begin)) - 1;
          to_begin &= to_begin - 1;
          const int64_t its = tile.of_lane(slot, source);
          const Element* const gradient = gradients + tile.of_lane(bag, source) * stride;
          const float* const state = updater.states + its * state_width;
          if (mine) {
            copy_columns(&to.value[column], updater.rows + its * dim + column);
            copy_async<4 * sizeof(Element)>(&to.gradient[column], gradient);
#pragma unroll
            for (int s = 0; s < Updater::kStates; ++s) {
              copy_columns(&to.states[s][column], state + s * dim + column);
            }
          }
          if constexpr (Updater::kAdapts) {
            if (lane == 0) copy_async<4>(&to.once[0], state + Updater::kStates * dim);
          }
        }
        end_copies();
      };
#pragma unroll
      for (int k = 0; k < kUnderWay; ++k) begin(ring[k]);
      if (!begun) {  // while the first rows are on their way
        updater.set_terms(rate);
        begun = true;
      }
      int place = 0;
      while (to_finish != 0) {
        const int source = __ffs(static_cast<int>(to_finish)) - 1;
        to_finish &= to_finish - 1;
        wait_for_copies<kUnderWay - 1>();
        Place& from = ring[place];
        place = place + 1 == kUnderWay ? 0 : place + 1;
        const int64_t its = tile.of_lane(slot, source);
        typename Updater::Row row;
        row.values = updater.rows + its * dim;
        row.state = updater.states + its * state_width;
        Gradient sum = Gradient::zero();
        auto stored = StoredColumns<Element>::zero();
        row.value = row.first = row.second = Gradient::zero();
        if (mine) {
          row.value.v[0] = Columns<4>::load(&from.value[column]);
          if constexpr (Updater::kStates >= 1) {
            row.first.v[0] = Columns<4>::load(&from.states[0][column]);
          }
          if constexpr (Updater::kStates >= 2) {
            row.second.v[0] = Columns<4>::load(&from.states[1][column]);
          }
          stored = StoredColumns<Element>::load(&from.gradient[column]);
        }
        if constexpr (Updater::kAdapts) {
          row.old_square = tile.of_lane(lane == 0 ? from.once[0] : 0.0f, 0);  // who copied it
        }
        begin(from);
        sum.v[0].add(tile.of_lane(scale, source), stored.widened(update.grad.type));
        updater.finish(its, row, sum);
      }
    }
  }
}

}  // namespace

bool update_narrow_alone(const TableView* tables, const Update& update, const int64_t* slots,
                         const Scratch& scratch, const GroupShape& shape, cudaStream_t stream) {
  const Batch& batch = update.batch;
  if (shape.widest > 4 * kWarp / 2 || !shape.rows_in_hbm) return false;
  if (batch.num_ids >= 2 * batch.num_bags) return false;  // the rows of a bag share a gradient
  const auto launch = [&]<typename Updater, typename Element>() {
    const auto kernel = narrow_kernel<Updater, Element>;
    const BagTiling tiling(batch, Updater::kLanes);
    const int64_t threads = tiling.tiles(batch) * Updater::kLanes;
    const auto blocks = static_cast<unsigned>((threads + kNarrowThreads - 1) / kNarrowThreads);
    const auto ids_of_bag = static_cast<uint32_t>(batch.num_ids / batch.num_bags);
    kernel<<<blocks, kNarrowThreads, 0, stream>>>(tables, update, slots, scratch, tiling,
                                                  ids_of_bag);
    HKV_CUDA_CHECK_LAUNCH();
  };
  return choose_plain_updater<1>(update.optimizer, shape, [&]<typename Updater>() {
    choose_element(update.grad.type,
                   [&]<typename Element>() { launch.template operator()<Updater, Element>(); });
  });
}

}  // namespace torchrec_hkv::hash_table::cuda
