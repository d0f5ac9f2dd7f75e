// Rows that stand at one position of the batch, updated in the order of the batch. Marks of slots
// tell which; what split.cu makes of them is a bit a position.
#include "common/cuda_check.h"
#include "hash_table/cuda/pool/bag_tile.cuh"
#include "hash_table/cuda/update/row_updaters.cuh"
#include "hash_table/cuda/update/update.cuh"

namespace torchrec_hkv::hash_table::cuda {
namespace {

__global__ void __launch_bounds__(kThreads)
    mark_kernel(const Batch batch, const int64_t* __restrict__ slots, const Repeats repeats,
                int64_t* __restrict__ bad_bag) {
  note_bad_bag(batch, bad_bag);  // the first kernel of an update to read offsets
  const int64_t n = batch.num_ids;
  const int64_t position = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const int64_t slot = position < n ? slots[position] : kNoSlot;
  const unsigned given = __ballot_sync(kAllLanes, slot != kNoSlot);
  if (slot == kNoSlot) return;
  const uint32_t mark = repeats.mark_of(slot);
  // One lane a mark, so that a hot row's lanes don't queue at one address.
  const unsigned peers = __match_any_sync(given, mark);
  if (peers & ((1u << threadIdx.x % kWarp) - 1)) return;
  uint32_t* const word = &repeats.marks[mark / Repeats::kOfWord];
  const uint32_t shift = mark % Repeats::kOfWord * 2;
  const uint32_t seen = Repeats::kSeen << shift, twice = Repeats::kTwice << shift;
  // A hot one, which has had both bits for long, is met several times in a warp.
  const bool several = peers & (peers - 1);
  if (several && (load_l2(word) & twice)) return;
  const uint32_t before = atomicOr(word, several ? seen | twice : seen);
  if (!several && (before & (seen | twice)) == seen) atomicOr(word, twice);
}

// A tile takes neighbouring bags, so that a bag's gradient is read once for all of its rows.
// kAhead: rows that a tile has under way at once.
template <typename Updater, typename Element, int kAhead, bool kPrefetch>
__global__ void __launch_bounds__(kThreads, 2)
    alone_kernel(const TableView* __restrict__ tables, const __grid_constant__ Update update,
                 const int64_t* __restrict__ slots, const __grid_constant__ Scratch scratch,
                 const BagTiling tiling) {
  using Gradient = typename Updater::Gradient;
  constexpr int kLanes = Updater::kLanes;
  const Batch& batch = update.batch;
  const BagTile<kLanes> tile(batch, tiling);
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
      if (kPrefetch && alone) {
        prefetch_row(table, slot - first_slot, 0);
        prefetch_row(table, slot - first_slot, 1);
      }
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

void mark_repeats(const Batch& batch, const int64_t* slots, const Scratch& scratch,
                  cudaStream_t stream) {
  mark_kernel<<<grid_for(batch.num_ids), kThreads, 0, stream>>>(batch, slots, scratch.repeats,
                                                                scratch.bad_bag);
  HKV_CUDA_CHECK_LAUNCH();
}

void update_alone(const TableView* tables, const Update& update, const int64_t* slots,
                  const Scratch& scratch, const GroupShape& shape, cudaStream_t stream) {
  const auto launch = [&]<typename Updater, typename Element>() {
    // As many rows under way as registers allow. Where the gradients of bags serve several rows and
    // states are small, there is bandwidth left to bring rows nearer.
    constexpr int kAhead = Updater::kColumnStates ? 2 : 3;
    const Batch& batch = update.batch;
    const bool prefetch = !Updater::kColumnStates && batch.num_ids >= 2 * batch.num_bags;
    const auto kernel = prefetch ? alone_kernel<Updater, Element, kAhead, !Updater::kColumnStates>
                                 : alone_kernel<Updater, Element, kAhead, false>;
    const BagTiling tiling(update.batch, Updater::kLanes);
    kernel<<<grid_for(tiling.tiles(update.batch) * Updater::kLanes), kThreads, 0, stream>>>(
        tables, update, slots, scratch, tiling);
  };
  choose_updater(update.optimizer, shape, [&]<typename Updater>() {
    choose_element(update.grad.type,
                   [&]<typename Element>() { launch.template operator()<Updater, Element>(); });
  });
  HKV_CUDA_CHECK_LAUNCH();
}

}  // namespace torchrec_hkv::hash_table::cuda
