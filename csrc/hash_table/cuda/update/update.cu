// The backward on the GPU. A radix sort by slot brings equal slots together, one of all positions
// or, where features have tables of their own, one for each table (sort_by_table.cu). Each run of
// them is added up in the order of the batch, and its row updated once. Runs that are too long are
// cut in pieces whose sums are added up at the end (long_runs.cu). Where most rows stand at one
// position of the batch only, these are updated before, in the order of the batch, since then the
// rows of a bag share its gradient (alone.cu). What the last batches were like decides. Plain
// updaters take the sorted order as a stream (stream.cu), or by tiles where most rows stand alone
// all the same (sorted_rows.cu), others run by run. No gradient is stored for each id.
// Deterministic: all ways add up the same numbers in the same order.
//
// What takes no gradients, and must be done before the first row is updated, is group_positions: it
// can be done as soon as slots are known, beside the forward. In batch order the rows of slots at a
// few positions are updated beside those that stand alone, by chains (chains.cu), and if others are
// left, these are sorted, listed and updated there, too.
#include <cub/device/device_radix_sort.cuh>
#include <optional>
#include <stdexcept>
#include <utility>

#include "common/chain.cuh"
#include "common/cuda_check.h"
#include "common/side_stream.h"
#include "hash_table/cuda/offsets.cuh"
#include "hash_table/cuda/update/update.cuh"

namespace torchrec_hkv::hash_table::cuda {
namespace {

constexpr int kNeighbours = 8;  // of the sorted order, a warp's
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
  UpdateSize size{num_ids,         num_bags, num_slots,   shape.widest,
                  is_quick(shape), weighted, batch_order, 0};
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

// lists_follow: the kernels to come list long runs themselves. hint: null where it is not known
// yet.
__global__ void __launch_bounds__(kThreads)
    begin_kernel(const TableView* tables, int32_t num_tables, const Batch batch,
                 const __grid_constant__ Scratch scratch, bool lists_follow, UpdateHint* hint) {
  let_next_kernel_start();
  count_update(tables, num_tables);
  if (threadIdx.x != 0) return;
  *scratch.ticket = 0;
  if (hint != nullptr) {
    set_hint(hint, batch.num_ids - *scratch.split, batch.num_ids);
    hint->hot_slots = 0;
  }
  if (lists_follow) *scratch.long_runs.number = *scratch.long_runs.pieces = 0;
  // The host may have been told since the positions were grouped, and gone on.
  const int64_t bad = *scratch.bad_bag;
  if (bad > 0) refuse_bag(batch, bad - 1, batch.offsets[bad - 1], batch.offsets[bad]);
}

// The sorted positions: values of the general kernels, which are not packed.
__device__ __forceinline__ const uint32_t* positions_of(const Scratch& scratch) {
  return static_cast<const uint32_t*>(scratch.pairs.pairs.values);
}

// Rows wider than a warp's registers are summed again whenever their gradient is asked for.
template <typename Element, int kWidth, bool kColumnStates>
__device__ __forceinline__ void update_row(const TableView& table, int64_t slot, const Run& run,
                                           const Batch& batch, const Pooling& pooling,
                                           const Output<const char>& grad,
                                           const OptimizerConfig& optimizer, float learning_rate) {
  const int32_t mine = threadIdx.x % kWarp * kWidth;
  const bool one_pass = table.dim() <= kWarp * kWidth;
  Columns<kWidth> sum = Columns<kWidth>::zero();
  if (one_pass && mine < table.dim())
    sum = sum_run<Element, kWidth>(run, batch, pooling, grad, mine);
  const auto gradient = [&](int32_t column) {
    return one_pass ? sum : sum_run<Element, kWidth>(run, batch, pooling, grad, column);
  };
  apply_row<kWidth, kColumnStates>(table, slot, optimizer, learning_rate, gradient);
}

// Whether a row and its gradients can be worked on four columns at a time. Features of one table
// may stand at columns of different alignment; dims that are multiples of four in every table of
// the group make this true for all.
__device__ __forceinline__ bool all_four_wide(const Run& run, const TableView& table,
                                              const Batch& batch, int64_t stride) {
  if (table.states.width > 1 && table.states.width % 4 != 0) return false;
  for (int64_t k = 0; k < run.length; ++k) {
    const uint32_t bag = run.bags[run.positions[k]];
    const int32_t feature = batch.feature_of_bag(bag);
    if (!four_wide(table.dim(), batch.output_of(feature, bag - batch.first_bag(feature), stride))) {
      return false;
    }
  }
  return true;
}

// Updates the rows of runs that are longer than one position, or wide, or not aligned; of a warp's
// neighbours those in `left`. Out of line, so that it takes no registers from the simple ones.
template <bool kColumnStates, typename Element>
__device__ __noinline__ void update_runs(const TableView* __restrict__ tables, const Update& update,
                                         const Scratch& scratch, int64_t first, uint64_t key,
                                         unsigned left) {
  const int64_t n = update.batch.num_ids;
  const float rate = *update.learning_rate;
  for (; left; left &= left - 1) {
    const int source = __ffs(static_cast<int>(left)) - 1;
    const int64_t begin = first + source - 1;
    const uint64_t run_key = __shfl_sync(kAllLanes, key, source);
    const int64_t length = end_of_run<kWarp>(scratch.pairs.pairs, begin, n, run_key) - begin;
    if (length > kLongest) {
      note_long_run<kWarp>(scratch.long_runs, begin, length);
      continue;
    }
    const Run run{positions_of(scratch) + begin, length, scratch.bags};
    const TableView& table = table_of(tables, update, scratch.bags[run.positions[0]]);
    const int64_t slot = static_cast<int64_t>(run_key) - table.first_slot;
    if (update.group_four_wide || all_four_wide(run, table, update.batch, update.grad.stride)) {
      update_row<Element, 4, kColumnStates>(table, slot, run, update.batch, update.pooling,
                                            update.grad, update.optimizer, rate);
    } else {
      update_row<Element, 1, kColumnStates>(table, slot, run, update.batch, update.pooling,
                                            update.grad, update.optimizer, rate);
    }
  }
}

template <bool kColumnStates, typename Element>
__global__ void __launch_bounds__(kThreads, kColumnStates ? 3 : 4)
    update_kernel(const TableView* __restrict__ tables, const __grid_constant__ Update update,
                  const __grid_constant__ Scratch scratch) {
  const int64_t n = update.batch.num_ids;
  const int64_t first =
      (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) / kWarp * kNeighbours;
  if (first >= n || is_refused(update.batch)) return;
  // Lanes 1 to kNeighbours look at the warp's own positions, those beside them at the next ones.
  const int lane = threadIdx.x % kWarp;
  const int64_t at = first + lane - 1;
  uint64_t key = update.no_slot;
  if (lane <= kNeighbours + 1 && at >= 0 && at < n) key = scratch.pairs.pairs.key(at);
  const uint64_t before = __shfl_up_sync(kAllLanes, key, 1);
  const uint64_t after = __shfl_down_sync(kAllLanes, key, 1);
  const bool own = lane >= 1 && lane <= kNeighbours && at < n && key != update.no_slot;
  const bool begins = own && (at == 0 || key != before);
  Neighbour mine{};
  if (begins) {
    mine = neighbour_at(tables, update, scratch, key, scratch.pairs.pairs.value(at));
    prefetch_update(tables[mine.table], mine, update);
  }
  // A run of one, at most a column vector a lane wide, whose gradient is loaded ahead.
  constexpr int32_t kMost = 4 * kWarp;
  const bool simple = begins && key != after && update.group_four_wide &&
                      tables[mine.table].dim() <= kMost &&
                      (!kColumnStates || tables[mine.table].states.width % 4 == 0);
  const unsigned simple_lanes = __ballot_sync(kAllLanes, simple);
  const float rate = *update.learning_rate;
  const auto load_gradient = [&](const Neighbour& it) {
    Columns<4> gradient = Columns<4>::zero();
    if (lane * 4 < tables[it.table].dim()) {
      gradient.add(it.scale, gradient_at<Element, 4>(update.grad, it.gradient + lane * 4));
    }
    return gradient;
  };
  unsigned left = simple_lanes;
  Neighbour next{};
  Columns<4> next_gradient = Columns<4>::zero();
  if (left) {
    next = neighbour_of_lane(mine, __ffs(static_cast<int>(left)) - 1);
    next_gradient = load_gradient(next);
  }
  while (left) {
    const Neighbour it = next;
    const Columns<4> sum = next_gradient;
    left &= left - 1;
    if (left) {
      next = neighbour_of_lane(mine, __ffs(static_cast<int>(left)) - 1);
      next_gradient = load_gradient(next);
    }
    apply_row<4, kColumnStates>(tables[it.table], it.slot, update.optimizer, rate,
                                [&](int32_t) { return sum; });
  }
  const unsigned others = __ballot_sync(kAllLanes, begins) & ~simple_lanes;
  if (others) update_runs<kColumnStates, Element>(tables, update, scratch, first, key, others);
}

template <typename Element, int kWidth>
__device__ __forceinline__ void sum_piece(const Run& piece, const Update& update, int32_t dim,
                                          float* to) {
  for_my_columns<kWidth>(dim, [&](int32_t column) {
    sum_run<Element, kWidth>(piece, update.batch, update.pooling, update.grad, column)
        .store(to + column);
  });
}

// A warp a piece of a long run.
template <typename Element>
__global__ void __launch_bounds__(kThreads, 4)
    piece_kernel(const TableView* __restrict__ tables, const Update update, const Scratch scratch) {
  const LongRuns& runs = scratch.long_runs;
  const int64_t warps = static_cast<int64_t>(gridDim.x) * kThreads / kWarp;
  const int64_t pieces = *runs.pieces;
  for (int64_t p = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) / kWarp; p < pieces;
       p += warps) {
    const LongRun& whole = runs.runs[runs.run_of[p]];
    const int64_t begin = (p - whole.first_piece) * kPieceSize;
    const Run piece{positions_of(scratch) + whole.first + begin,
                    min(kPieceSize, static_cast<int64_t>(whole.length) - begin), scratch.bags};
    const TableView& table = table_of(tables, update, scratch.bags[piece.positions[0]]);
    float* to = runs.sums + p * runs.widest;
    // The sums' rows are aligned as their width is.
    if (update.group_four_wide && runs.widest % 4 == 0) {
      sum_piece<Element, 4>(piece, update, table.dim(), to);
    } else {
      sum_piece<Element, 1>(piece, update, table.dim(), to);
    }
  }
}

// A block a long run: its warps add up shares of the pieces, the first one the shares, and it
// updates the row.
template <bool kColumnStates>
__global__ void __launch_bounds__(kThreads, kColumnStates ? 3 : 4)
    long_run_kernel(const TableView* __restrict__ tables, const Update update,
                    const Scratch scratch) {
  if (is_refused(update.batch)) return;
  constexpr int kWarps = kThreads / kWarp;
  const LongRuns& runs = scratch.long_runs;
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const uint32_t number = *runs.number;
  for (uint32_t r = blockIdx.x; r < number; r += gridDim.x) {
    const LongRun run = runs.runs[r];
    const uint32_t value = scratch.pairs.pairs.value(run.first);
    const TableView& table =
        table_of(tables, update, scratch.bags != nullptr ? scratch.bags[value] : value);
    const int64_t pieces = (run.length + kPieceSize - 1) / kPieceSize;
    const int64_t begin = pieces * warp / kWarps, end = pieces * (warp + 1) / kWarps;
    float* const sums = runs.sums + static_cast<int64_t>(run.first_piece) * runs.widest;
    // A share's sum replaces its first piece's.
    if (begin < end) {
      for (int32_t column = lane; column < table.dim(); column += kWarp) {
        float sum = 0.0f;
#pragma unroll 8
        for (int64_t p = begin; p < end; ++p) sum += sums[p * runs.widest + column];
        sums[begin * runs.widest + column] = sum;
      }
    }
    __syncthreads();
    if (warp == 0) {
      for (int32_t column = lane; column < table.dim(); column += kWarp) {
        float sum = 0.0f;
        for (int w = 0; w < kWarps; ++w) {
          const int64_t from = pieces * w / kWarps;
          if (from < pieces * (w + 1) / kWarps) sum += sums[from * runs.widest + column];
        }
        sums[column] = sum;
      }
      __syncwarp();
      const int64_t slot =
          static_cast<int64_t>(scratch.pairs.pairs.key(run.first)) - table.first_slot;
      const auto gradient = [&](int32_t column) { return Columns<1>::load(sums + column); };
      apply_row<1, kColumnStates>(table, slot, update.optimizer, *update.learning_rate, gradient);
    }
    __syncthreads();
  }
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
  if (!wants_batch_order(hint, shape)) return false;
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
  if (size.quick && sorts_by_table(shape, batch, size.format(), hint)) {
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
  if (streams_runs(optimizer, shape)) {
    list_long_runs(batch, no_slot, scratch, stream);
  } else if (size.quick) {
    list_runs(batch, no_slot, scratch, nullptr, stream);
  }
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
                                           /*lists_follow=*/!size.quick,
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
  if (size.quick) {
    if (streams_runs(optimizer, shape)) {
      const bool mostly_alone = wants_batch_order(hint, shape);
      if (!mostly_alone || !update_sorted_rows(tables, update, scratch, shape, stream)) {
        stream_runs(tables, update, scratch, shape, stream);
      }
    } else {
      update_runs(tables, update, scratch, shape, stream);
    }
    update_long_runs(tables, update, scratch, hint, stream);
    return;
  }
  const bool column_states = has_column_states(optimizer);
  const int64_t threads = (batch.num_ids + kNeighbours - 1) / kNeighbours * kWarp;
  const unsigned blocks = resident_grid(4, threads);
  choose_element(grad.type, [&]<typename Element>() {
    const auto kernel =
        column_states ? update_kernel<true, Element> : update_kernel<false, Element>;
    kernel<<<grid_for(threads), kThreads, 0, stream>>>(tables, update, scratch);
    HKV_CUDA_CHECK_LAUNCH();
    if (batch.num_ids <= kLongest) return;
    piece_kernel<Element><<<blocks, kThreads, 0, stream>>>(tables, update, scratch);
    HKV_CUDA_CHECK_LAUNCH();
    const auto long_kernel = column_states ? long_run_kernel<true> : long_run_kernel<false>;
    long_kernel<<<blocks, kThreads, 0, stream>>>(tables, update, scratch);
    HKV_CUDA_CHECK_LAUNCH();
  });
}

}  // namespace torchrec_hkv::hash_table::cuda
