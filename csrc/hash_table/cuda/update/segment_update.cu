// The update from the sorted order, for any optimizer, any type of row and any number of columns.
//
// A tile of lanes takes as many neighbouring positions of the sorted order as it has lanes, and the
// segments of equal slots that begin there; pieces of long segments are added up by piece_kernel,
// and their rows are updated by long_runs.cu. Each lane looks up what one position needs: where its
// gradient is, and, where a segment ends, its row and what that has once. Gradients, rows and
// states of some positions are on their way to shared memory at any time, and take no registers
// meanwhile. Each lane copies the columns that it works on itself, so that lanes don't wait for
// each other. Columns are worked on in a loop, whatever their number.
//
// Narrow rows are updated by smaller tiles. A group of tables of different widths launches a kernel
// for each width that it has; each skips the positions of other tables.
#include <algorithm>

#include "common/cuda_check.h"
#include "hash_table/cuda/async_copy.cuh"
#include "hash_table/cuda/offsets.cuh"
#include "hash_table/cuda/update/row_update.cuh"
#include "hash_table/cuda/update/update.cuh"

namespace torchrec_hkv::hash_table::cuda {
namespace {

constexpr int kSegmentThreads = 64;  // of a block: small ones make room without waiting for others
// Blocks of a multiprocessor, which bound the registers.
constexpr int segment_blocks(int vectors, bool column_states) {
  return column_states ? (vectors < 4 ? 8 : 6) : (vectors < 4 ? 12 : 10);
}

// What a tile has in shared memory: the sum of the segment that goes on, and places for what
// positions need. Bytes.
struct Ring {
  int32_t row;       // where in a place the row begins, behind the gradient
  int32_t states;    // where its states begin
  int32_t of_state;  // from one state of the columns to the next
  int32_t of_place;
  int32_t sum;  // of the tile's sum, which the places follow
  int32_t of_tile;
};

Ring ring_of(int32_t columns, RowType gradient, int states, int depth) {
  const auto aligned = [](int32_t bytes) { return (bytes + 15) / 16 * 16; };
  Ring ring;
  ring.row = aligned(columns * element_size(gradient));
  ring.states = ring.row + aligned(columns * static_cast<int32_t>(sizeof(float)));
  ring.of_state = aligned(columns * static_cast<int32_t>(sizeof(float)));
  ring.of_place = ring.states + states * ring.of_state;
  ring.sum = ring.of_state;
  ring.of_tile = ring.sum + depth * ring.of_place;
  return ring;
}

// Begins to copy kWidth columns of this type.
template <int kWidth, bool kFloat32>
__device__ __forceinline__ void copy_columns(RowType type, char* to, const char* from,
                                             int32_t column) {
  if (kFloat32 || type == RowType::kFloat32) {
    const int32_t at = column * static_cast<int32_t>(sizeof(float));
    copy_async<4 * kWidth>(to + at, from + at);
    return;
  }
  const int32_t at = column * static_cast<int32_t>(sizeof(uint16_t));
  if constexpr (kWidth == 4) {
    copy_async<8>(to + at, from + at);
  } else {
    *reinterpret_cast<uint16_t*>(to + at) = *reinterpret_cast<const uint16_t*>(from + at);
  }
}
template <int kWidth, bool kFloat32>
__device__ __forceinline__ Columns<kWidth> load_columns(RowType type, const char* from,
                                                        int32_t column) {
  if constexpr (kFloat32) {
    return Columns<kWidth>::load(reinterpret_cast<const float*>(from) + column);
  } else {
    return Columns<kWidth>::load(type, from, column);
  }
}

// What RowUpdate reads of the position where a segment ends.
template <int kWidth, bool kFloat32>
struct RowInRing {
  const char* place;
  const Ring& ring;
  const float* sum;  // of the segment's positions before; null: there are none
  float scale;       // of the position's gradient
  RowType gradient_type, type;

  __device__ __forceinline__ Columns<kWidth> gradient(int32_t column) const {
    Columns<kWidth> total =
        sum != nullptr ? Columns<kWidth>::load(sum + column) : Columns<kWidth>::zero();
    total.add(scale, load_columns<kWidth, kFloat32>(gradient_type, place, column));
    return total;
  }
  __device__ __forceinline__ Columns<kWidth> value(int32_t column) const {
    return load_columns<kWidth, kFloat32>(type, place + ring.row, column);
  }
  __device__ __forceinline__ Columns<kWidth> first(int32_t column) const {
    return Columns<kWidth>::load(reinterpret_cast<const float*>(place + ring.states) + column);
  }
  __device__ __forceinline__ Columns<kWidth> second(int32_t column) const {
    return Columns<kWidth>::load(
        reinterpret_cast<const float*>(place + ring.states + ring.of_state) + column);
  }
};

// kDepth: positions under way. kFloat32: so are gradients and all rows. width_class: of the tables
// to update, or kAllWidths.
template <int kLanes, int kVectors, int kWidth, bool kColumnStates, bool kFloat32, int kDepth>
__global__ void __launch_bounds__(kSegmentThreads, segment_blocks(kVectors, kColumnStates))
    segment_kernel(const TableView* __restrict__ tables, const __grid_constant__ Update update,
                   const __grid_constant__ Scratch scratch, const __grid_constant__ Ring ring,
                   int width_class) {
  using Lanes = Tile<kLanes>;
  using Steps = Step<kLanes, kVectors, kWidth>;
  using Source = RowInRing<kWidth, kFloat32>;
  extern __shared__ __align__(16) char shared[];
  char* const own = shared + threadIdx.x / kLanes * ring.of_tile;
  auto* const sum = reinterpret_cast<float*>(own);
  const auto place_at = [&](int number) { return own + ring.sum + number * ring.of_place; };
  const int lane = Lanes::lane();
  const auto n = static_cast<uint32_t>(update.batch.num_ids);
  const Pairs& sorted = scratch.pairs.pairs;
  const OptimizerConfig& optimizer = update.optimizer;
  const RowType type = update.grad.type;
  uint32_t at = (blockIdx.x * kSegmentThreads + threadIdx.x) / kLanes * kLanes;
  const uint32_t tile_end = at + kLanes;
  SortedPlace place = SortedPlace::load(sorted, at + lane, n);
  const float rate = *update.learning_rate;
  if (is_refused(update.batch)) return;
  uint32_t held = ~0u;  // the table of `table`
  TableUpdate table(tables[0], optimizer, rate);
  bool carried = false;  // the chunk begins in a segment that the tile has begun
  bool open = false;     // the segment has a sum already
  while (at < n) {
    // Which of the chunk's positions are the tile's, and at which of them segments end.
    const uint64_t key = sorted.key_of(place.pair);
    const bool begins = place.before != key;
    const unsigned begin_mask = Lanes::ballot(begins);
    const unsigned long_mask = Lanes::ballot(begins && place.far == key);
    const unsigned begun = begin_mask & ((2u << lane) - 1);
    const int from = 31 - __clz(static_cast<int>(begun));  // where the position's segment begins
    bool mine = at + lane < n && key != update.no_slot &&
                (begun == 0 ? carried : !(long_mask >> from & 1) && at + from < tile_end);
    // What the lane's position needs.
    Share share{};
    const TableView* view = tables;
    if (mine) {
      share = share_of(update, scratch.bags, sorted.value_of(place.pair));
      view = &tables[share.table];
      mine =
          width_class == kAllWidths || static_cast<int>(width_class_of(view->dim())) == width_class;
    }
    const bool ends = mine && place.after != key;
    char* row = nullptr;
    float* state = nullptr;
    RowOnce once{};
    if (ends) {
      const int64_t slot = static_cast<int64_t>(key) - view->first_slot;
      const int64_t frame = frame_to_write(view->frames, slot, true);
      row = view->rows.at(slot, frame);
      state = reinterpret_cast<float*>(view->states.at(slot, frame));
      once = load_once_values(*view, slot, state, optimizer);
    }
    const char* const gradient = update.grad.at(share.gradient);
    const int32_t dim = view->dim();
    const RowType row_type = view->rows.type;
    unsigned to_begin = Lanes::ballot(mine), to_finish = to_begin;
    const unsigned end_mask = Lanes::ballot(ends);
    carried = (to_begin >> (kLanes - 1) & 1) != 0 && (end_mask >> (kLanes - 1) & 1) == 0;
    const auto of_lane = [&](auto value, int source) { return Lanes::of_lane(value, source); };
    const auto pointer_of_lane = [&](auto* pointer, int source) {
      return reinterpret_cast<decltype(pointer)>(
          Lanes::of_lane(reinterpret_cast<unsigned long long>(pointer), source));
    };
    // Begins to copy what the next position needs, if there is one; a group of copies in any case.
    const auto begin = [&](char* to) {
      if (to_begin != 0) {
        const int source = __ffs(static_cast<int>(to_begin)) - 1;
        to_begin &= to_begin - 1;
        const int32_t its_dim = of_lane(dim, source);
        const char* const its_gradient = pointer_of_lane(gradient, source);
        Steps::for_each(its_dim, [&](int32_t first) {
          Steps::for_columns(its_dim, first, [&](int32_t column) {
            copy_columns<kWidth, kFloat32>(type, to, its_gradient, column);
          });
        });
        if (end_mask >> source & 1) {
          const char* const its_row = pointer_of_lane(row, source);
          const auto its_type =
              static_cast<RowType>(kFloat32 ? 0 : of_lane(static_cast<int>(row_type), source));
          const float* its_state = nullptr;
          if constexpr (kColumnStates) its_state = pointer_of_lane(state, source);
          Steps::for_each(its_dim, [&](int32_t first) {
            Steps::for_columns(its_dim, first, [&](int32_t column) {
              copy_columns<kWidth, kFloat32>(its_type, to + ring.row, its_row, column);
              if constexpr (kColumnStates) {
                for (int s = 0; s < column_states(optimizer.kind); ++s) {
                  copy_columns<kWidth, true>(
                      RowType::kFloat32, to + ring.states + s * ring.of_state,
                      reinterpret_cast<const char*>(its_state + s * its_dim), column);
                }
              }
            });
          });
        }
      }
      end_copies();
    };
#pragma unroll 1
    for (int k = 0; k < kDepth; ++k) begin(place_at(k));
    int turn = 0;
    while (to_finish != 0) {
      const int source = __ffs(static_cast<int>(to_finish)) - 1;
      to_finish &= to_finish - 1;
      wait_for_copies<kDepth - 1>();
      char* const arrived = place_at(turn);
      turn = turn + 1 == kDepth ? 0 : turn + 1;
      const float scale = of_lane(share.scale, source);
      const uint32_t its_table = of_lane(share.table, source);
      if (its_table != held) {
        held = its_table;
        table = TableUpdate(tables[held], optimizer, rate);
      }
      if (end_mask >> source & 1) {
        RowOnce its{of_lane(once.square, source), of_lane(once.step, source),
                    of_lane(static_cast<unsigned long long>(once.rounding), source)};
        const Source from{arrived, ring, open ? sum : nullptr, scale, type, table.type};
        RowUpdate<kLanes, kVectors, kWidth, kColumnStates, kFloat32, Source>::run(
            table, from, pointer_of_lane(row, source), pointer_of_lane(state, source), its);
        if (lane == source) once = its;
        open = false;
      } else {
        Steps::for_each(table.dim, [&](int32_t first) {
          Steps::for_columns(table.dim, first, [&](int32_t column) {
            Columns<kWidth> total =
                open ? Columns<kWidth>::load(sum + column) : Columns<kWidth>::zero();
            total.add(scale, load_columns<kWidth, kFloat32>(type, arrived, column));
            total.store(sum + column);
          });
        });
        open = true;
      }
      begin(arrived);
    }
    if (ends) store_once_values(once, dim, state, optimizer);
    if (!carried) return;
    at += kLanes;
    place = SortedPlace::load(sorted, at + lane, n);
  }
}

constexpr int32_t kPieceColumns = kWarp * 4;  // of a column tile
constexpr int kPieceThreads = 128;

// A warp adds up a column tile of a piece of a long segment.
template <int kWidth>
__global__ void __launch_bounds__(kPieceThreads, 8)
    piece_kernel(const TableView* __restrict__ tables, const __grid_constant__ Update update,
                 const __grid_constant__ Scratch scratch) {
  constexpr int kVectors = kPieceColumns / (kWarp * kWidth);
  constexpr int kAhead = 4;
  using Lanes = Tile<kWarp>;
  if (is_refused(update.batch)) return;
  const LongRuns& runs = scratch.long_runs;
  const Pairs& sorted = scratch.pairs.pairs;
  const RowType type = update.grad.type;
  const int lane = Lanes::lane();
  const int32_t tiles = (runs.widest + kPieceColumns - 1) / kPieceColumns;
  const int64_t parts = static_cast<int64_t>(*runs.pieces) * tiles;
  const int64_t warps = static_cast<int64_t>(gridDim.x) * (kPieceThreads / kWarp);
  for (int64_t part = (static_cast<int64_t>(blockIdx.x) * kPieceThreads + threadIdx.x) / kWarp;
       part < parts; part += warps) {
    const int64_t piece = part / tiles;
    const auto first = static_cast<int32_t>(part % tiles) * kPieceColumns;
    const LongRun& run = runs.runs[runs.run_of[piece]];
    const int64_t skipped = (piece - run.first_piece) * kPieceSize;
    const int64_t begin = run.first + skipped;
    const auto length = static_cast<int32_t>(min(kPieceSize, run.length - skipped));
    const auto share_at = [&](int32_t i) {
      return i < length ? share_of(update, scratch.bags, sorted.value(begin + i)) : Share{};
    };
    Share share = share_at(lane);
    const int32_t dim = tables[Lanes::of_lane(share.table, 0)].dim();
    if (first >= dim) continue;
    const auto column_of = [&](int v) { return first + (lane + v * kWarp) * kWidth; };
    Columns<kWidth> sum[kVectors];
#pragma unroll
    for (int v = 0; v < kVectors; ++v) sum[v] = Columns<kWidth>::zero();
    for (int32_t chunk = 0; chunk < length; chunk += kWarp) {
      const Share next = share_at(chunk + kWarp + lane);  // on its way meanwhile
      const int count = min(kWarp, length - chunk);
      for (int group = 0; group < count; group += kAhead) {
        Columns<kWidth> gradient[kAhead][kVectors];
#pragma unroll
        for (int k = 0; k < kAhead; ++k) {
          if (group + k >= count) break;
          const char* const from = update.grad.at(Lanes::of_lane(share.gradient, group + k));
#pragma unroll
          for (int v = 0; v < kVectors; ++v) {
            gradient[k][v] = column_of(v) < dim ? Columns<kWidth>::load(type, from, column_of(v))
                                                : Columns<kWidth>::zero();
          }
        }
#pragma unroll
        for (int k = 0; k < kAhead; ++k) {
          if (group + k >= count) break;
          const float scale = Lanes::of_lane(share.scale, group + k);
#pragma unroll
          for (int v = 0; v < kVectors; ++v) sum[v].add(scale, gradient[k][v]);
        }
      }
      share = next;
    }
    float* const to = runs.sums + piece * runs.widest;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      if (column_of(v) < dim) sum[v].store(to + column_of(v));
    }
  }
}

}  // namespace

void update_segments(const TableView* tables, const Update& update, const Scratch& scratch,
                     const GroupShape& shape, cudaStream_t stream) {
  const int64_t n = update.batch.num_ids;
  // Long segments first: their rows are updated last.
  if (n > kLongest) {
    const auto kernel = update.group_four_wide ? piece_kernel<4> : piece_kernel<1>;
    const int64_t parts = (n / kLongest + 1) * ((shape.widest + kPieceColumns - 1) / kPieceColumns);
    kernel<<<resident_grid(16, parts * kWarp), kPieceThreads, 0, stream>>>(tables, update, scratch);
    HKV_CUDA_CHECK_LAUNCH();
  }
  const int states = column_states(update.optimizer.kind);
  const bool float32 = shape.float32_rows && update.grad.type == RowType::kFloat32;
  // kVectors: vectors a lane, for float32 rows. 16-bit rows have one: with more, the unrolled code
  // of their rounding outgrows the instruction cache.
  const auto launch = [&]<int kLanes, int kVectors, int kWidth, int kDepth>(int32_t columns,
                                                                            int width_class) {
    constexpr int kTiles = kSegmentThreads / kLanes;
    const Ring ring = ring_of(columns, update.grad.type, states, kDepth);
    const int bytes = kTiles * ring.of_tile;
    const int64_t blocks = (n + kSegmentThreads - 1) / kSegmentThreads;
    const auto start = [&](auto kernel) {
      HKV_CUDA_CHECK(
          cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
      kernel<<<static_cast<unsigned>(blocks), kSegmentThreads, bytes, stream>>>(
          tables, update, scratch, ring, width_class);
      HKV_CUDA_CHECK_LAUNCH();
    };
    if constexpr (kWidth == 4) {
      if (float32) {
        start(states > 0 ? segment_kernel<kLanes, kVectors, 4, true, true, kDepth>
                         : segment_kernel<kLanes, kVectors, 4, false, true, kDepth>);
        return;
      }
    }
    start(states > 0 ? segment_kernel<kLanes, 1, kWidth, true, false, kDepth>
                     : segment_kernel<kLanes, 1, kWidth, false, false, kDepth>);
  };
  if (!update.group_four_wide) {
    launch.template operator()<kWarp, 1, 1, 2>(shape.widest, kAllWidths);
    return;
  }
  const bool several = (shape.width_classes & (shape.width_classes - 1)) != 0;
  for (int width = 0; width < kWidthClasses; ++width) {
    if ((shape.width_classes >> width & 1) == 0) continue;
    const auto width_class = static_cast<WidthClass>(width);
    const int32_t columns = std::min(shape.widest, most_columns(width_class));
    const int chosen = several ? width : kAllWidths;
    // A row has as many lanes as it has vectors, as far as a warp goes: several rows of a warp,
    // whose segments differ in length, wait for each other.
    switch (width_class) {
      case WidthClass::k32:
        launch.template operator()<8, 1, 4, 4>(columns, chosen);
        break;
      case WidthClass::k64:
        launch.template operator()<16, 1, 4, 4>(columns, chosen);
        break;
      case WidthClass::k128:
        launch.template operator()<kWarp, 1, 4, 4>(columns, chosen);
        break;
      case WidthClass::k256:
        launch.template operator()<kWarp, 2, 4, 4>(columns, chosen);
        break;
      default:
        launch.template operator()<kWarp, 4, 4, 2>(columns, chosen);
        break;
    }
  }
}

}  // namespace torchrec_hkv::hash_table::cuda
