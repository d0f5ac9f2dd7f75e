// Rows that stand at one position of the batch, updated in the order of the batch. Marks of slots
// tell which; what split.cu makes of them is a bit a position.
#include "common/cuda_check.h"
#include "hash_table/cuda/pool/bag_tile.cuh"
#include "hash_table/cuda/update/row_updaters.cuh"
#include "hash_table/cuda/update/update.cuh"

namespace torchrec_hkv::hash_table::cuda {
namespace {

// Threads of a multiprocessor, which bound the registers of each.
constexpr int kAloneThreads = 512;
// Threads of a block. Where rows are brought near, blocks end at different times: a small one makes
// room for the next without waiting for others.
__host__ __device__ constexpr int block_of(bool prefetch) { return prefetch ? 64 : kThreads; }

// Adam's rows are read as what leaves the second-level cache last: the memory serves such reads and
// the writes that follow 3 % faster. Of more than 64 columns they take a warp each, which has three
// of them under way without spilled registers.
template <typename Updater>
struct OfAlone {
  using Type = Updater;
};
template <>
struct OfAlone<PlainUpdater<Optimizer::kAdam, 1>> {
  using Type = PlainUpdater<Optimizer::kAdam, 1, kWarp / 2, true>;
};
template <>
struct OfAlone<PlainUpdater<Optimizer::kAdam, 2>> {
  using Type = PlainUpdater<Optimizer::kAdam, 1, kWarp, true>;
};

// A tile takes neighbouring bags, so that a bag's gradient is read once for all of its rows.
// kAhead: rows that a tile has under way at once.
template <typename Updater, typename Element, int kAhead, bool kPrefetch>
__global__ void __launch_bounds__(block_of(kPrefetch), kAloneThreads / block_of(kPrefetch))
    alone_kernel(const TableView* __restrict__ tables, const __grid_constant__ Update update,
                 const int64_t* __restrict__ slots, const __grid_constant__ Scratch scratch,
                 const BagTiling tiling) {
  using Gradient = typename Updater::Gradient;
  constexpr int kLanes = Updater::kLanes;
  const Batch& batch = update.batch;
  constexpr int kBlock = block_of(kPrefetch);
  const BagTile<kLanes> tile(batch, tiling,
                             (static_cast<int64_t>(blockIdx.x) * kBlock + threadIdx.x) / kLanes);
  if (tile.feature < batch.num_features && !is_refused(batch)) {
    const TableView& table = tables[batch.feature_tables[tile.feature]];
    const int64_t first_slot = table.first_slot;
    const int32_t dim = table.dim();
    const Updater updater(table, update.optimizer, *update.learning_rate);
    const float bag_scale = tile.mean_scale(update.pooling.mean);
    const int64_t gradients = batch.output_of(tile.feature, tile.sample, update.grad.stride);
    const int64_t stride = batch.output_stride(tile.feature, update.grad.stride);
    for (int64_t chunk = tile.begin; chunk < tile.end; chunk += kLanes) {
      const int64_t at = chunk + tile.lane();
      const int bag = tile.bag_of(at);
      float scale = tile.of_lane(bag_scale, bag);
      int64_t slot = kNoSlot;
      bool alone = false;
      if (at < tile.end) {
        slot = slots[at];
        alone = table.has(slot) && !scratch.is_repeated(at);
        if (update.pooling.weights != nullptr) scale *= update.pooling.weights[at];
      }
      if (kPrefetch && alone) prefetch_row(table, slot - first_slot);
      unsigned left = tile.ballot(alone);
      while (left) {
        typename Gradient::template Stored<Element> gradient[kAhead];
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
          gradient[k] = Gradient::template Stored<Element>::load(
              update.grad, gradients + tile.of_lane(bag, source) * stride, dim);
        }
#pragma unroll
        for (int k = 0; k < kAhead; ++k) {
          if (k >= number) break;
          Gradient sum = Gradient::zero();
          sum.template add<Element>(its_scale[k], gradient[k], update.grad.type);
          updater.finish(its_slot[k], row[k], sum);
        }
      }
    }
  }
}

}  // namespace

void update_alone(const TableView* tables, const Update& update, const int64_t* slots,
                  const Scratch& scratch, const GroupShape& shape, cudaStream_t stream) {
  if (update_narrow_alone(tables, update, slots, scratch, shape, stream)) return;
  if (update_shared_alone(tables, update, slots, scratch, shape, stream)) return;
  const auto launch = [&]<typename Plain, typename Element>() {
    using Updater = typename OfAlone<Plain>::Type;
    // As many rows under way as registers allow. Where the gradients of bags serve several rows and
    // states are small, there is bandwidth left to bring rows nearer.
    constexpr bool kOneVector = sizeof(typename Updater::Gradient) == sizeof(Columns<4>);
    constexpr int kAhead = (Updater::kColumnStates ? 2 : 3) + (kOneVector ? 1 : 0);
    const Batch& batch = update.batch;
    const bool prefetch = !Updater::kColumnStates && batch.num_ids >= 2 * batch.num_bags;
    const auto kernel = prefetch ? alone_kernel<Updater, Element, kAhead, !Updater::kColumnStates>
                                 : alone_kernel<Updater, Element, kAhead, false>;
    const BagTiling tiling(update.batch, Updater::kLanes);
    const int block = block_of(prefetch);
    const int64_t threads = tiling.tiles(batch) * Updater::kLanes;
    const auto blocks = static_cast<unsigned>((threads + block - 1) / block);
    kernel<<<blocks, block, 0, stream>>>(tables, update, slots, scratch, tiling);
    HKV_CUDA_CHECK_LAUNCH();
  };
  const auto choose = [&]<typename Updater>() {
    choose_element(update.grad.type,
                   [&]<typename Element>() { launch.template operator()<Updater, Element>(); });
  };
  if (shape.widest <= 4 * kWarp / 2) {
    choose_plain_updater<1>(update.optimizer, shape, choose);
  } else {
    choose_plain_updater<2>(update.optimizer, shape, choose);
  }
}

}  // namespace torchrec_hkv::hash_table::cuda
