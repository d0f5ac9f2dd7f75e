// Updates rows by segments of equal slots in the sorted order, for any optimizer, row type and
// number of columns. segments.cu is faster for the optimizers and rows that it supports.
//
// A warp takes 32 neighbouring positions and the segments that begin there. Each lane looks up the
// data of one position: the address of its gradient and, at the end of a segment, the row and its
// RowScalars. Gradients, rows and states of several positions are copied to shared memory
// asynchronously, which needs no registers. Each lane copies the columns that it updates, so that
// lanes do not wait for each other. Columns are processed in a loop.

#include "common/cuda_check.h"
#include "common/dependent_launch.cuh"
#include "hash_table/cuda/async_copy.cuh"
#include "hash_table/cuda/offsets.cuh"
#include "hash_table/cuda/update/row_update.cuh"
#include "hash_table/cuda/update/sorted_chunk.cuh"
#include "hash_table/cuda/update/update.cuh"

namespace torchrec_hkv::hash_table::cuda {
namespace {

constexpr int kSegmentThreads = 64;  // of a block; small blocks free their resources early
constexpr int kLanes = kWarp;        // lanes of a row
constexpr int kVectors = 1;          // vectors of a lane in a step

// Layout of a tile's shared memory, in bytes: the sum of the open segment, then places for the data
// of positions.
struct Ring {
  int32_t row;           // offset of the row in a stage, after the gradient
  int32_t states;        // offset of its states
  int32_t state_stride;  // distance between two states
  int32_t stage_bytes;
  int32_t sum;  // size of the tile's sum; the places follow
  int32_t tile_bytes;
};

Ring ring_of(int32_t columns, RowType gradient, int states, int depth) {
  const auto aligned = [](int32_t bytes) { return (bytes + 15) / 16 * 16; };
  Ring ring;
  ring.row = aligned(columns * element_size(gradient));
  ring.states = ring.row + aligned(columns * static_cast<int32_t>(sizeof(float)));
  ring.state_stride = aligned(columns * static_cast<int32_t>(sizeof(float)));
  ring.stage_bytes = ring.states + states * ring.state_stride;
  ring.sum = ring.state_stride;
  ring.tile_bytes = ring.sum + depth * ring.stage_bytes;
  return ring;
}

// Begins to copy kWidth columns of this type.
template <int kWidth>
__device__ __forceinline__ void copy_columns(RowType type, char* to, const char* from,
                                             int32_t column) {
  from = in_global(from);
  if (type == RowType::kFloat32) {
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

// Copies columns of a row of 8 bits, without its scale.
template <int kWidth>
__device__ __forceinline__ void copy_int8(char* to, const char* row, int32_t column) {
  const char* const from = in_global(row) + kInt8Start;
  if constexpr (kWidth == 4) {
    copy_async<4>(to + column, from + column);
  } else {
    to[column] = from[column];
  }
}

// Source of RowUpdate for the position at the end of a segment.
template <int kWidth, bool kInt8>
struct RowInRing {
  const char* stage;
  const Ring& ring;
  const float* sum;  // sum of the segment's earlier positions; null: none
  float scale;       // of the position's gradient
  RowType gradient_type, type;
  float row_scale;  // of a row of 8 bits

  __device__ __forceinline__ Columns<kWidth> gradient(int32_t column) const {
    Columns<kWidth> total =
        sum != nullptr ? Columns<kWidth>::load(sum + column) : Columns<kWidth>::zero();
    total.add(scale, Columns<kWidth>::load(gradient_type, stage, column));
    return total;
  }
  __device__ __forceinline__ Columns<kWidth> value(int32_t column) const {
    if constexpr (kInt8) {
      if (type == RowType::kInt8) {
        return Columns<kWidth>::load_int8(stage + ring.row + column, row_scale);
      }
    }
    return Columns<kWidth>::load(type, stage + ring.row, column);
  }
  __device__ __forceinline__ Columns<kWidth> first(int32_t column) const {
    return Columns<kWidth>::load(reinterpret_cast<const float*>(stage + ring.states) + column);
  }
  __device__ __forceinline__ Columns<kWidth> second(int32_t column) const {
    return Columns<kWidth>::load(
        reinterpret_cast<const float*>(stage + ring.states + ring.state_stride) + column);
  }
};

// kDepth: positions in flight. kInt8: some table has rows of 8 bits. row_class: of the tables to
// update, or kAllRowClasses.
template <int kWidth, bool kColumnStates, int kDepth, bool kInt8>
__global__ void __launch_bounds__(kSegmentThreads, kColumnStates ? 8 : 12)
    segment_kernel(const TableView* __restrict__ tables,
                   const __grid_constant__ UpdateArguments update,
                   const __grid_constant__ UpdateScratch scratch, const __grid_constant__ Ring ring,
                   int row_class) {
  using Lanes = Tile<kLanes>;
  using Steps = ColumnSteps<kLanes, kVectors, kWidth>;
  using Source = RowInRing<kWidth, kInt8>;
  extern __shared__ __align__(16) char shared[];
  char* const tile_memory = shared + threadIdx.x / kLanes * ring.tile_bytes;
  auto* const sum = reinterpret_cast<float*>(tile_memory);
  const auto stage_at = [&](int number) {
    return tile_memory + ring.sum + number * ring.stage_bytes;
  };
  const int lane = Lanes::lane();
  const uint32_t n = scratch.short_positions(update.batch.num_ids);
  const Pairs& sorted = scratch.short_pairs;
  const OptimizerConfig& optimizer = update.optimizer;
  const RowType type = update.grad.type;
  uint32_t at = (blockIdx.x * kSegmentThreads + threadIdx.x) / kLanes * kLanes;
  const uint32_t tile_end = at + kLanes;
  SortedPosition position = SortedPosition::load(sorted, at + lane, n);
  const float rate = *update.learning_rate;
  if (is_refused(update.batch)) return;
  uint32_t held_table = ~0u;  // number of the table in `table`
  TableUpdate table(tables[0], optimizer, rate);
  bool is_continued = false;  // the chunk begins in a segment that the tile has begun
  bool open = false;          // the segment has a sum already
  while (at < n) {
    const SortedChunk<kLanes> chunk(tables, update, scratch, position, at, tile_end, n,
                                    is_continued, row_class);
    const GradientRef& ref = chunk.ref;
    char* row = nullptr;
    float* state = nullptr;
    RowScalars scalars{};
    float row_scale = 0.0f;
    if (chunk.ends) {
      const RowAddress to(*chunk.table, chunk.key);
      row = to.row;
      state = to.state;
      if constexpr (kInt8) {
        if (chunk.table->rows.type == RowType::kInt8) {
          row_scale = *reinterpret_cast<const float*>(row);
        }
      }
      scalars = load_row_scalars(*chunk.table, to.slot, state, optimizer);
    }
    const char* const gradient = update.grad.at(ref.gradient);
    const int32_t dim = chunk.table->dim();
    const RowType row_type = chunk.table->rows.type;
    unsigned to_begin = chunk.mask, to_finish = chunk.mask;
    const unsigned end_mask = Lanes::ballot(chunk.ends);
    is_continued = chunk.continues;
    const auto of_lane = [&](auto value, int source) { return Lanes::of_lane(value, source); };
    const auto pointer_of_lane = [&](auto* pointer, int source) {
      return reinterpret_cast<decltype(pointer)>(
          Lanes::of_lane(reinterpret_cast<unsigned long long>(pointer), source));
    };
    // Begins to copy the data of the next position, if there is one. Always ends a group of copies.
    const auto begin = [&](char* to) {
      if (to_begin != 0) {
        const int source = __ffs(static_cast<int>(to_begin)) - 1;
        to_begin &= to_begin - 1;
        const int32_t source_dim = of_lane(dim, source);
        const char* const source_gradient = pointer_of_lane(gradient, source);
        Steps::for_each(source_dim, [&](int32_t first) {
          Steps::for_columns(source_dim, first, [&](int32_t column) {
            copy_columns<kWidth>(type, to, source_gradient, column);
          });
        });
        if (end_mask >> source & 1) {
          const char* const source_row = pointer_of_lane(row, source);
          const auto source_type =
              static_cast<RowType>(of_lane(static_cast<int>(row_type), source));
          const float* source_state = nullptr;
          if constexpr (kColumnStates) source_state = pointer_of_lane(state, source);
          Steps::for_each(source_dim, [&](int32_t first) {
            Steps::for_columns(source_dim, first, [&](int32_t column) {
              if (kInt8 && source_type == RowType::kInt8) {
                copy_int8<kWidth>(to + ring.row, source_row, column);
              } else {
                copy_columns<kWidth>(source_type, to + ring.row, source_row, column);
              }
              if constexpr (kColumnStates) {
                for (int s = 0; s < column_states(optimizer.kind); ++s) {
                  copy_columns<kWidth>(RowType::kFloat32, to + ring.states + s * ring.state_stride,
                                       reinterpret_cast<const char*>(source_state + s * source_dim),
                                       column);
                }
              }
            });
          });
        }
      }
      end_copies();
    };
#pragma unroll 1
    for (int k = 0; k < kDepth; ++k) begin(stage_at(k));
    int turn = 0;
    while (to_finish != 0) {
      const int source = __ffs(static_cast<int>(to_finish)) - 1;
      to_finish &= to_finish - 1;
      wait_for_copies<kDepth - 1>();
      char* const arrived = stage_at(turn);
      turn = turn + 1 == kDepth ? 0 : turn + 1;
      const float scale = of_lane(ref.scale, source);
      const uint32_t source_table = of_lane(ref.table, source);
      if (source_table != held_table) {
        held_table = source_table;
        table = TableUpdate(tables[held_table], optimizer, rate);
      }
      if (end_mask >> source & 1) {
        RowScalars source_scalars{
            of_lane(scalars.square, source), of_lane(scalars.step, source),
            of_lane(static_cast<unsigned long long>(scalars.rounding), source)};
        const float source_scale = kInt8 ? of_lane(row_scale, source) : 0.0f;
        const Source from{arrived, ring,       open ? sum : nullptr, scale,
                          type,    table.type, source_scale};
        RowUpdate<kLanes, kVectors, kWidth, kColumnStates, kInt8, Source>::run(
            table, from, pointer_of_lane(row, source), pointer_of_lane(state, source),
            source_scalars, sum);
        if (lane == source) scalars = source_scalars;
        open = false;
      } else {
        Steps::for_each(table.dim, [&](int32_t first) {
          Steps::for_columns(table.dim, first, [&](int32_t column) {
            Columns<kWidth> total =
                open ? Columns<kWidth>::load(sum + column) : Columns<kWidth>::zero();
            total.add(scale, Columns<kWidth>::load(type, arrived, column));
            total.store(sum + column);
          });
        });
        open = true;
      }
      begin(arrived);
    }
    if (chunk.ends) store_row_scalars(scalars, dim, state, optimizer);
    if (!is_continued) return;
    at += kLanes;
    position = SortedPosition::load(sorted, at + lane, n);
  }
}

}  // namespace

void update_any_segments(const TableView* tables, const UpdateArguments& update,
                         const UpdateScratch& scratch, const GroupShape& shape, int32_t row_class,
                         cudaStream_t stream) {
  const int64_t n = update.batch.num_ids;
  const int states = column_states(update.optimizer.kind);
  const int32_t columns =
      row_class == kAllRowClasses
          ? shape.widest
          : min(shape.widest, max_columns(static_cast<WidthClass>(row_class % kWidthClasses)));
  const auto launch = [&]<int kWidth>() {
    constexpr int kDepth = 2;
    const Ring ring = ring_of(columns, update.grad.type, states, kDepth);
    const auto kernel = shape.int8_rows ? (states > 0 ? segment_kernel<kWidth, true, kDepth, true>
                                                      : segment_kernel<kWidth, false, kDepth, true>)
                        : states > 0    ? segment_kernel<kWidth, true, kDepth, false>
                                        : segment_kernel<kWidth, false, kDepth, false>;
    LaunchShape launch_shape{
        dim3(static_cast<unsigned>((n + kSegmentThreads - 1) / kSegmentThreads)), kSegmentThreads};
    launch_shape.shared_bytes = kSegmentThreads / kWarp * ring.tile_bytes;
    allow_launch(reinterpret_cast<const void*>(kernel), launch_shape);
    kernel<<<launch_shape.grid, kSegmentThreads, launch_shape.shared_bytes, stream>>>(
        tables, update, scratch, ring, row_class);
    HKV_CUDA_CHECK_LAUNCH();
  };
  if (update.group_four_wide) {
    launch.template operator()<4>();
  } else {
    launch.template operator()<1>();
  }
}

}  // namespace torchrec_hkv::hash_table::cuda
