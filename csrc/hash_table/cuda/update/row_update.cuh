// The update of one row by a tile of lanes: the formulas of common/optimizers.h for any optimizer,
// any type of row and any number of columns.
#pragma once

#include <cstdint>

#include "common/optimizers.h"
#include "common/rounding.h"
#include "hash_table/cuda/hbm_cache/frames.cuh"
#include "hash_table/cuda/int8_row.cuh"
#include "hash_table/cuda/row_vector.cuh"
#include "hash_table/cuda/tile.cuh"
#include "hash_table/cuda/update/table_update.cuh"

namespace torchrec_hkv::hash_table::cuda {

// Updates a row. Called by all lanes of a tile.
//
// source: gradient(column), value(column), first(column) and second(column) return the row's
// gradient, values and states from this column on, as Columns<kWidth>. They are called up to three
// times for each column. The results go to `values` and `state`, and to `scalars`, which the caller
// stores. kInt8: rows may be of 8 bits. Their columns are kept in `new_values`, [dim], until the
// row's scale is known. The source may read gradients there, because a lane writes only its own
// columns, after it has read them for the last time.
template <int kLanes, int kVectors, int kWidth, bool kColumnStates, bool kInt8, typename Source>
class RowUpdate {
 public:
  __device__ __forceinline__ static void run(const TableUpdate& table, const Source& source,
                                             char* values, float* state, RowScalars& scalars,
                                             float* new_values) {
    RowUpdate update(table, source, values, state, new_values);
    update.update(scalars);
    if constexpr (kInt8) {
      if (table.type == RowType::kInt8) update.store_int8(scalars.rounding);
    }
  }

 private:
  using Steps = ColumnSteps<kLanes, kVectors, kWidth>;
  struct StepColumns {  // the lane's columns in a step
    Columns<kWidth> v[kVectors];
  };

  const TableUpdate& table_;
  const Source& source_;
  const GlobalPointer<char> values_;
  const GlobalPointer<float> state_;
  float* const new_values_;
  mutable uint32_t largest_ = 0;  // magnitude_bits of the lane's columns in `new_values_`

  __device__ __forceinline__ RowUpdate(const TableUpdate& table, const Source& source, char* values,
                                       float* state, float* new_values)
      : table_(table), source_(source), values_(values), state_(state), new_values_(new_values) {}

  // All reads of a step come before its first write, because the compiler can't know that they do
  // not alias.
  template <typename Read>
  __device__ __forceinline__ StepColumns read(int32_t first, const Read& read_columns) const {
    StepColumns columns;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const int32_t column = Steps::column(v, first);
      columns.v[v] = column < table_.dim ? read_columns(column) : Columns<kWidth>::zero();
    }
    return columns;
  }
  __device__ __forceinline__ StepColumns gradient(int32_t first) const {
    return read(first, [&](int32_t column) { return source_.gradient(column); });
  }
  __device__ __forceinline__ StepColumns value(int32_t first) const {
    return read(first, [&](int32_t column) { return source_.value(column); });
  }
  __device__ __forceinline__ StepColumns first_state(int32_t first) const {
    return read(first, [&](int32_t column) { return source_.first(column); });
  }
  __device__ __forceinline__ StepColumns second_state(int32_t first) const {
    return read(first, [&](int32_t column) { return source_.second(column); });
  }

  __device__ __forceinline__ void update(RowScalars& scalars) const {
    const OptimizerConfig& optimizer = *table_.optimizer;
    RowTerms terms = table_.terms;
    if (optimizer.own_steps) {
      scalars.step += 1.0f;
      terms = begin_row(optimizer, table_.learning_rate, scalars.step);
    }
    if (clips_by_norm(optimizer)) {
      const float squares = sum_columns(false, [&](float, float gradient) {
        const float g = clipped(optimizer, gradient);
        return g * g;
      });
      clip_row(optimizer, squares, &terms);
    }
    if (adapts_by_row(optimizer.kind)) {
      float squares;
      if (table_.plain) {
        squares = sum_columns(false, [](float, float gradient) { return gradient * gradient; });
      } else {
        squares = sum_columns(optimizer.coupled_decay != 0.0f, [&](float value, float gradient) {
          const float g = gradient_of(optimizer, terms, value, gradient);
          return g * g;
        });
      }
      scalars.square = adapt_row(optimizer, squares, table_.dim, scalars.square, &terms);
    }
    if (limits_norm(optimizer)) {
      const float squares = sum_columns(true, [&](float value, float gradient) {
        const float new_value = moved(terms, value, gradient_of(optimizer, terms, value, gradient));
        return new_value * new_value;
      });
      limit_row(optimizer, squares, &terms);
    }
    if constexpr (!kColumnStates) {
      // Row-wise Adagrad's columns have SGD's formula, with the row's own rate in `terms`.
      update_columns<Optimizer::kSgd>(terms, scalars.rounding);
    } else {
      switch (optimizer.kind) {
        case Optimizer::kMomentum:
          return update_columns<Optimizer::kMomentum>(terms, scalars.rounding);
        case Optimizer::kAdagrad:
          return update_columns<Optimizer::kAdagrad>(terms, scalars.rounding);
        case Optimizer::kAdam:
          return update_columns<Optimizer::kAdam>(terms, scalars.rounding);
        case Optimizer::kRowWiseAdam:
          return update_columns<Optimizer::kRowWiseAdam>(terms, scalars.rounding);
        case Optimizer::kFtrl:
          return update_columns<Optimizer::kFtrl>(terms, scalars.rounding);
        case Optimizer::kLamb:
          return apply_lamb(terms, scalars.rounding);
        default:
          return;
      }
    }
  }

  // The sum of term(value, gradient) over all columns. reads: whether values are loaded; otherwise
  // they are zeros.
  template <typename Term>
  __device__ __forceinline__ float sum_columns(bool reads, const Term& term) const {
    float sum = 0.0f;
    Steps::for_each(table_.dim, [&](int32_t first) {
      const StepColumns gradients = gradient(first);
      StepColumns values{};
      if (reads) values = value(first);
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
#pragma unroll
        for (int k = 0; k < kWidth; ++k) sum += term(values.v[v].v[k], gradients.v[v].v[k]);
      }
    });
    return Tile<kLanes>::sum(sum);
  }

  template <Optimizer kKind>
  __device__ __forceinline__ void update_columns(const RowTerms& terms, uint64_t rounding) const {
    const OptimizerConfig& optimizer = *table_.optimizer;
    constexpr int kStates = column_states(kKind);
    Steps::for_each(table_.dim, [&](int32_t first_column) {
      StepColumns g = gradient(first_column), values = value(first_column), first{}, second{};
      if constexpr (kStates >= 1) first = first_state(first_column);
      if constexpr (kStates >= 2) second = second_state(first_column);
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        if (!table_.plain) {
#pragma unroll
          for (int k = 0; k < kWidth; ++k) {
            g.v[v].v[k] = gradient_of(optimizer, terms, values.v[v].v[k], g.v[v].v[k]);
          }
        }
#pragma unroll
        for (int k = 0; k < kWidth; ++k) {
          values.v[v].v[k] = move_column<kKind>(optimizer, terms, values.v[v].v[k], g.v[v].v[k],
                                                first.v[v].v[k], second.v[v].v[k]);
        }
      }
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        const int32_t column = Steps::column(v, first_column);
        if (column >= table_.dim) break;
        if constexpr (kStates >= 1) first.v[v].store(state_ + column);
        if constexpr (kStates >= 2) second.v[v].store(state_ + table_.dim + column);
        store(values.v[v], column, rounding);
      }
    });
  }

  // The size of the step depends on the new moments of all columns. These are computed twice: for
  // the size and for the update.
  __device__ __forceinline__ void apply_lamb(const RowTerms& terms, uint64_t rounding) const {
    const OptimizerConfig& optimizer = *table_.optimizer;
    float row_squares = 0.0f, direction_squares = 0.0f;
    const auto for_each_direction = [&](const auto& visit) {
      Steps::for_each(table_.dim, [&](int32_t first_column) {
        const StepColumns g = gradient(first_column), values = value(first_column);
        StepColumns first = first_state(first_column), second = second_state(first_column);
        Steps::for_columns(table_.dim, first_column, [&](int32_t column) {
          const int v = (column - first_column) / (kLanes * kWidth);
          Columns<kWidth> direction;
#pragma unroll
          for (int k = 0; k < kWidth; ++k) {
            const float old = values.v[v].v[k];
            update_moments(optimizer, terms, old, g.v[v].v[k], first.v[v].v[k], second.v[v].v[k]);
            direction.v[k] =
                lamb_direction(optimizer, terms, old, first.v[v].v[k], second.v[v].v[k]);
          }
          visit(column, values.v[v], first.v[v], second.v[v], direction);
        });
      });
    };
    using Vector = Columns<kWidth>;
    for_each_direction(
        [&](int32_t, const Vector& value, const Vector&, const Vector&, const Vector& direction) {
          row_squares += value.dot(value);
          direction_squares += direction.dot(direction);
        });
    const float rate = terms.rate * trust_ratio(Tile<kLanes>::sum(row_squares),
                                                Tile<kLanes>::sum(direction_squares));
    for_each_direction([&](int32_t column, Vector value, const Vector& first, const Vector& second,
                           const Vector& direction) {
      value.add(-rate, direction);
      first.store(state_ + column);
      second.store(state_ + table_.dim + column);
      store(value, column, rounding);
    });
  }

  __device__ __forceinline__ void store(const Columns<kWidth>& value, int32_t column,
                                        uint64_t rounding) const {
    if constexpr (kInt8) {
      if (table_.type == RowType::kInt8) {
        value.store(new_values_ + column);
#pragma unroll
        for (int k = 0; k < kWidth; ++k) largest_ = max(largest_, magnitude_bits(value.v[k]));
        return;
      }
    }
    if (table_.type == RowType::kFloat32) {
      value.store(reinterpret_cast<float*>(values_.get()) + column);
    } else {
      store_narrow(value, column, rounding);
    }
  }
  // Stores the row from `new_values_`.
  __device__ __forceinline__ void store_int8(uint64_t rounding) const {
    const Int8Scale scale = int8_scale(largest_of_tile<kLanes>(largest_));
    Steps::for_each(table_.dim, [&](int32_t first) {
      Steps::for_columns(table_.dim, first, [&](int32_t column) {
        const auto value = Columns<kWidth>::load(new_values_ + column);
        const uint64_t bits = rounding_bits(rounding, static_cast<uint32_t>(column) / 4);
        const bool zero = scale.inverse == 0.0f;
        char* const to = values_ + kInt8Start + column;
        if constexpr (kWidth == 4) {
          *reinterpret_cast<uint32_t*>(to) =
              zero ? 0 : pack_int8_by_chance(value.v, scale.inverse, bits);
        } else {
          const uint32_t draw = rounding_draw_of(bits, static_cast<uint32_t>(column));
          *to = zero ? 0
                     : static_cast<char>(int8_by_chance(value.v[0], scale.inverse, draw) >> 16 ^
                                         kInt8Signs);
        }
      });
    });
    if (Tile<kLanes>::lane() == 0) *reinterpret_cast<float*>(values_.get()) = scale.scale;
  }
  __device__ __forceinline__ void store_narrow(const Columns<kWidth>& value, int32_t column,
                                               uint64_t rounding) const {
    uint16_t narrowed[kWidth];
    if (!table_.rounds_by_chance) {
#pragma unroll
      for (int k = 0; k < kWidth; ++k) narrowed[k] = narrow(table_.type, value.v[k]);
    } else {
      const uint32_t at = table_.column_offset + static_cast<uint32_t>(column);
      const bool one_quad = kWidth == 4 && at % 4 == 0;  // one draw for four columns
      uint64_t bits = rounding_bits(rounding, at / 4);
#pragma unroll
      for (uint32_t k = 0; k < kWidth; ++k) {
        if (k > 0 && !one_quad) bits = rounding_bits(rounding, (at + k) / 4);
        narrowed[k] = narrow_by_chance(table_.type, value.v[k], rounding_draw_of(bits, at + k));
      }
    }
    auto* const to = reinterpret_cast<uint16_t*>(values_.get()) + column;
    if constexpr (kWidth == 4) {
      *reinterpret_cast<ushort4*>(to) =
          make_ushort4(narrowed[0], narrowed[1], narrowed[2], narrowed[3]);
    } else {
      *to = narrowed[0];
    }
  }
};

// Source of RowUpdate for a row in global memory.
template <int kWidth, bool kInt8, typename GradientOf>
struct RowInMemory {
  const TableUpdate& table;
  GlobalPointer<const char> values;
  GlobalPointer<const float> state;
  const GradientOf& gradient_of_column;

  __device__ __forceinline__ Columns<kWidth> gradient(int32_t column) const {
    return gradient_of_column(column);
  }
  __device__ __forceinline__ Columns<kWidth> value(int32_t column) const {
    if constexpr (kInt8) return Columns<kWidth>::load_any(table.type, values, column);
    return Columns<kWidth>::load(table.type, values, column);
  }
  __device__ __forceinline__ Columns<kWidth> first(int32_t column) const {
    return Columns<kWidth>::load(state + column);
  }
  __device__ __forceinline__ Columns<kWidth> second(int32_t column) const {
    return Columns<kWidth>::load(state + table.dim + column);
  }
};

// Updates a row in global memory, by a warp. gradient(column): Columns<kWidth>. new_values: as for
// RowUpdate.
template <int kWidth, bool kColumnStates, bool kInt8, typename GradientOf>
__device__ __forceinline__ void update_row_in_memory(const TableView& view,
                                                     const OptimizerConfig& optimizer,
                                                     float learning_rate, int64_t slot,
                                                     const GradientOf& gradient,
                                                     float* new_values) {
  const TableUpdate table(view, optimizer, learning_rate);
  const bool is_leader = Tile<kWarp>::lane() == 0;
  const int64_t frame = frame_to_write(view.frames, slot, is_leader);
  char* const values = view.rows.at(slot, frame);
  auto* const state = reinterpret_cast<float*>(view.states.at(slot, frame));
  RowScalars scalars = load_row_scalars(view, slot, state, optimizer);
  __syncwarp();  // all lanes have read them
  using Source = RowInMemory<kWidth, kInt8, GradientOf>;
  const Source source{table, values, state, gradient};
  // Several vectors in a step, because a warp waits for the loads of each step.
  constexpr int kVectors = kColumnStates ? 1 : 2;
  RowUpdate<kWarp, kVectors, kWidth, kColumnStates, kInt8, Source>::run(table, source, values,
                                                                        state, scalars, new_values);
  if (is_leader) store_row_scalars(scalars, table.dim, state, optimizer);
}

}  // namespace torchrec_hkv::hash_table::cuda
