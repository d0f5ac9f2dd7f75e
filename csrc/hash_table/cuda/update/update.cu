// The backward on the GPU.
//
// First the positions of a batch are grouped by slot: pairs of slot and bag are written
// (prepare_pairs.cu) and sorted, in one sort or, if each feature has a table of its own, separately
// by table (sort_by_table.cu). If gradients would not stay in L2, segments of equal slots are then
// ordered by bag (order_by_bag.cu). Grouping needs no gradients, so it can run beside the
// forward as soon as slots are known.
//
// Then rows are updated. Adjacent pairs of equal slots form a segment. Its gradients are summed in
// the order of the batch, and its row is updated once (segments.cu, any_segments.cu). Long segments
// are cut in pieces, which are summed first (sum_pieces.cu); the sums are added at the end
// (long_segments.cu). No gradient is stored for each id.
#include <cub/device/device_radix_sort.cuh>
#include <stdexcept>
#include <utility>

#include "common/cuda_check.h"
#include "common/dependent_launch.cuh"
#include "common/side_stream.h"
#include "hash_table/cuda/offsets.cuh"
#include "hash_table/cuda/update/update.cuh"

namespace torchrec_hkv::hash_table::cuda {
namespace {

bool is_captured(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  HKV_CUDA_CHECK(cudaStreamIsCapturing(stream, &status));
  return status != cudaStreamCaptureStatusNone;
}

// Sorts all pairs; the result may be in the other half. Without `memory`, only returns the bytes
// that it needs.
template <typename Key, typename Value>
size_t sort_all(SortedPairs* pairs, int64_t n, int bits, void* memory, size_t bytes,
                cudaStream_t stream) {
  cub::DoubleBuffer<Key> keys(static_cast<Key*>(pairs->pairs.keys),
                              static_cast<Key*>(pairs->other.keys));
  cub::DoubleBuffer<Value> values(static_cast<Value*>(pairs->pairs.values),
                                  static_cast<Value*>(pairs->other.values));
  const int low = pairs->pairs.format.shift;
  HKV_CUDA_CHECK(
      cub::DeviceRadixSort::SortPairs(memory, bytes, keys, values, n, low, low + bits, stream));
  if (memory == nullptr) return bytes;
  if (keys.selector != values.selector) throw std::logic_error("cub has parted keys and values.");
  if (keys.selector != 0) std::swap(pairs->pairs, pairs->other);
  return bytes;
}
size_t sort_all(SortedPairs* pairs, int64_t n, int bits, void* memory, size_t bytes,
                cudaStream_t stream) {
  const PairFormat& format = pairs->pairs.format;
  const auto sort = format.wide     ? sort_all<uint64_t, uint32_t>
                    : format.packed ? sort_all<uint32_t, uint16_t>
                                    : sort_all<uint32_t, uint32_t>;
  return sort(pairs, n, bits, memory, bytes, stream);
}

// Whether to order by bag, because the gradients of a table's bags do not stay in L2. Bags with few
// ids are read once in any order.
bool orders_by_bag(int64_t num_ids, int64_t num_bags, const GroupShape& shape) {
  constexpr int64_t kCachedBytes = int64_t{16} << 20;
  const int64_t bytes = num_bags * shape.widest * static_cast<int64_t>(sizeof(float));
  return shape.all_wide() && num_ids >= 4 * num_bags &&
         bytes / max(1, shape.num_unshared_features) >= kCachedBytes;
}

UpdateSize size_of(int64_t num_ids, int64_t num_bags, int64_t num_slots, const GroupShape& shape,
                   bool weighted) {
  UpdateSize size{num_ids,           num_bags, num_slots, shape.widest,
                  shape.row_classes, weighted, 0,         orders_by_bag(num_ids, num_bags, shape)};
  SortedPairs none{{nullptr, nullptr, size.format()}, {nullptr, nullptr, size.format()}};
  size.cub_sort_bytes = sort_all(&none, num_ids, size.key_bits(), nullptr, 0, nullptr);
  return size;
}

// The key of kNoSlot: masked to the bits of keys, it comes last.
uint64_t no_slot_of(const UpdateSize& size) { return (uint64_t{1} << size.key_bits()) - 1; }

__device__ __forceinline__ void count_update(const TableView* tables, int32_t num_tables) {
  for (int32_t t = threadIdx.x; t < num_tables; t += kThreads) ++*tables[t].optimizer_step;
}

__global__ void __launch_bounds__(kThreads)
    count_kernel(const TableView* tables, int32_t num_tables) {
  count_update(tables, num_tables);
}

__global__ void __launch_bounds__(kThreads)
    begin_kernel(const TableView* tables, int32_t num_tables, const Batch batch,
                 const __grid_constant__ UpdateScratch scratch) {
  let_next_kernel_start();
  count_update(tables, num_tables);
  if (threadIdx.x != 0) return;
  // Reports again: the host may have read the first report and continued.
  const int64_t bad = *scratch.bad_bag;
  if (bad > 0) refuse_bag(batch, bad - 1, batch.offsets[bad - 1], batch.offsets[bad]);
}

}  // namespace

unsigned resident_grid(int blocks_of_processor, int64_t threads) {
  return min(static_cast<unsigned>(blocks_of_processor) * multiprocessors(), grid_for(threads));
}

bool expects_unique_ids(const UpdateHint* hint) {
  return static_cast<const volatile UpdateHint*>(hint)->unique_ids != 0;
}

size_t update_rows_scratch(int64_t num_ids, int64_t num_bags, int64_t num_slots,
                           const GroupShape& shape, bool weighted) {
  return UpdateScratch().lay_out(size_of(num_ids, num_bags, num_slots, shape, weighted), nullptr);
}

Grouping group_positions(const TableView* tables, const Batch& batch, const int64_t* slots,
                         bool weighted, int64_t num_slots, const GroupShape& shape,
                         const UpdateHint* hint, void* memory, cudaStream_t stream,
                         SideStream* side_stream) {
  if (batch.num_ids == 0) return Grouping{false};
  const UpdateSize size = size_of(batch.num_ids, batch.num_bags, num_slots, shape, weighted);
  UpdateScratch scratch;
  scratch.lay_out(size, static_cast<char*>(memory));
  const uint64_t no_slot = no_slot_of(size);
  const void* const first_half = scratch.pairs.pairs.keys;
  HKV_CUDA_CHECK(cudaMemsetAsync(scratch.words, 0, scratch.word_bytes, stream));
  prepare_pairs(batch, slots, no_slot, scratch, stream);
  if (sorts_by_table(shape, batch, size.format(), hint)) {
    // A graph would start the other branch first, whose blocks leave no room for this sort's large
    // ones. Without a graph, waiting costs more than it gains.
    const bool hold = side_stream != nullptr && is_captured(stream);
    if (hold) side_stream->delay_main();
    sort_by_table(tables, batch, &scratch.pairs, shape.max_slots, scratch.hot_slots,
                  side_stream != nullptr && !hold, stream);
  } else {
    sort_all(&scratch.pairs, batch.num_ids, size.key_bits(), scratch.cub_sort, size.cub_sort_bytes,
             stream);
  }
  scratch.begin_lists(size);
  if (scratch.orders) order_by_bag(batch, no_slot, scratch, stream);
  list_segments(tables, batch, no_slot, scratch, stream);
  return Grouping{scratch.pairs.pairs.keys != first_half};
}

void update_rows(const TableView* tables, const Batch& batch, Pooling pooling,
                 Output<const char> grad, const OptimizerConfig& optimizer,
                 const float* learning_rate, int32_t num_tables, int64_t num_slots,
                 const GroupShape& shape, const Grouping& grouping, UpdateHint* hint, void* memory,
                 cudaStream_t stream) {
  if (batch.num_ids == 0) {
    count_kernel<<<1, kThreads, 0, stream>>>(tables, num_tables);
    HKV_CUDA_CHECK_LAUNCH();
    return;
  }
  const UpdateSize size =
      size_of(batch.num_ids, batch.num_bags, num_slots, shape, pooling.weights != nullptr);
  UpdateScratch scratch;
  scratch.lay_out(size, static_cast<char*>(memory));
  if (grouping.moved) std::swap(scratch.pairs.pairs, scratch.pairs.other);
  scratch.begin_lists(size);
  const UpdateArguments update{batch,
                               pooling,
                               grad,
                               optimizer,
                               learning_rate,
                               no_slot_of(size),
                               shape.four_wide && grad.stride % 4 == 0};
  begin_kernel<<<1, kThreads, 0, stream>>>(tables, num_tables, batch, scratch);
  HKV_CUDA_CHECK_LAUNCH();
  const bool has_pieces = batch.num_ids > kLongest;
  if (has_pieces) sum_pieces(tables, update, scratch, shape, stream);
  if (!update.group_four_wide) {
    // One kernel for all classes, because its tiles have the same width for each.
    update_any_segments(tables, update, scratch, shape, kAllRowClasses, stream);
    update_long_segments(tables, update, scratch, shape, hint, stream);
    return;
  }
  const bool several = scratch.units.any();
  bool first = !has_pieces;
  for (int32_t row_class = 0; row_class < kRowClasses; ++row_class) {
    if ((shape.row_classes >> row_class & 1) == 0) continue;
    if (updates_segments(optimizer, row_class)) {
      update_segments(tables, update, scratch, shape, row_class, first, stream);
      first = false;
    } else {
      update_any_segments(tables, update, scratch, shape, several ? row_class : kAllRowClasses,
                          stream);
      first = true;
    }
  }
  update_long_segments(tables, update, scratch, shape, hint, stream);
}

}  // namespace torchrec_hkv::hash_table::cuda
