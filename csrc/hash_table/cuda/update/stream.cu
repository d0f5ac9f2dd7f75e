// Updates of the rows of the sorted order as a stream, for plain updaters and rows in HBM. Runs are
// short, so a tile that takes one after the other (runs.cu) mostly waits. Here
// gradients and rows come to shared memory whichever run they are of, and no registers are taken
// until they are there.
//
// A warp takes segments of the sorted order: the runs that begin in one, but for long runs, whose
// pieces lie between the segments (stream_tasks.cuh). It works through a segment in chunks of a
// position a lane, and through a chunk in windows of some neighbouring positions. A window's
// gradients, and the rows of the runs that end in it, are on their way while the window before is
// added up and its rows are updated. What is computed once a row, the division and the root above
// all, is computed for four rows at once. Pieces of hot ids have a way of their own
// (dense_pieces.cuh).
#include "common/cuda_check.h"
#include "hash_table/cuda/async_copy.cuh"
#include "hash_table/cuda/offsets.cuh"
#include "hash_table/cuda/update/dense_pieces.cuh"
#include "hash_table/cuda/update/row_updaters.cuh"
#include "hash_table/cuda/update/stream_tasks.cuh"
#include "hash_table/cuda/update/update.cuh"

namespace torchrec_hkv::hash_table::cuda {
namespace {

constexpr int kStreamWarps = 4;  // of a block; none needs another
constexpr int kWindow = 8;       // positions at most
constexpr int kAtOnce = 4;       // gradients, or rows, that a warp computes with

// How many vectors a window has room for, its gradients first and then what is stored of its rows,
// and for how many blocks a multiprocessor has room then.
template <typename Updater>
constexpr int kSlots = Updater::kColumnStates ? 12 : 10;
template <typename Updater>
constexpr int kStreamBlocks = Updater::kColumnStates ? 4 : 5;

template <int kVectors>
struct alignas(128) Stage {
  float slots[kVectors][kQuickColumns];
  // Of the window's positions at which a run ends, where its row is; and of row-wise Adagrad the
  // mean of squares, on its way too.
  float* rows[kWindow];
  float* states[kWindow];
  float squares[kWindow];
  float scales[kWindow];  // of the gradients, where they have any
  unsigned long long barrier;
};

struct Window {
  int count;       // of positions
  unsigned ends;   // bit i: a run, or the piece, ends at position i
  uint32_t piece;  // of a long run, or kNoPiece
  uint32_t table;
};

constexpr int kListRounds = 4;

// Lists runs that are longer than kLongest, and counts those of one position.
__global__ void __launch_bounds__(kThreads)
    list_long_runs_kernel(const Batch batch, uint64_t no_slot,
                          const __grid_constant__ Scratch scratch) {
  __shared__ int singles_of_block;
  const Pairs& sorted = scratch.pairs.pairs;
  const int64_t n = batch.num_ids;
  // Half of the blocks, where half of the positions are a hot slot's, lie within one run.
  const int64_t first_of_block = static_cast<int64_t>(blockIdx.x) * kListRounds * kThreads;
  const int64_t last_of_block = first_of_block + kListRounds * kThreads - 1;
  if (first_of_block > 0 && last_of_block < n &&
      sorted.key(first_of_block - 1) == sorted.key(last_of_block)) {
    return;
  }
  if (threadIdx.x == 0) singles_of_block = 0;
  __syncthreads();
  int singles = 0;
#pragma unroll
  for (int k = 0; k < kListRounds; ++k) {
    const int64_t at = first_of_block + k * kThreads + threadIdx.x;
    const auto key_at = [&](int64_t i) { return i >= 0 && i < n ? sorted.key(i) : no_slot; };
    const uint64_t key = key_at(at);
    const uint64_t before = key_at(at - 1), after = key_at(at + 1), far = key_at(at + kLongest);
    const bool begins = key != no_slot && before != key;
    singles += begins && after != key ? 1 : 0;
    for (unsigned longs = __ballot_sync(kAllLanes, begins && far == key); longs;
         longs &= longs - 1) {
      const int source = __ffs(static_cast<int>(longs)) - 1;
      const int64_t first = __shfl_sync(kAllLanes, at, source);
      const uint64_t its_key = __shfl_sync(kAllLanes, key, source);
      note_long_run<kWarp>(scratch.long_runs, first,
                           end_of_run<kWarp>(sorted, first, n, its_key) - first);
    }
  }
  singles = __reduce_add_sync(kAllLanes, singles);
  if (threadIdx.x % kWarp == 0 && singles > 0) atomicAdd(&singles_of_block, singles);
  __syncthreads();
  if (threadIdx.x == 0 && singles_of_block > 0) {
    atomicAdd(scratch.runs.singles, static_cast<uint32_t>(singles_of_block));
  }
}

// Adds up four values of each lane over the lanes, in the order of warp_sum. Lane i gets the sum of
// number i / 8.
__device__ __forceinline__ float sums_of_four(float (&of)[kAtOnce]) {
  static_assert(kAtOnce == 4);
  const int lane = threadIdx.x % kWarp;
#pragma unroll
  for (int half = 2, offset = 16; half >= 1; half /= 2, offset /= 2) {
    const bool upper = lane & offset;
#pragma unroll
    for (int j = 0; j < half; ++j) {
      const float keep = upper ? of[j + half] : of[j];
      const float send = upper ? of[j] : of[j + half];
      of[j] = keep + __shfl_xor_sync(kAllLanes, send, offset);
    }
  }
  float sum = of[0];
#pragma unroll
  for (int offset = 4; offset >= 1; offset /= 2) sum += __shfl_xor_sync(kAllLanes, sum, offset);
  return sum;
}

// What finishes the windows of a warp: the sum of the run that goes on, and what the table of the
// last window gives.
// kScaled: whether gradients have scales, by mean or weights.
template <typename Updater, typename Element, bool kScaled>
struct Finisher {
  using Stages = Stage<kSlots<Updater>>;

  Columns<4> sum;
  RowTerms terms;
  uint32_t table;
  int32_t dim;
  uint64_t once;  // evict_first: rows and states make room for gradients, which are read again

  // A window that has arrived.
  __device__ __forceinline__ void finish(const TableView* tables, const Update& update,
                                         const Scratch& scratch, const Window& window,
                                         Stages& stage) {
    if (window.table != table) {
      table = window.table;
      dim = tables[table].rows.width;
      terms = begin_row(update.optimizer, *update.learning_rate,
                        static_cast<float>(*tables[table].optimizer_step));
    }
    add_up(update, window, stage);
    if (window.piece != kNoPiece) {
      const int32_t column = threadIdx.x % kWarp * 4;
      if (window.ends != 0 && column < dim) {
        Columns<4>::load(&stage.slots[window.count - 1][column])
            .store(scratch.long_runs.sums +
                   static_cast<int64_t>(window.piece) * scratch.long_runs.widest + column);
      }
    } else if constexpr (Updater::kColumnStates) {
      update_with_states(update, window, stage);
    } else {
      update_rows(update, window, stage);
    }
  }

  // The sum of a run takes the place of its last gradient.
  __device__ __forceinline__ void add_up(const Update& update, const Window& window,
                                         Stages& stage) {
    const int32_t column = threadIdx.x % kWarp * 4;
#pragma unroll
    for (int first = 0; first < kWindow; first += kAtOnce) {
      if (first >= window.count) break;
      Columns<4> gradient[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        gradient[i] = Columns<4>::zero();
        if (column < dim) {
          gradient[i] = StoredColumns<Element>::load(
                            reinterpret_cast<const Element*>(&stage.slots[first + i][column]))
                            .widened(update.grad.type);
        }
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        if (first + i < window.count) {
          sum.add(kScaled ? stage.scales[first + i] : 1.0f, gradient[i]);
        }
        if (window.ends >> (first + i) & 1) {
          sum.store(&stage.slots[first + i][column]);
          sum = Columns<4>::zero();
        }
      }
    }
  }

  // Rows whose columns have states, one by one.
  __device__ __forceinline__ void update_with_states(const Update& update, const Window& window,
                                                     Stages& stage) {
    const int32_t column = threadIdx.x % kWarp * 4;
    int slot = window.count;
    for (unsigned left = window.ends; left; left &= left - 1) {
      const int end = __ffs(static_cast<int>(left)) - 1;
      const Columns<4> gradient = Columns<4>::load(&stage.slots[end][column]);
      Columns<4> value = Columns<4>::load(&stage.slots[slot][column]);
      Columns<4> first = Columns<4>::load(&stage.slots[slot + 1][column]);
      Columns<4> second = Columns<4>::zero();
      if constexpr (Updater::kStates >= 2) {
        second = Columns<4>::load(&stage.slots[slot + 2][column]);
      }
      slot += 1 + Updater::kStates;
      move(update, terms, value, gradient, first, second);
      if (column < dim) {
        store_once(stage.rows[end] + column, value, once);
        store_once(stage.states[end] + column, first, once);
        if constexpr (Updater::kStates >= 2) {
          store_once(stage.states[end] + dim + column, second, once);
        }
      }
    }
  }

  // Rows whose columns have none, four at a time.
  __device__ __forceinline__ void update_rows(const Update& update, const Window& window,
                                              Stages& stage) {
    const int lane = threadIdx.x % kWarp;
    const int32_t column = lane * 4;
    int slot = window.count;
    for (unsigned left = window.ends; left;) {
      int end[kAtOnce];
      bool there[kAtOnce];
      Columns<4> gradient[kAtOnce];
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        there[j] = left != 0;
        end[j] = there[j] ? __ffs(static_cast<int>(left)) - 1 : 0;
        left &= left - 1;
      }
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        gradient[j] = Columns<4>::load(&stage.slots[end[j]][column]);
      }
      RowTerms its = terms;  // of the row with the number of the lane's eighth
      if constexpr (Updater::kAdapts) {
        float squares[kAtOnce];
#pragma unroll
        for (int j = 0; j < kAtOnce; ++j) squares[j] = gradient[j].dot(gradient[j]);
        const float sum_of_squares = sums_of_four(squares);
        const int j = lane / 8;
        const int its_end = j < 2 ? (j == 0 ? end[0] : end[1]) : (j == 2 ? end[2] : end[3]);
        const bool is_there =
            j < 2 ? (j == 0 ? there[0] : there[1]) : (j == 2 ? there[2] : there[3]);
        const float renewed =
            adapt_row(update.optimizer, sum_of_squares, dim, stage.squares[its_end], &its);
        if (is_there && lane % 8 == 0) *stage.states[its_end] = renewed;
      }
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        if (!there[j]) break;
        RowTerms of_row = terms;
        if constexpr (Updater::kAdapts) of_row.rate = __shfl_sync(kAllLanes, its.rate, j * 8);
        Columns<4> value = Columns<4>::load(&stage.slots[slot][column]);
        Columns<4> unused = Columns<4>::zero();
        ++slot;
        move(update, of_row, value, gradient[j], unused, unused);
        if (column < dim) store_once(stage.rows[end[j]] + column, value, once);
      }
    }
  }

  __device__ __forceinline__ static void move(const Update& update, const RowTerms& terms,
                                              Columns<4>& value, const Columns<4>& gradient,
                                              Columns<4>& first, Columns<4>& second) {
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      value.v[k] = move_column<Updater::kColumns>(update.optimizer, terms, value.v[k],
                                                  gradient.v[k], first.v[k], second.v[k]);
    }
  }
};

// What a lane knows of its position: its gradient and, where a run ends there, its row.
struct Ready {
  Share share;
  float* row;
  float* state;
};

template <typename Updater, typename Element, bool kScaled>
__global__ void __launch_bounds__(kStreamWarps* kWarp, kStreamBlocks<Updater>)
    stream_kernel(const TableView* __restrict__ tables, const __grid_constant__ Update update,
                  const __grid_constant__ Scratch scratch) {
  constexpr int kOfRow = 1 + Updater::kStates;  // slots of a row
  using Stages = Stage<kSlots<Updater>>;
  static_assert(kSlots<Updater> >= kWindow);
#if __CUDA_ARCH__ >= 900
  // Vectors of gradients of 16 bits may begin between multiples of 16 bytes.
  constexpr bool kBulk = sizeof(Element) == sizeof(float);
#else
  constexpr bool kBulk = false;
#endif
  extern __shared__ __align__(128) char shared[];
  if (is_refused(update.batch)) return;
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  Stages* const stages = reinterpret_cast<Stages*>(shared) + warp * 2;
#if __CUDA_ARCH__ >= 900
  const auto barrier_of = [&](Stages& stage) {
    return reinterpret_cast<CopyBarrier*>(&stage.barrier);
  };
  if constexpr (kBulk) {
    if (lane < 2) barrier_of(stages[lane])->init();
    fence_before_bulk();
    __syncwarp();
  }
#endif
  const Pairs& sorted = scratch.pairs.pairs;
  const auto n = static_cast<uint32_t>(update.batch.num_ids);
  const Tasks tasks(update.batch, scratch);
  const uint32_t workers = gridDim.x * kStreamWarps;

  // Two stages take turns. A window waits in one while the next one's copies begin in the other.
  Window waiting{};
  uint32_t turn = 0;  // number of the next window
  Finisher<Updater, Element, kScaled> finisher{};
  finisher.table = ~0u;
  const uint64_t once = finisher.once = evict_first();
  const auto finish_waiting = [&]() {
    if (waiting.count == 0) return;
    Stages& stage = stages[(turn + 1) % 2];
#if __CUDA_ARCH__ >= 900
    if constexpr (kBulk) barrier_of(stage)->wait((turn - 1) / 2 % 2);
#endif
    finisher.finish(tables, update, scratch, waiting, stage);
  };
  uint32_t table = ~0u;  // of the window whose copies begin
  int32_t dim = 0;

  Task task{};
  task.begin(warp * gridDim.x + blockIdx.x, tasks, workers, n, scratch);
  SortedPlace place{};
  if (task.number < tasks.number) place = SortedPlace::load(sorted, task.at + lane, n);
  while (task.number < tasks.number) {
    // Which of the chunk's positions are the task's, and at which of them runs end.
    const uint64_t key = sorted.key_of(place.pair);
    const uint32_t value = sorted.value_of(place.pair);
    const uint32_t piece = task.piece;
    if (task.dense) {
      add_dense_piece<Element, kScaled>(tables, update, scratch, task, place.pair);
      task.begin(__shfl_sync(kAllLanes, task.following, 0), tasks, workers, n, scratch);
      if (task.number < tasks.number) place = SortedPlace::load(sorted, task.at + lane, n);
      continue;
    }
    unsigned active, end_mask;
    bool more;
    if (piece != kNoPiece) {
      active = __ballot_sync(kAllLanes, task.at + lane < task.end);
      end_mask = __ballot_sync(kAllLanes, task.at + lane + 1 == task.end);
      more = task.at + kWarp < task.end;
    } else {
      const bool begins = place.before != key;
      const unsigned begin_mask = __ballot_sync(kAllLanes, begins);
      const unsigned long_mask = __ballot_sync(kAllLanes, begins && place.far == key);
      const unsigned begun = begin_mask & ((2u << lane) - 1);
      const int from = 31 - __clz(static_cast<int>(begun));  // where the position's run begins
      const bool mine =
          task.at + lane < n && key != update.no_slot &&
          (begun == 0 ? task.carried : !(long_mask >> from & 1) && task.at + from < task.end);
      active = __ballot_sync(kAllLanes, mine);
      end_mask = __ballot_sync(kAllLanes, mine && place.after != key);
      task.carried = (active >> 31) && !(end_mask >> 31);
      more = task.at + kWarp < task.end || task.carried;
    }
    // The next chunk is on its way meanwhile.
    if (more) {
      task.at += kWarp;
    } else {
      task.begin(__shfl_sync(kAllLanes, task.following, 0), tasks, workers, n, scratch);
    }
    if (task.number < tasks.number) place = SortedPlace::load(sorted, task.at + lane, n);
    if (active == 0) continue;
    const unsigned row_ends = piece == kNoPiece ? end_mask : 0;
    Ready ready{};
    if (active >> lane & 1) {
      ready.share = share_of(update, scratch.bags, value);
      if (row_ends >> lane & 1) {
        const TableView& its = tables[ready.share.table];
        const int64_t slot = static_cast<int64_t>(key) - its.first_slot;
        ready.row = reinterpret_cast<float*>(its.rows.at(slot, kNoFrame));
        ready.state = reinterpret_cast<float*>(its.states.at(slot, kNoFrame));
      }
    }
    for (unsigned left = active; left != 0;) {
      // A window: neighbours from position `first` on, of one table, as many as the slots hold.
      const int first = __ffs(static_cast<int>(left)) - 1;
      const uint32_t its_table = __shfl_sync(kAllLanes, ready.share.table, first);
      if (its_table != table) {
        table = its_table;
        dim = tables[table].rows.width;
      }
      const int i = lane - first;  // the lane's position in the window
      const int rows_before = __popc(row_ends & ((1u << lane) - (1u << first)));
      const int used = i + 1 + kOfRow * (rows_before + static_cast<int>(row_ends >> lane & 1));
      const bool fits = i >= 0 && i < kWindow && (left >> lane & 1) && ready.share.table == table &&
                        used <= kSlots<Updater>;
      const unsigned fitting = __ballot_sync(kAllLanes, fits) >> first;
      Window window;
      window.count = __ffs(static_cast<int>(~fitting)) - 1;
      const unsigned all = (1u << window.count) - 1;
      window.ends = end_mask >> first & all;
      window.piece = piece;
      window.table = table;
      left &= ~(all << first);
      const bool own = i >= 0 && i < window.count;
      const bool own_row = own && (row_ends >> lane & 1);
      Stages& stage = stages[turn % 2];
#if __CUDA_ARCH__ >= 900
      if constexpr (kBulk) fence_before_bulk();
#endif
      __syncwarp();
      if (own_row) {
        stage.rows[i] = ready.row;
        stage.states[i] = ready.state;
        if constexpr (Updater::kAdapts) copy_async<4>(&stage.squares[i], ready.state);
      }
      if (kScaled && own) stage.scales[i] = ready.share.scale;
      const Element* const gradients = reinterpret_cast<const Element*>(update.grad.data);
      if constexpr (kBulk) {
#if __CUDA_ARCH__ >= 900
        const uint32_t bytes = dim * sizeof(float);
        CopyBarrier* const barrier = barrier_of(stage);
        if (lane == 0) {
          const int rows = piece == kNoPiece ? __popc(window.ends) : 0;
          barrier->expect_bytes((window.count + kOfRow * rows) * bytes);
        }
        __syncwarp();
        if (own) copy_bulk(stage.slots[i], gradients + ready.share.gradient, bytes, barrier);
        if (own_row) {
          const int slot = window.count + kOfRow * rows_before;
          copy_bulk(stage.slots[slot], ready.row, bytes, barrier, once);
#pragma unroll
          for (int s = 0; s < Updater::kStates; ++s) {
            copy_bulk(stage.slots[slot + 1 + s], ready.state + s * dim, bytes, barrier, once);
          }
        }
#endif
      } else {
        __syncwarp();
        const int32_t column = lane * 4;
#pragma unroll
        for (int k = 0; k < kWindow; ++k) {
          if (k >= window.count) break;
          const int64_t from = __shfl_sync(kAllLanes, ready.share.gradient, first + k);
          if (column < dim) {
            copy_async<4 * sizeof(Element)>(&stage.slots[k][column], gradients + from + column);
          }
        }
        int slot = window.count;
        for (unsigned ends = piece == kNoPiece ? window.ends : 0; ends; ends &= ends - 1) {
          const int k = __ffs(static_cast<int>(ends)) - 1;
          if (column < dim) {
            copy_async<16>(&stage.slots[slot][column], stage.rows[k] + column);
#pragma unroll
            for (int s = 0; s < Updater::kStates; ++s) {
              copy_async<16>(&stage.slots[slot + 1 + s][column],
                             stage.states[k] + s * dim + column);
            }
          }
          slot += kOfRow;
        }
      }
      if (Updater::kAdapts || !kBulk) {
        end_copies();
        wait_for_copies<1>();
      }
      __syncwarp();
      finish_waiting();
      waiting = window;
      ++turn;
    }
  }
  wait_for_copies<0>();
  __syncwarp();
  finish_waiting();
}

}  // namespace

bool streams_runs(const OptimizerConfig& optimizer, const GroupShape& shape) {
  return has_plain_updater(optimizer, shape) && shape.rows_in_hbm && shape.four_wide &&
         shape.widest <= kQuickColumns;
}

void list_long_runs(const Batch& batch, uint64_t no_slot, const Scratch& scratch,
                    cudaStream_t stream) {
  const int64_t threads = (batch.num_ids + kListRounds - 1) / kListRounds;
  list_long_runs_kernel<<<grid_for(threads), kThreads, 0, stream>>>(batch, no_slot, scratch);
  HKV_CUDA_CHECK_LAUNCH();
}

void stream_runs(const TableView* tables, const Update& update, const Scratch& scratch,
                 const GroupShape& shape, cudaStream_t stream) {
  const int64_t n = update.batch.num_ids;
  const auto launch = [&]<typename Updater, typename Element>() {
    const auto kernel = update.pooling.mean || update.pooling.weights != nullptr
                            ? stream_kernel<Updater, Element, true>
                            : stream_kernel<Updater, Element, false>;
    constexpr int kStreamThreads = kStreamWarps * kWarp;
    constexpr int kBytes = kStreamWarps * 2 * sizeof(Stage<kSlots<Updater>>);
    int blocks = 0;
    HKV_CUDA_CHECK(
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes));
    HKV_CUDA_CHECK(
        cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, kStreamThreads, kBytes));
    kernel<<<resident_grid(blocks, n), kStreamThreads, kBytes, stream>>>(tables, update, scratch);
  };
  choose_plain_updater(update.optimizer, shape, [&]<typename Updater>() {
    choose_element(update.grad.type,
                   [&]<typename Element>() { launch.template operator()<Updater, Element>(); });
  });
  HKV_CUDA_CHECK_LAUNCH();
}

}  // namespace torchrec_hkv::hash_table::cuda
