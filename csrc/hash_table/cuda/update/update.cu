// The backward on the GPU. A radix sort by slot brings equal slots together, one of all positions
// or, where features have tables of their own, one for each table (sort_by_table.cu). Each run of
// equal slots is added up in the order of the batch, and its row updated once. Runs that are too
// long are cut in pieces whose sums are added up at the end (long_runs.cu). No gradient is stored
// for each id.
//
// segment_update.cu updates the rows of the sorted order, whatever the optimizer, the rows' type
// and their width. Rows that plain updaters serve (row_updaters.cuh) have faster ways: stream.cu
// takes the sorted order as a stream, or by tiles where most rows stand at one position
// (sorted_rows.cu). Where most rows of a batch stand at one position, these need no sort: they are
// updated in the order of the batch, since then the rows of a bag share its gradient (alone.cu),
// those at a few positions by chains (chains.cu), and if others are left, these are sorted, listed
// and updated (runs.cu). What the last batches were like decides. All ways add up the same numbers
// in the same order.
//
// What takes no gradients, and must be done before the first row is updated, is group_positions: it
// can be done as soon as slots are known, beside the forward.
#include <cub/device/device_radix_sort.cuh>
#include <optional>
#include <stdexcept>
#include <utility>

#include "common/chain.cuh"
#include "common/cuda_check.h"
#include "common/side_stream.h"
#include "hash_table/cuda/offsets.cuh"
#include "hash_table/cuda/update/row_updaters.cuh"
#include "hash_table/cuda/update/update.cuh"

namespace torchrec_hkv::hash_table::cuda {
namespace {

// Of one bag each: see updates_in_batch_order; and what fills the device for long, so that it is of
// no account when a kernel begins.
constexpr int64_t kManyIds = 1 << 19;
constexpr int64_t kSomeIds = 1 << 17;  // with fewer, chains take as long as rows that stand alone

bool is_captured(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  HKV_CUDA_CHECK(cudaStreamIsCapturing(stream, &status));
  return status != cudaStreamCaptureStatusNone;
}

bool is_quick(const GroupShape& shape) { return shape.four_wide && shape.widest <= kQuickColumns; }

// Whether plain updaters serve a group.
bool is_quick(const OptimizerConfig& optimizer, const GroupShape& shape) {
  return is_quick(shape) && has_plain_updater(optimizer, shape);
}

// Sorts all pairs; they may end in the other half. Without memory: how much that takes.
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

UpdateSize size_of(int64_t num_ids, int64_t num_bags, int64_t num_slots, const GroupShape& shape,
                   bool weighted, bool batch_order) {
  UpdateSize size{num_ids, num_bags, num_slots, shape.widest, weighted, batch_order, 0};
  if (!batch_order) {
    SortedPairs none{{nullptr, nullptr, size.format()}, {nullptr, nullptr, size.format()}};
    size.cub_sort_bytes = sort_all(&none, num_ids, size.key_bits(), nullptr, 0, nullptr);
  }
  return size;
}

// Of no slot: masked to the bits of keys, it comes last.
uint64_t no_slot_of(const UpdateSize& size) { return (uint64_t{1} << size.key_bits()) - 1; }

__device__ __forceinline__ void count_update(const TableView* tables, int32_t num_tables) {
  for (int32_t t = threadIdx.x; t < num_tables; t += kThreads) ++*tables[t].optimizer_step;
}

__global__ void __launch_bounds__(kThreads)
    count_kernel(const TableView* tables, int32_t num_tables) {
  count_update(tables, num_tables);
}

// hint: null where it is not known yet.
__global__ void __launch_bounds__(kThreads)
    begin_kernel(const TableView* tables, int32_t num_tables, const Batch batch,
                 const __grid_constant__ Scratch scratch, UpdateHint* hint) {
  let_next_kernel_start();
  count_update(tables, num_tables);
  if (threadIdx.x != 0) return;
  *scratch.ticket = 0;
  if (hint != nullptr) {
    set_hint(hint, batch.num_ids - *scratch.split, batch.num_ids);
    hint->hot_slots = 0;
  }
  // The host may have been told since the positions were grouped, and gone on.
  const int64_t bad = *scratch.bad_bag;
  if (bad > 0) refuse_bag(batch, bad - 1, batch.offsets[bad - 1], batch.offsets[bad]);
}

}  // namespace

unsigned resident_grid(int blocks_of_processor, int64_t threads) {
  int device = 0, processors = 0;
  HKV_CUDA_CHECK(cudaGetDevice(&device));
  HKV_CUDA_CHECK(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device));
  return std::min(static_cast<unsigned>(blocks_of_processor * processors), grid_for(threads));
}

bool wants_batch_order(const UpdateHint* hint, const GroupShape& shape) {
  return is_quick(shape) && static_cast<const volatile UpdateHint*>(hint)->batch_order != 0;
}

bool updates_in_batch_order(const UpdateHint* hint, const GroupShape& shape,
                            const OptimizerConfig& optimizer, int64_t num_ids, int64_t num_bags) {
  if (!wants_batch_order(hint, shape) || !is_quick(optimizer, shape)) return false;
  // What the batch order gains is that the rows of a bag share its gradient. Where each has one of
  // its own, and so many that the sort's passes are worth their launch, the stream is faster, but
  // for rows with large states (docs/measurements/training_step_gpu.md).
  const bool shared = num_ids >= 2 * num_bags;
  return shared || num_ids < kManyIds || has_column_states(optimizer) ||
         !streams_runs(optimizer, shape);
}

size_t update_rows_scratch(int64_t num_ids, int64_t num_bags, int64_t num_slots,
                           const GroupShape& shape, bool weighted, bool batch_order) {
  return Scratch().place(size_of(num_ids, num_bags, num_slots, shape, weighted, batch_order),
                         nullptr);
}

bool grouping_goes_first(const Batch& batch, bool batch_order, cudaStream_t other) {
  // In batch order they wait for each other on the multiprocessors. A graph begins the branch that
  // goes first before the other one; the pooling of a small batch, which then finds no places, is
  // over later by all of that wait.
  return !batch_order || batch.num_ids >= kManyIds || !is_captured(other);
}

Grouping group_positions(const TableView* tables, const Batch& batch, const int64_t* slots,
                         const TouchNotes* notes, bool weighted, const OptimizerConfig& optimizer,
                         int64_t num_slots, const GroupShape& shape, bool batch_order,
                         const UpdateHint* hint, void* memory, cudaStream_t stream,
                         SideStream* beside) {
  if (batch.num_ids == 0) return Grouping{batch_order, false};
  const UpdateSize size =
      size_of(batch.num_ids, batch.num_bags, num_slots, shape, weighted, batch_order);
  Scratch scratch;
  scratch.place(size, static_cast<char*>(memory));
  const uint64_t no_slot = no_slot_of(size);
  const void* const first_half = scratch.pairs.pairs.keys;
  // What lies where, and until when: scratch.cuh.
  if (batch_order) {
    if (notes != nullptr) scratch.mark_few(size);
    mark_repeats(batch, slots, notes, scratch, stream);
    split_repeated(batch, slots, scratch, stream);
    return Grouping{true, false};
  }
  HKV_CUDA_CHECK(cudaMemsetAsync(scratch.words, 0, scratch.word_bytes, stream));
  prepare_update(batch, slots, no_slot, scratch, stream);
  if (sorts_by_table(shape, batch, size.format(), hint)) {
    // A graph would begin the other branch first, whose blocks leave no places for large ones.
    // Where calls follow each other, waiting costs more than it gains.
    const bool holds = beside != nullptr && is_captured(stream);
    if (holds) beside->hold_other();
    sort_by_table(tables, batch, &scratch.pairs, shape.most_slots, scratch.before_hot,
                  scratch.hot_slots, beside != nullptr && !holds, stream);
  } else {
    sort_all(&scratch.pairs, batch.num_ids, size.key_bits(), scratch.cub_sort, size.cub_sort_bytes,
             stream);
  }
  scratch.begin_runs(size);
  list_long_runs(batch, no_slot, scratch, stream);
  return Grouping{false, scratch.pairs.pairs.keys != first_half};
}

void update_rows(const TableView* tables, const Batch& batch, const int64_t* slots, Pooling pooling,
                 Output<const char> grad, const OptimizerConfig& optimizer,
                 const float* learning_rate, int32_t num_tables, int64_t num_slots,
                 const GroupShape& shape, const Grouping& grouping, UpdateHint* hint, void* memory,
                 cudaStream_t stream) {
  if (batch.num_ids == 0) {
    count_kernel<<<1, kThreads, 0, stream>>>(tables, num_tables);
    HKV_CUDA_CHECK_LAUNCH();
    return;
  }
  const bool batch_order = grouping.batch_order;
  const UpdateSize size = size_of(batch.num_ids, batch.num_bags, num_slots, shape,
                                  pooling.weights != nullptr, batch_order);
  Scratch scratch;
  scratch.place(size, static_cast<char*>(memory));
  if (grouping.moved) std::swap(scratch.pairs.pairs, scratch.pairs.other);
  if (!batch_order) scratch.begin_runs(size);
  const Update update{batch,
                      pooling,
                      grad,
                      optimizer,
                      learning_rate,
                      no_slot_of(size),
                      shape.four_wide && grad.stride % 4 == 0};
  begin_kernel<<<1, kThreads, 0, stream>>>(tables, num_tables, batch, scratch,
                                           batch_order ? hint : nullptr);
  HKV_CUDA_CHECK_LAUNCH();
  if (batch_order) {
    // Rows that stand alone are most of the work, and bound by memory. Most others go by their
    // chains, which have the first places, since they wait for one access after the other: rows
    // that stand alone take theirs as they end.
    // A graph of few ids gains more where both begin at once.
    const bool swaps = batch.num_ids < kSomeIds && is_captured(stream);
    SideStream beside(stream, swaps);
    const cudaStream_t of_chains = swaps ? beside.stream() : stream;
    update_chains(tables, update, scratch, shape, of_chains);
    // Before the launches that mostly have nothing to do, so that it does not wait for the host.
    update_alone(tables, update, slots, scratch, shape, swaps ? stream : beside.stream());
    // What sorts the rest waits for one small kernel after the other. Mostly these find nothing to
    // do, and must not take places from rows that stand alone; where there was something to do of
    // late, they are to have theirs at once.
    std::optional<SideStream> first;
    const bool sorts = static_cast<const volatile UpdateHint*>(hint)->sorts_rest != 0;
    if (sorts && !swaps) first.emplace(stream);
    const cudaStream_t rest = first ? first->stream() : of_chains;
    sort_small(&scratch.pairs, scratch.sorted, scratch.small_sort, rest,
               resident_grid(1, batch.num_ids));
    scratch.begin_runs(size);
    list_runs(batch, update.no_slot, scratch, hint, rest);
    update_runs(tables, update, scratch, shape, rest);
    update_long_runs(tables, update, scratch, nullptr, rest);
    if (first) first->join();
    beside.join();
    return;
  }
  if (streams_runs(optimizer, shape)) {
    const bool mostly_alone = wants_batch_order(hint, shape);
    if (!mostly_alone || !update_sorted_rows(tables, update, scratch, shape, stream)) {
      stream_runs(tables, update, scratch, shape, stream);
    }
  } else {
    update_segments(tables, update, scratch, shape, stream);
  }
  update_long_runs(tables, update, scratch, hint, stream);
}

}  // namespace torchrec_hkv::hash_table::cuda
