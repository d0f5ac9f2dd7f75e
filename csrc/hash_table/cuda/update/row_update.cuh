// The update of one row by a tile of lanes: the formulas of common/optimizers.h for any optimizer,
// any type of row and any number of columns, kWidth neighbouring ones a lane at a time.
#pragma once

#include <cstdint>

#include "common/optimizers.h"
#include "common/rounding.h"
#include "hash_table/cuda/entry.cuh"
#include "hash_table/cuda/frames.cuh"
#include "hash_table/cuda/row_vector.cuh"
#include "hash_table/cuda/tile.cuh"

namespace torchrec_hkv::hash_table::cuda {

// Kernels are compiled once for the optimizers whose columns have no state, which need few
// registers, and once for the others.
__host__ __device__ inline bool has_column_states(const OptimizerConfig& optimizer) {
  return column_states(optimizer.kind) > 0;
}

// Calls visit(column) for the columns that the lane works on.
template <int kLanes, int kWidth, typename Visit>
__device__ __forceinline__ void for_my_columns(int32_t dim, const Visit& visit) {
  for (int32_t c = Tile<kLanes>::lane() * kWidth; c < dim; c += kLanes * kWidth) visit(c);
}

// What all rows of a table have in common in one update. The table's optimizer_step counts it
// already.
struct TableUpdate {
  const OptimizerConfig* optimizer;
  float learning_rate;
  int32_t dim;
  RowType type;
  bool rounds_by_chance;
  uint32_t column_offset;
  RowTerms terms;  // unless rows count steps of their own

  __device__ __forceinline__ TableUpdate(const TableView& table, const OptimizerConfig& config,
                                         float rate)
      : optimizer(&config),
        learning_rate(rate),
        dim(table.dim()),
        type(table.rows.type),
        rounds_by_chance(config.stochastic_rounding && type != RowType::kFloat32),
        column_offset(static_cast<uint32_t>(table.column_offset)) {
    if (!config.own_steps) {
      terms = begin_row(config, rate, static_cast<float>(*table.optimizer_step));
    }
  }
};

// What a row has once, beside its columns. All lanes of a tile have the same.
struct RowOnce {
  float square;       // of optimizers that adapt by row; the update renews it
  float step;         // where rows count steps of their own; likewise
  uint64_t rounding;  // key of stochastic rounding
};

// Where a row has its values of this kind.
__device__ __forceinline__ RowOnce load_once_values(const TableView& table, int64_t slot,
                                                    const float* state,
                                                    const OptimizerConfig& optimizer) {
  RowOnce once{0.0f, 0.0f, 0};
  if (adapts_by_row(optimizer.kind)) {
    once.square = state[row_square_column(optimizer.kind, table.dim())];
  }
  if (optimizer.own_steps) once.step = state[own_step_column(optimizer.kind, table.dim())];
  if (optimizer.stochastic_rounding && table.rows.type != RowType::kFloat32) {
    once.rounding = rounding_key(optimizer.rounding_seed, table.initial_rows.seed,
                                 id_of_slot(table, slot), *table.optimizer_step);
  }
  return once;
}
__device__ __forceinline__ void store_once_values(const RowOnce& once, int32_t dim, float* state,
                                                  const OptimizerConfig& optimizer) {
  if (adapts_by_row(optimizer.kind)) state[row_square_column(optimizer.kind, dim)] = once.square;
  if (optimizer.own_steps) state[own_step_column(optimizer.kind, dim)] = once.step;
}

// Updates a row. All lanes of a tile call it together.
//
// source: has gradient(column), value(column), first(column) and second(column), the row's
// gradient, its values and its states from this column on, as Columns<kWidth>, which are read up to
// three times. What the update makes of them goes to `values` and `state`, and into `once`, which
// the caller stores.
template <int kLanes, int kWidth, bool kColumnStates, typename Source>
class RowUpdate {
 public:
  __device__ __forceinline__ static void run(const TableUpdate& table, const Source& source,
                                             char* values, float* state, RowOnce& once) {
    RowUpdate(table, source, values, state).update(once);
  }

 private:
  using Vector = Columns<kWidth>;

  const TableUpdate& table_;
  const Source& source_;
  char* const values_;
  float* const state_;

  __device__ __forceinline__ RowUpdate(const TableUpdate& table, const Source& source, char* values,
                                       float* state)
      : table_(table), source_(source), values_(values), state_(state) {}

  __device__ __forceinline__ void update(RowOnce& once) const {
    const OptimizerConfig& optimizer = *table_.optimizer;
    RowTerms terms = table_.terms;
    if (optimizer.own_steps) {
      once.step += 1.0f;
      terms = begin_row(optimizer, table_.learning_rate, once.step);
    }
    if (clips_by_norm(optimizer)) {
      const float squares = sum_columns(false, [&](float, float gradient) {
        const float g = clipped(optimizer, gradient);
        return g * g;
      });
      clip_row(optimizer, squares, &terms);
    }
    if (adapts_by_row(optimizer.kind)) {
      const bool decays = optimizer.coupled_decay != 0.0f;
      const float squares = sum_columns(decays, [&](float value, float gradient) {
        const float g = gradient_of(optimizer, terms, value, gradient);
        return g * g;
      });
      once.square = adapt_row(optimizer, squares, table_.dim, once.square, &terms);
    }
    if constexpr (!kColumnStates) {
      // Row-wise Adagrad's columns have SGD's formula; its rate is its own.
      update_columns<Optimizer::kSgd>(terms, once.rounding);
    } else {
      switch (optimizer.kind) {
        case Optimizer::kMomentum:
          return update_columns<Optimizer::kMomentum>(terms, once.rounding);
        case Optimizer::kAdagrad:
          return update_columns<Optimizer::kAdagrad>(terms, once.rounding);
        case Optimizer::kAdam:
          return update_columns<Optimizer::kAdam>(terms, once.rounding);
        case Optimizer::kRowWiseAdam:
          return update_columns<Optimizer::kRowWiseAdam>(terms, once.rounding);
        case Optimizer::kFtrl:
          return update_columns<Optimizer::kFtrl>(terms, once.rounding);
        case Optimizer::kLamb:
          return apply_lamb(terms, once.rounding);
        default:
          return;
      }
    }
  }

  // The sum over all columns of term(value, gradient). reads: the values, else they are zeros.
  template <typename Term>
  __device__ __forceinline__ float sum_columns(bool reads, const Term& term) const {
    float sum = 0.0f;
    for_my_columns<kLanes, kWidth>(table_.dim, [&](int32_t column) {
      const Vector gradient = source_.gradient(column);
      const Vector value = reads ? source_.value(column) : Vector::zero();
#pragma unroll
      for (int k = 0; k < kWidth; ++k) sum += term(value.v[k], gradient.v[k]);
    });
    return Tile<kLanes>::sum(sum);
  }

  template <Optimizer kKind>
  __device__ __forceinline__ void update_columns(const RowTerms& terms, uint64_t rounding) const {
    for_my_columns<kLanes, kWidth>(table_.dim, [&](int32_t column) {
      const Vector gradient = source_.gradient(column);
      Vector value = source_.value(column), first = Vector::zero(), second = Vector::zero();
      if constexpr (column_states(kKind) >= 1) first = source_.first(column);
      if constexpr (column_states(kKind) >= 2) second = source_.second(column);
#pragma unroll
      for (int k = 0; k < kWidth; ++k) {
        value.v[k] = update_column<kKind>(*table_.optimizer, terms, value.v[k], gradient.v[k],
                                          first.v[k], second.v[k]);
      }
      if constexpr (column_states(kKind) >= 1) first.store(state_ + column);
      if constexpr (column_states(kKind) >= 2) second.store(state_ + table_.dim + column);
      store(value, column, rounding);
    });
  }

  // How long the step is is known when all columns have their new moments, which are computed again
  // then.
  __device__ __forceinline__ void apply_lamb(const RowTerms& terms, uint64_t rounding) const {
    const OptimizerConfig& optimizer = *table_.optimizer;
    float row_squares = 0.0f, direction_squares = 0.0f;
    const auto visit_directions = [&](const auto& visit) {
      for_my_columns<kLanes, kWidth>(table_.dim, [&](int32_t column) {
        const Vector gradient = source_.gradient(column), value = source_.value(column);
        Vector first = source_.first(column), second = source_.second(column), direction;
#pragma unroll
        for (int k = 0; k < kWidth; ++k) {
          update_moments(optimizer, terms, value.v[k], gradient.v[k], first.v[k], second.v[k]);
          direction.v[k] = lamb_direction(optimizer, terms, value.v[k], first.v[k], second.v[k]);
        }
        visit(column, value, first, second, direction);
      });
    };
    visit_directions(
        [&](int32_t, const Vector& value, const Vector&, const Vector&, const Vector& direction) {
          row_squares += value.dot(value);
          direction_squares += direction.dot(direction);
        });
    const float rate = terms.rate * trust_ratio(Tile<kLanes>::sum(row_squares),
                                                Tile<kLanes>::sum(direction_squares));
    visit_directions([&](int32_t column, Vector value, const Vector& first, const Vector& second,
                         const Vector& direction) {
      value.add(-rate, direction);
      first.store(state_ + column);
      second.store(state_ + table_.dim + column);
      store(value, column, rounding);
    });
  }

  __device__ __forceinline__ void store(const Vector& value, int32_t column,
                                        uint64_t rounding) const {
    if (!table_.rounds_by_chance) {
      value.store(table_.type, values_, column);
      return;
    }
    uint16_t narrowed[kWidth];
#pragma unroll
    for (int k = 0; k < kWidth; ++k) {
      const uint32_t draw =
          rounding_draw(rounding, table_.column_offset + static_cast<uint32_t>(column + k));
      narrowed[k] = narrow_by_chance(table_.type, value.v[k], draw);
    }
    auto* const to = reinterpret_cast<uint16_t*>(values_) + column;
    if constexpr (kWidth == 4) {
      *reinterpret_cast<ushort4*>(to) =
          make_ushort4(narrowed[0], narrowed[1], narrowed[2], narrowed[3]);
    } else {
      *to = narrowed[0];
    }
  }
};

// What RowUpdate reads of a row in global memory.
template <int kWidth, typename GradientOf>
struct RowInMemory {
  const TableUpdate& table;
  const char* values;
  const float* state;
  const GradientOf& gradient_of_column;

  __device__ __forceinline__ Columns<kWidth> gradient(int32_t column) const {
    return gradient_of_column(column);
  }
  __device__ __forceinline__ Columns<kWidth> value(int32_t column) const {
    return Columns<kWidth>::load(table.type, values, column);
  }
  __device__ __forceinline__ Columns<kWidth> first(int32_t column) const {
    return Columns<kWidth>::load(state + column);
  }
  __device__ __forceinline__ Columns<kWidth> second(int32_t column) const {
    return Columns<kWidth>::load(state + table.dim + column);
  }
};

// Updates a row where it is, by a warp. gradient(column): Columns<kWidth>.
template <int kWidth, bool kColumnStates, typename GradientOf>
__device__ __forceinline__ void update_row_in_memory(const TableView& view,
                                                     const OptimizerConfig& optimizer,
                                                     float learning_rate, int64_t slot,
                                                     const GradientOf& gradient) {
  const TableUpdate table(view, optimizer, learning_rate);
  const bool leads = Tile<kWarp>::lane() == 0;
  const int64_t frame = frame_to_write(view.frames, slot, leads);
  char* const values = view.rows.at(slot, frame);
  auto* const state = reinterpret_cast<float*>(view.states.at(slot, frame));
  RowOnce once = load_once_values(view, slot, state, optimizer);
  __syncwarp();  // all lanes have read them
  using Source = RowInMemory<kWidth, GradientOf>;
  const Source source{table, values, state, gradient};
  RowUpdate<kWarp, kWidth, kColumnStates, Source>::run(table, source, values, state, once);
  if (leads) store_once_values(once, table.dim, state, optimizer);
}

}  // namespace torchrec_hkv::hash_table::cuda
