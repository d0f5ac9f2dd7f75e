// The update of one row by a tile of lanes: the formulas of common/optimizers.h for any optimizer,
// any type of row and any number of columns. A lane has vectors of kWidth columns, kLanes * kWidth
// columns apart. Rows with more columns than the tile has at once are updated by column tiles.
#pragma once

#include <cstdint>

#include "common/optimizers.h"
#include "common/rounding.h"
#include "hash_table/cuda/bucket.cuh"
#include "hash_table/cuda/entry.cuh"
#include "hash_table/cuda/frames.cuh"
#include "hash_table/cuda/tile.cuh"

namespace torchrec_hkv::hash_table::cuda {

// Kernels are compiled once for the optimizers whose columns have no state, which need few
// registers, and once for the others.
__host__ __device__ inline bool has_column_states(const OptimizerConfig& optimizer) {
  return column_states(optimizer.kind) > 0;
}

// kWidth neighbouring values of float32 or 16 bits as they are stored: the type is known at run
// time, and nothing waits for them until they are widened.
template <int kWidth>
struct RawColumns {
  uint32_t words[kWidth];

  __device__ __forceinline__ static RawColumns zero() {
    RawColumns raw;
#pragma unroll
    for (int k = 0; k < kWidth; ++k) raw.words[k] = 0;
    return raw;
  }
  __device__ __forceinline__ static RawColumns load(RowType type, const char* row, int32_t column) {
    RawColumns raw = zero();
    if (type == RowType::kFloat32) {
      const auto* from = reinterpret_cast<const uint32_t*>(row) + column;
      if constexpr (kWidth == 4) {
        const uint4 x = *reinterpret_cast<const uint4*>(from);
        raw.words[0] = x.x, raw.words[1] = x.y, raw.words[2] = x.z, raw.words[3] = x.w;
      } else {
        raw.words[0] = *from;
      }
    } else {
      const auto* from = reinterpret_cast<const uint16_t*>(row) + column;
      if constexpr (kWidth == 4) {
        const uint2 x = *reinterpret_cast<const uint2*>(from);
        raw.words[0] = x.x, raw.words[1] = x.y;
      } else {
        raw.words[0] = *from;
      }
    }
    return raw;
  }
  __device__ __forceinline__ Columns<kWidth> widened(RowType type) const {
    Columns<kWidth> columns;
    if (type == RowType::kFloat32) {
#pragma unroll
      for (int k = 0; k < kWidth; ++k) columns.v[k] = __uint_as_float(words[k]);
    } else if constexpr (kWidth == 4) {
#pragma unroll
      for (int k = 0; k < kWidth; ++k) {
        columns.v[k] = widen(type, static_cast<uint16_t>(words[k / 2] >> k % 2 * 16));
      }
    } else {
      columns.v[0] = widen(type, static_cast<uint16_t>(words[0]));
    }
    return columns;
  }
};

// The columns of one column tile that a lane has.
template <int kLanes, int kVectors, int kWidth>
struct TileColumns {
  // Columns that a tile of lanes has at once.
  static constexpr int32_t kColumns = kLanes * kVectors * kWidth;

  Columns<kWidth> v[kVectors];

  // `first`: of the column tile.
  __device__ __forceinline__ static int32_t column(int vector, int32_t first) {
    return first + (Tile<kLanes>::lane() + vector * kLanes) * kWidth;
  }
  __device__ __forceinline__ static TileColumns zero() {
    TileColumns columns;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) columns.v[i] = Columns<kWidth>::zero();
    return columns;
  }
  __device__ __forceinline__ static TileColumns load(const float* row, int32_t dim, int32_t first) {
    TileColumns columns = zero();
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      if (column(i, first) < dim) columns.v[i] = Columns<kWidth>::load(row + column(i, first));
    }
    return columns;
  }
  __device__ __forceinline__ void store(float* row, int32_t dim, int32_t first) const {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      if (column(i, first) < dim) v[i].store(row + column(i, first));
    }
  }
};

// The same as they are stored.
template <int kLanes, int kVectors, int kWidth>
struct RawTileColumns {
  using Widened = TileColumns<kLanes, kVectors, kWidth>;

  RawColumns<kWidth> v[kVectors];

  __device__ __forceinline__ static RawTileColumns load(RowType type, const char* row, int32_t dim,
                                                        int32_t first) {
    RawTileColumns columns;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const int32_t column = Widened::column(i, first);
      columns.v[i] =
          column < dim ? RawColumns<kWidth>::load(type, row, column) : RawColumns<kWidth>::zero();
    }
    return columns;
  }
  __device__ __forceinline__ Widened widened(RowType type) const {
    Widened columns;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) columns.v[i] = v[i].widened(type);
    return columns;
  }
};

// Updates rows of one table. What depends on the table alone is computed once. All lanes of a tile
// call its functions together. The table's optimizer_step counts the update already.
template <int kLanes, int kVectors, int kWidth, bool kColumnStates>
class RowUpdate {
 public:
  using Gradient = TileColumns<kLanes, kVectors, kWidth>;

  // A row and its state on their way: the first column tile, and what the row has once.
  struct Row {
    char* values;
    float* state;
    float old_square;  // of optimizers that adapt by row
    int64_t id;        // where rounding is stochastic
    RawTileColumns<kLanes, kVectors, kWidth> value;
    Gradient first, second;  // states of the columns
  };

  __device__ __forceinline__ RowUpdate(const TableView& table, const OptimizerConfig& optimizer,
                                       float learning_rate)
      : table_(&table),
        optimizer_(&optimizer),
        learning_rate_(learning_rate),
        dim_(table.dim()),
        type_(table.rows.type),
        rounds_by_chance_(optimizer.stochastic_rounding && type_ != RowType::kFloat32) {
    rounding_of_step_ = 0;
    if (rounds_by_chance_) {
      rounding_of_step_ = rounding_key_of_step(optimizer.rounding_seed, table.initial_rows.seed,
                                               *table.optimizer_step);
    }
    if (!optimizer.own_steps) {
      terms_ = begin_row(optimizer, learning_rate, static_cast<float>(*table.optimizer_step));
    }
  }

  __device__ __forceinline__ int32_t dim() const { return dim_; }

  // Begins to read a row.
  __device__ __forceinline__ Row load(int64_t slot) const {
    Row row;
    const int64_t frame = frame_to_write(table_->frames, slot, Tile<kLanes>::lane() == 0);
    row.values = table_->rows.at(slot, frame);
    row.state = reinterpret_cast<float*>(table_->states.at(slot, frame));
    load_columns(row, 0);
    row.old_square = 0.0f;
    row.id = 0;
    if (adapts_by_row(optimizer_->kind)) {
      row.old_square = row.state[row_square_column(optimizer_->kind, dim_)];
    }
    if (rounds_by_chance_) row.id = id_of_slot(*table_, slot);
    return row;
  }

  // Updates a row of at most Gradient::kColumns columns.
  __device__ __forceinline__ void finish(Row& row, const Gradient& gradient) const {
    finish_tiles<false>(row, [&](int32_t) -> const Gradient& { return gradient; });
  }

  // Updates a row of any number of columns. gradient(first): of the column tile that begins there.
  // It is called for tiles in both directions, up to three times for each.
  template <typename GradientOf>
  __device__ __forceinline__ void finish_wide(Row& row, const GradientOf& gradient) const {
    finish_tiles<true>(row, gradient);
  }

 private:
  static constexpr int32_t kColumns = Gradient::kColumns;

  const TableView* table_;
  const OptimizerConfig* optimizer_;
  float learning_rate_;
  int32_t dim_;
  RowType type_;
  bool rounds_by_chance_;
  uint64_t rounding_of_step_;
  RowTerms terms_;

  __device__ __forceinline__ void load_columns(Row& row, int32_t first) const {
    row.value = RawTileColumns<kLanes, kVectors, kWidth>::load(type_, row.values, dim_, first);
    if constexpr (kColumnStates) {
      const int states = column_states(optimizer_->kind);
      row.first = row.second = Gradient::zero();
      if (states >= 1) row.first = Gradient::load(row.state, dim_, first);
      if (states >= 2) row.second = Gradient::load(row.state + dim_, dim_, first);
    }
  }
  __device__ __forceinline__ void store_columns(const Row& row, const Gradient& value,
                                                uint64_t rounding, int32_t first) const {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const int32_t column = Gradient::column(i, first);
      if (column >= dim_) continue;
      if (!rounds_by_chance_) {
        value.v[i].store(type_, row.values, column);
        continue;
      }
      uint16_t narrowed[kWidth];
#pragma unroll
      for (int k = 0; k < kWidth; ++k) {
        const uint32_t draw =
            rounding_draw(rounding, static_cast<uint32_t>(table_->column_offset + column + k));
        narrowed[k] = narrow_by_chance(type_, value.v[i].v[k], draw);
      }
      auto* const to = reinterpret_cast<uint16_t*>(row.values) + column;
      if constexpr (kWidth == 4) {
        *reinterpret_cast<ushort4*>(to) =
            make_ushort4(narrowed[0], narrowed[1], narrowed[2], narrowed[3]);
      } else {
        *to = narrowed[0];
      }
    }
  }

  // Calls visit(first) for the first columns of all column tiles, in order or from the last one on.
  template <bool kWide, typename Visit>
  __device__ __forceinline__ void for_tiles(bool backwards, const Visit& visit) const {
    if constexpr (!kWide) {
      visit(0);
    } else {
      const int32_t last = (dim_ - 1) / kColumns * kColumns;
      for (int32_t at = 0; at <= last; at += kColumns) visit(backwards ? last - at : at);
    }
  }

  // The sum over all columns of what term(vector, k, value, gradient) gives.
  template <bool kWide, typename GradientOf, typename Term>
  __device__ __forceinline__ float sum_columns(Row& row, const GradientOf& gradient_of_tile,
                                               const Term& term) const {
    float sum = 0.0f;
    for_tiles<kWide>(false, [&](int32_t first) {
      const Gradient& gradient = gradient_of_tile(first);
      if (kWide && optimizer_->coupled_decay != 0.0f) load_columns(row, first);
      const Gradient value = row.value.widened(type_);
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
#pragma unroll
        for (int k = 0; k < kWidth; ++k) sum += term(value.v[i].v[k], gradient.v[i].v[k]);
      }
    });
    return Tile<kLanes>::sum(sum);
  }

  template <bool kWide, typename GradientOf>
  __device__ __forceinline__ void finish_tiles(Row& row, const GradientOf& gradient_of_tile) const {
    const OptimizerConfig& optimizer = *optimizer_;
    const int lane = Tile<kLanes>::lane();
    RowTerms terms = terms_;
    if (optimizer.own_steps) {
      float* const own = row.state + own_step_column(optimizer.kind, dim_);
      const float step = Tile<kLanes>::of_lane(lane == 0 ? *own + 1.0f : 0.0f, 0);
      terms = begin_row(optimizer, learning_rate_, step);
      if (lane == 0) *own = step;
    }
    if (clips_by_norm(optimizer)) {
      const float squares = sum_columns<kWide>(row, gradient_of_tile, [&](float, float gradient) {
        const float g = clipped(optimizer, gradient);
        return g * g;
      });
      clip_row(optimizer, squares, &terms);
    }
    if (adapts_by_row(optimizer.kind)) {
      const float squares =
          sum_columns<kWide>(row, gradient_of_tile, [&](float value, float gradient) {
            const float g = gradient_of(optimizer, terms, value, gradient);
            return g * g;
          });
      const float renewed = adapt_row(optimizer, squares, dim_, row.old_square, &terms);
      if (lane == 0) row.state[row_square_column(optimizer.kind, dim_)] = renewed;
    }
    const uint64_t rounding = rounds_by_chance_ ? rounding_key(rounding_of_step_, row.id) : 0;
    if constexpr (kColumnStates) {
      if (optimizer.kind == Optimizer::kLamb) {
        apply_lamb<kWide>(row, terms, rounding, gradient_of_tile);
        return;
      }
    }
    for_tiles<kWide>(true, [&](int32_t first) {
      if (kWide) load_columns(row, first);
      const Gradient& gradient = gradient_of_tile(first);
      Gradient value = row.value.widened(type_);
      if constexpr (!kColumnStates) {
        // Row-wise Adagrad's columns have SGD's formula; its rate is its own.
        update_columns<Optimizer::kSgd>(row, terms, gradient, value, first);
      } else {
        switch (optimizer.kind) {
          case Optimizer::kMomentum:
            update_columns<Optimizer::kMomentum>(row, terms, gradient, value, first);
            break;
          case Optimizer::kAdagrad:
            update_columns<Optimizer::kAdagrad>(row, terms, gradient, value, first);
            break;
          case Optimizer::kAdam:
            update_columns<Optimizer::kAdam>(row, terms, gradient, value, first);
            break;
          case Optimizer::kRowWiseAdam:
            update_columns<Optimizer::kRowWiseAdam>(row, terms, gradient, value, first);
            break;
          case Optimizer::kFtrl:
            update_columns<Optimizer::kFtrl>(row, terms, gradient, value, first);
            break;
          default:
            break;
        }
      }
      store_columns(row, value, rounding, first);
    });
  }

  template <Optimizer kKind>
  __device__ __forceinline__ void update_columns(Row& row, const RowTerms& terms,
                                                 const Gradient& gradient, Gradient& value,
                                                 int32_t first_column) const {
    float unused = 0.0f;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
#pragma unroll
      for (int k = 0; k < kWidth; ++k) {
        float& first = column_states(kKind) >= 1 ? row.first.v[i].v[k] : unused;
        float& second = column_states(kKind) >= 2 ? row.second.v[i].v[k] : unused;
        value.v[i].v[k] = update_column<kKind>(*optimizer_, terms, value.v[i].v[k],
                                               gradient.v[i].v[k], first, second);
      }
    }
    if constexpr (column_states(kKind) >= 1) row.first.store(row.state, dim_, first_column);
    if constexpr (column_states(kKind) >= 2) {
      row.second.store(row.state + dim_, dim_, first_column);
    }
  }

  // The direction is known when all columns have their new moments.
  template <bool kWide, typename GradientOf>
  __device__ __forceinline__ void apply_lamb(Row& row, const RowTerms& terms, uint64_t rounding,
                                             const GradientOf& gradient_of_tile) const {
    float row_squares = 0.0f, direction_squares = 0.0f;
    for_tiles<kWide>(true, [&](int32_t first) {
      if (kWide) load_columns(row, first);
      const Gradient& gradient = gradient_of_tile(first);
      const Gradient value = row.value.widened(type_);
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
        if (Gradient::column(i, first) >= dim_) continue;
#pragma unroll
        for (int k = 0; k < kWidth; ++k) {
          const float old = value.v[i].v[k];
          float &mean = row.first.v[i].v[k], &square = row.second.v[i].v[k];
          update_moments(*optimizer_, terms, old, gradient.v[i].v[k], mean, square);
          const float direction = lamb_direction(*optimizer_, terms, old, mean, square);
          row_squares += old * old;
          direction_squares += direction * direction;
        }
      }
      row.first.store(row.state, dim_, first);
      row.second.store(row.state + dim_, dim_, first);
    });
    const float rate = terms.rate * trust_ratio(Tile<kLanes>::sum(row_squares),
                                                Tile<kLanes>::sum(direction_squares));
    for_tiles<kWide>(false, [&](int32_t first) {
      if (kWide) load_columns(row, first);  // a lane reads what it has written itself
      Gradient value = row.value.widened(type_);
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
#pragma unroll
        for (int k = 0; k < kWidth; ++k) {
          value.v[i].v[k] -= rate * lamb_direction(*optimizer_, terms, value.v[i].v[k],
                                                   row.first.v[i].v[k], row.second.v[i].v[k]);
        }
      }
      store_columns(row, value, rounding, first);
    });
  }
};

}  // namespace torchrec_hkv::hash_table::cuda
