// The backward on the GPU. A radix sort by slot brings equal slots together. Each run of them is
// added up in the order of the batch, and its row updated once. Runs that are too long are cut in
// pieces whose sums are added up by a block. Where most rows stand at one position of the batch
// only, these are updated before, in the order of the batch, since then the rows of a bag share its
// gradient (update_alone_cuda.cu). What the last batches were like decides. No gradient is stored
// for each id. Deterministic: both ways add up the same numbers in the same order.
#include <cub/device/device_radix_sort.cuh>

#include "common/cuda_check.h"
#include "hash_table/offsets_cuda.cuh"
#include "hash_table/update_cuda.cuh"

namespace torchrec_hkv::hash_table::cuda {
namespace {

constexpr int kNeighbours = 8;  // of the sorted order, a warp's

// Slots are sorted as unsigned numbers of as many bits as needed; kNoSlot, masked to those bits,
// comes last.
int sort_bits(int64_t num_slots) {
  int bits = 1;
  while ((int64_t{1} << bits) <= num_slots) ++bits;
  return bits;
}

size_t aligned(size_t bytes) { return (bytes + 255) / 256 * 256; }

// The sorted keys and values change places with the others where they end up there.
template <typename Key>
void sort_pairs(Scratch* scratch, void* memory, size_t* bytes, int64_t n, int bits,
                cudaStream_t stream) {
  cub::DoubleBuffer<Key> keys(static_cast<Key*>(scratch->keys.values),
                              static_cast<Key*>(scratch->other_keys.values));
  cub::DoubleBuffer<uint32_t> values(scratch->values, scratch->other_values);
  HKV_CUDA_CHECK(cub::DeviceRadixSort::SortPairs(memory, *bytes, keys, values, n, 0, bits, stream));
  if (memory == nullptr) return;
  scratch->keys.values = keys.Current();
  scratch->other_keys.values = keys.Alternate();
  scratch->values = values.Current();
  scratch->other_values = values.Alternate();
}
void sort(Scratch* scratch, void* memory, size_t* bytes, int64_t n, int bits, cudaStream_t stream) {
  if (scratch->keys.wide) {
    sort_pairs<uint64_t>(scratch, memory, bytes, n, bits, stream);
  } else {
    sort_pairs<uint32_t>(scratch, memory, bytes, n, bits, stream);
  }
}

bool is_quick(const GroupShape& shape) { return shape.four_wide && shape.widest <= kQuickColumns; }

size_t layout(int64_t n, int64_t num_slots, const GroupShape& shape, bool weighted,
              bool batch_order, char* base, Scratch* scratch) {
  size_t at = 0;
  const auto take = [&](size_t bytes) {
    char* place = base + at;
    at += aligned(bytes);
    return place;
  };
  const int bits = sort_bits(num_slots);
  const bool wide = bits > 32;
  const size_t key_bytes = wide ? sizeof(uint64_t) : sizeof(uint32_t);
  scratch->keys = Keys{take(n * key_bytes), wide};
  scratch->other_keys = Keys{take(n * key_bytes), wide};
  scratch->values = reinterpret_cast<uint32_t*>(take(n * sizeof(uint32_t)));
  scratch->other_values = reinterpret_cast<uint32_t*>(take(n * sizeof(uint32_t)));
  scratch->bags = nullptr;
  if (weighted || !is_quick(shape)) {
    scratch->bags = reinterpret_cast<uint32_t*>(take(n * sizeof(uint32_t)));
  }
  // A run longer than kLongest has at most a piece for each kLongest of its positions.
  static_assert(kPieceSize >= 2 * kLongest);
  const size_t most = n / kLongest + 1;
  LongRuns& runs = scratch->long_runs;
  runs.number = reinterpret_cast<uint32_t*>(take(4 * sizeof(uint32_t)));
  runs.pieces = runs.number + 1;
  scratch->runs.number = runs.number + 2;
  scratch->runs.singles = runs.number + 3;
  runs.runs = reinterpret_cast<LongRun*>(take(most * sizeof(LongRun)));
  runs.run_of = reinterpret_cast<uint32_t*>(take(most * sizeof(uint32_t)));
  runs.sums = reinterpret_cast<float*>(take(most * shape.widest * sizeof(float)));
  runs.widest = shape.widest;
  scratch->sorted = nullptr;
  scratch->sort_bytes = 0;
  if (!batch_order) {
    sort(scratch, nullptr, &scratch->sort_bytes, n, bits, nullptr);
    scratch->sort = take(scratch->sort_bytes);
    return at;
  }
  scratch->sorted = reinterpret_cast<uint32_t*>(take(sizeof(uint32_t)));
  scratch->zeros = base + at;
  // Bits enough for few slots to share one: 16 a position, as far as 32 bits number them.
  Repeats& repeats = scratch->repeats;
  repeats.bits = 10;
  while (repeats.bits < 32 && (int64_t{1} << repeats.bits) < std::min(num_slots, 16 * n)) {
    ++repeats.bits;
  }
  repeats.exact = (int64_t{1} << repeats.bits) >= num_slots;
  repeats.seen = reinterpret_cast<uint32_t*>(take(2 * repeats.words() * sizeof(uint32_t)));
  repeats.twice = repeats.seen + repeats.words();
  SmallSort& small = scratch->small_sort;
  small = SmallSort::of(n, bits);
  small.digits = reinterpret_cast<uint32_t*>(take(small.digit_bytes()));
  BlockOrder& order = scratch->split_order;
  order.states =
      reinterpret_cast<unsigned long long*>(take(listing_blocks(n) * sizeof(unsigned long long)));
  order.ticket = reinterpret_cast<uint32_t*>(take(sizeof(uint32_t)));
  scratch->zero_bytes = base + at - scratch->zeros;
  return at;
}

__global__ void __launch_bounds__(kThreads)
    count_kernel(const TableView* tables, int32_t num_tables) {
  for (int32_t t = threadIdx.x; t < num_tables; t += kThreads) ++*tables[t].optimizer_step;
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
    const int64_t length = end_of_run<kWarp>(scratch.keys, begin, n, run_key) - begin;
    if (length > kLongest) {
      note_long_run<kWarp>(scratch.long_runs, begin, length);
      continue;
    }
    const Run run{scratch.values + begin, length, scratch.bags};
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
  if (lane <= kNeighbours + 1 && at >= 0 && at < n) key = scratch.keys[at];
  const uint64_t before = __shfl_up_sync(kAllLanes, key, 1);
  const uint64_t after = __shfl_down_sync(kAllLanes, key, 1);
  const bool own = lane >= 1 && lane <= kNeighbours && at < n && key != update.no_slot;
  const bool begins = own && (at == 0 || key != before);
  Neighbour mine{};
  if (begins) {
    mine = neighbour_at(tables, update, scratch, at, key);
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
    const Run piece{scratch.values + whole.first + begin,
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
// updates the row. Says how the next batch is to be updated.
template <bool kColumnStates>
__global__ void __launch_bounds__(kThreads, kColumnStates ? 3 : 4)
    long_run_kernel(const TableView* __restrict__ tables, const Update update,
                    const Scratch scratch, UpdateHint* hint) {
  if (hint != nullptr && blockIdx.x == 0 && threadIdx.x == 0) {
    const int64_t n = update.batch.num_ids;
    const int64_t alone = scratch.sorted == nullptr ? *scratch.runs.singles : n - *scratch.sorted;
    hint->batch_order = 8 * alone >= 7 * n ? 1 : 0;
  }
  constexpr int kWarps = kThreads / kWarp;
  const LongRuns& runs = scratch.long_runs;
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const uint32_t number = *runs.number;
  for (uint32_t r = blockIdx.x; r < number; r += gridDim.x) {
    const LongRun run = runs.runs[r];
    const uint32_t value = scratch.values[run.first];
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
      const int64_t slot = static_cast<int64_t>(scratch.keys[run.first]) - table.first_slot;
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

size_t update_rows_scratch(int64_t num_ids, int64_t num_slots, const GroupShape& shape,
                           bool weighted, bool batch_order) {
  Scratch scratch;
  return layout(num_ids, num_slots, shape, weighted, batch_order, nullptr, &scratch);
}

void update_rows(const TableView* tables, const Batch& batch, const int64_t* slots, Pooling pooling,
                 Output<const char> grad, const OptimizerConfig& optimizer,
                 const float* learning_rate, int32_t num_tables, int64_t num_slots,
                 const GroupShape& shape, bool batch_order, UpdateHint* hint, void* memory,
                 cudaStream_t stream) {
  if (batch.num_ids == 0) {
    count_kernel<<<1, kThreads, 0, stream>>>(tables, num_tables);
    HKV_CUDA_CHECK_LAUNCH();
    return;
  }
  Scratch scratch;
  layout(batch.num_ids, num_slots, shape, pooling.weights != nullptr, batch_order,
         static_cast<char*>(memory), &scratch);
  const int bits = sort_bits(num_slots);
  const Update update{batch,
                      pooling,
                      grad,
                      optimizer,
                      learning_rate,
                      (uint64_t{1} << bits) - 1,
                      shape.four_wide && grad.stride % 4 == 0};
  const bool quick = is_quick(shape);
  if (batch_order) {
    HKV_CUDA_CHECK(cudaMemsetAsync(scratch.zeros, 0, scratch.zero_bytes, stream));
    mark_repeats(batch, slots, scratch.repeats, stream);
    sort_repeated(tables, num_tables, update, slots, &scratch, stream);
    update_alone(tables, update, slots, scratch, shape, stream);
  } else {
    prepare_update(tables, num_tables, update, slots, scratch, stream);
    sort(&scratch, scratch.sort, &scratch.sort_bytes, batch.num_ids, bits, stream);
  }
  const bool column_states = has_column_states(optimizer);
  const int64_t threads = (batch.num_ids + kNeighbours - 1) / kNeighbours * kWarp;
  if (quick) {
    scratch.runs.first = static_cast<uint32_t*>(scratch.other_keys.values);
    scratch.runs.length = scratch.other_values;
    update_runs(tables, update, scratch, shape, stream);
  } else {
    choose_element(grad.type, [&]<typename Element>() {
      const auto kernel =
          column_states ? update_kernel<true, Element> : update_kernel<false, Element>;
      kernel<<<grid_for(threads), kThreads, 0, stream>>>(tables, update, scratch);
    });
    HKV_CUDA_CHECK_LAUNCH();
  }
  if (batch.num_ids <= kLongest) return;
  const unsigned blocks = resident_grid(4, threads);
  if (!quick) {
    choose_element(grad.type, [&]<typename Element>() {
      piece_kernel<Element><<<blocks, kThreads, 0, stream>>>(tables, update, scratch);
    });
    HKV_CUDA_CHECK_LAUNCH();
  }
  const auto long_kernel = column_states ? long_run_kernel<true> : long_run_kernel<false>;
  long_kernel<<<blocks, kThreads, 0, stream>>>(tables, update, scratch, quick ? hint : nullptr);
  HKV_CUDA_CHECK_LAUNCH();
}

}  // namespace torchrec_hkv::hash_table::cuda
