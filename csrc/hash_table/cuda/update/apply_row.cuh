// One update of one row by a warp: the formulas of common/optimizers.h over the lanes.
#pragma once

#include <cstdint>

#include "common/optimizers.h"
#include "common/rounding.h"
#include "hash_table/cuda/bucket.cuh"
#include "hash_table/cuda/entry.cuh"
#include "hash_table/cuda/frames.cuh"
#include "hash_table/cuda/row_vector.cuh"

namespace torchrec_hkv::hash_table::cuda {

// Kernels are compiled once for the optimizers whose columns have no state, which need few
// registers, and once for the others.
__host__ __device__ inline bool has_column_states(const OptimizerConfig& optimizer) {
  return column_states(optimizer.kind) > 0;
}

// Calls visit(column) for the columns of this lane, kWidth at a time.
template <int kWidth, typename Visit>
__device__ __forceinline__ void for_my_columns(int32_t dim, const Visit& visit) {
  for (int32_t column = threadIdx.x % kWarp * kWidth; column < dim; column += kWarp * kWidth) {
    visit(column);
  }
}

// A row and where it is stored.
struct RowPlace {
  RowType type;
  char* values;
  int32_t dim;
  float* state;
  // Of stochastic rounding.
  bool by_chance;
  uint64_t key;
  uint32_t first_column;

  template <int kWidth>
  __device__ __forceinline__ Columns<kWidth> load(int32_t column) const {
    return Columns<kWidth>::load(type, values, column);
  }
  template <int kWidth>
  __device__ __forceinline__ void store(const Columns<kWidth>& row, int32_t column) const {
    if (!by_chance) {
      row.store(type, values, column);
      return;
    }
    uint16_t narrowed[kWidth];
#pragma unroll
    for (int k = 0; k < kWidth; ++k) {
      const uint32_t draw = rounding_draw(key, first_column + static_cast<uint32_t>(column + k));
      narrowed[k] = narrow_by_chance(type, row.v[k], draw);
    }
    uint16_t* to = reinterpret_cast<uint16_t*>(values) + column;
    if constexpr (kWidth == 4) {
      *reinterpret_cast<ushort4*>(to) =
          make_ushort4(narrowed[0], narrowed[1], narrowed[2], narrowed[3]);
    } else {
#pragma unroll
      for (int k = 0; k < kWidth; ++k) to[k] = narrowed[k];
    }
  }
};

// The row parts that come before the column parts. All lanes get the same.
template <int kWidth, typename Gradient>
__device__ __forceinline__ RowTerms terms_of(const RowPlace& row, const OptimizerConfig& optimizer,
                                             float learning_rate, int64_t table_step,
                                             float old_square, const Gradient& gradient) {
  const int lane = threadIdx.x % kWarp;
  float step = static_cast<float>(table_step);
  if (optimizer.own_steps) {
    float* own = row.state + own_step_column(optimizer.kind, row.dim);
    step = *own + 1.0f;
    __syncwarp();  // all lanes have read it
    if (lane == 0) *own = step;
  }
  RowTerms terms = begin_row(optimizer, learning_rate, step);
  if (clips_by_norm(optimizer)) {
    float squares = 0.0f;
    for_my_columns<kWidth>(row.dim, [&](int32_t column) {
      const Columns<kWidth> raw = gradient(column);
#pragma unroll
      for (int k = 0; k < kWidth; ++k) {
        const float g = clipped(optimizer, raw.v[k]);
        squares += g * g;
      }
    });
    clip_row(optimizer, warp_sum(squares), &terms);
  }
  if (adapts_by_row(optimizer.kind)) {
    float squares = 0.0f;
    for_my_columns<kWidth>(row.dim, [&](int32_t column) {
      const Columns<kWidth> raw = gradient(column);
      Columns<kWidth> value = Columns<kWidth>::zero();
      if (optimizer.coupled_decay != 0.0f) value = row.load<kWidth>(column);
#pragma unroll
      for (int k = 0; k < kWidth; ++k) {
        const float g = gradient_of(optimizer, terms, value.v[k], raw.v[k]);
        squares += g * g;
      }
    });
    squares = warp_sum(squares);
    float* row_square = row.state + row_square_column(optimizer.kind, row.dim);
    __syncwarp();  // all lanes have read it
    const float renewed = adapt_row(optimizer, squares, row.dim, old_square, &terms);
    if (lane == 0) *row_square = renewed;
  }
  if (limits_norm(optimizer)) {
    float squares = 0.0f;
    for_my_columns<kWidth>(row.dim, [&](int32_t column) {
      const Columns<kWidth> raw = gradient(column);
      const Columns<kWidth> value = row.load<kWidth>(column);
#pragma unroll
      for (int k = 0; k < kWidth; ++k) {
        const float g = gradient_of(optimizer, terms, value.v[k], raw.v[k]);
        const float renewed = moved(terms, value.v[k], g);
        squares += renewed * renewed;
      }
    });
    limit_row(optimizer, warp_sum(squares), &terms);
  }
  return terms;
}

// What a lane reads of a row and its state before it computes: its first columns, kEarly times
// kWidth of them. So they, and several rows, can be on their way at once.
template <int kWidth, bool kColumnStates, int kEarly = 1>
struct RowInFlight {
  char* values;
  float* state;
  float old_square;  // of optimizers that adapt by row
  Columns<kWidth> value[kEarly];
  Columns<kWidth> first[kEarly], second[kEarly];  // states of the columns
};

template <int kWidth, bool kColumnStates, int kEarly = 1>
__device__ __forceinline__ RowInFlight<kWidth, kColumnStates, kEarly> load_row(
    const TableView& table, int64_t slot, const OptimizerConfig& optimizer) {
  RowInFlight<kWidth, kColumnStates, kEarly> row;
  const int32_t mine = threadIdx.x % kWarp * kWidth;
  const int64_t frame = frame_to_write(table.frames, slot, mine == 0);
  row.values = table.rows.at(slot, frame);
  row.state = reinterpret_cast<float*>(table.states.at(slot, frame));
#pragma unroll
  for (int i = 0; i < kEarly; ++i) {
    const int32_t column = mine + i * kWarp * kWidth;
    row.value[i] = row.first[i] = row.second[i] = Columns<kWidth>::zero();
    if (column >= table.dim()) continue;
    row.value[i] = Columns<kWidth>::load(table.rows.type, row.values, column);
    if constexpr (kColumnStates) {
      const int states = column_states(optimizer.kind);
      if (states >= 1) row.first[i] = Columns<kWidth>::load(row.state + column);
      if (states >= 2) row.second[i] = Columns<kWidth>::load(row.state + table.dim() + column);
    }
  }
  row.old_square = 0.0f;
  if (adapts_by_row(optimizer.kind)) {
    row.old_square = row.state[row_square_column(optimizer.kind, table.dim())];
  }
  return row;
}

template <Optimizer kKind, int kWidth, bool kColumnStates, int kEarly, typename Gradient>
__device__ __forceinline__ void apply_columns(
    const RowPlace& row, const OptimizerConfig& optimizer, const RowTerms& terms,
    const Gradient& gradient, const RowInFlight<kWidth, kColumnStates, kEarly>& early) {
  const auto apply = [&](int32_t column, Columns<kWidth> value, Columns<kWidth> first,
                         Columns<kWidth> second) {
    const Columns<kWidth> raw = gradient(column);
#pragma unroll
    for (int k = 0; k < kWidth; ++k) {
      value.v[k] =
          update_column<kKind>(optimizer, terms, value.v[k], raw.v[k], first.v[k], second.v[k]);
    }
    if constexpr (column_states(kKind) >= 1) first.store(row.state + column);
    if constexpr (column_states(kKind) >= 2) second.store(row.state + row.dim + column);
    row.store(value, column);
  };
  constexpr int32_t kOfWarp = kWarp * kWidth;
  const int32_t mine = threadIdx.x % kWarp * kWidth;
#pragma unroll
  for (int i = 0; i < kEarly; ++i) {
    const int32_t column = mine + i * kOfWarp;
    if (column < row.dim) apply(column, early.value[i], early.first[i], early.second[i]);
  }
  for (int32_t column = mine + kEarly * kOfWarp; column < row.dim; column += kOfWarp) {
    Columns<kWidth> first = Columns<kWidth>::zero();
    Columns<kWidth> second = Columns<kWidth>::zero();
    if constexpr (column_states(kKind) >= 1) first = Columns<kWidth>::load(row.state + column);
    if constexpr (column_states(kKind) >= 2) {
      second = Columns<kWidth>::load(row.state + row.dim + column);
    }
    apply(column, row.load<kWidth>(column), first, second);
  }
}

// A lane reads again what it has just written: its columns need not fit into registers.
template <int kWidth, typename Gradient>
__device__ __forceinline__ void apply_lamb(const RowPlace& row, const OptimizerConfig& optimizer,
                                           const RowTerms& terms, const Gradient& gradient) {
  float row_squares = 0.0f;
  float direction_squares = 0.0f;
  for_my_columns<kWidth>(row.dim, [&](int32_t column) {
    const Columns<kWidth> raw = gradient(column);
    const Columns<kWidth> value = row.load<kWidth>(column);
    Columns<kWidth> first = Columns<kWidth>::load(row.state + column);
    Columns<kWidth> second = Columns<kWidth>::load(row.state + row.dim + column);
#pragma unroll
    for (int k = 0; k < kWidth; ++k) {
      update_moments(optimizer, terms, value.v[k], raw.v[k], first.v[k], second.v[k]);
      const float direction = lamb_direction(optimizer, terms, value.v[k], first.v[k], second.v[k]);
      row_squares += value.v[k] * value.v[k];
      direction_squares += direction * direction;
    }
    first.store(row.state + column);
    second.store(row.state + row.dim + column);
  });
  const float rate = terms.rate * trust_ratio(warp_sum(row_squares), warp_sum(direction_squares));
  for_my_columns<kWidth>(row.dim, [&](int32_t column) {
    Columns<kWidth> value = row.load<kWidth>(column);
    const Columns<kWidth> first = Columns<kWidth>::load(row.state + column);
    const Columns<kWidth> second = Columns<kWidth>::load(row.state + row.dim + column);
#pragma unroll
    for (int k = 0; k < kWidth; ++k) {
      value.v[k] -= rate * lamb_direction(optimizer, terms, value.v[k], first.v[k], second.v[k]);
    }
    row.store(value, column);
  });
}

// Updates a row that load_row has loaded; all lanes of a warp call it together.
//
// kColumnStates: has_column_states(optimizer). kWidth: columns a lane works on at a time, 1 or 4; 4
// where dim, and with column states the state width, are multiples of four. gradient(column): the
// row's gradient, Columns<kWidth> from this column on; it is called once for each of its columns,
// once more each where clips_by_norm, adapts_by_row and limits_norm, so it should come from
// registers or shared memory. table.optimizer_step counts this update already.
template <int kWidth, bool kColumnStates, int kEarly, typename Gradient>
__device__ __forceinline__ void finish_row(const TableView& table, int64_t slot,
                                           const RowInFlight<kWidth, kColumnStates, kEarly>& early,
                                           const OptimizerConfig& optimizer, float learning_rate,
                                           const Gradient& gradient) {
  const int64_t step = *table.optimizer_step;
  RowPlace row;
  row.type = table.rows.type;
  row.values = early.values;
  row.dim = table.dim();
  row.state = early.state;
  row.by_chance = optimizer.stochastic_rounding && row.type != RowType::kFloat32;
  row.first_column = static_cast<uint32_t>(table.column_offset);
  row.key = row.by_chance ? rounding_key(optimizer.rounding_seed, table.initial_rows.seed,
                                         id_of_slot(table, slot), step)
                          : 0;
  const RowTerms terms =
      terms_of<kWidth>(row, optimizer, learning_rate, step, early.old_square, gradient);
  if constexpr (!kColumnStates) {
    // Row-wise Adagrad's columns have SGD's formula; its rate is its own.
    apply_columns<Optimizer::kSgd>(row, optimizer, terms, gradient, early);
  } else {
    switch (optimizer.kind) {
      case Optimizer::kMomentum:
        return apply_columns<Optimizer::kMomentum>(row, optimizer, terms, gradient, early);
      case Optimizer::kAdagrad:
        return apply_columns<Optimizer::kAdagrad>(row, optimizer, terms, gradient, early);
      case Optimizer::kAdam:
        return apply_columns<Optimizer::kAdam>(row, optimizer, terms, gradient, early);
      case Optimizer::kRowWiseAdam:
        return apply_columns<Optimizer::kRowWiseAdam>(row, optimizer, terms, gradient, early);
      case Optimizer::kFtrl:
        return apply_columns<Optimizer::kFtrl>(row, optimizer, terms, gradient, early);
      case Optimizer::kLamb:
        return apply_lamb<kWidth>(row, optimizer, terms, gradient);
      default:
        return;
    }
  }
}

// Updates the row in a slot of a table, as finish_row does.
template <int kWidth, bool kColumnStates, typename Gradient>
__device__ __forceinline__ void apply_row(const TableView& table, int64_t slot,
                                          const OptimizerConfig& optimizer, float learning_rate,
                                          const Gradient& gradient) {
  const auto early = load_row<kWidth, kColumnStates>(table, slot, optimizer);
  finish_row(table, slot, early, optimizer, learning_rate, gradient);
}

}  // namespace torchrec_hkv::hash_table::cuda
