// The update of one row on the CPU: the formulas of common/optimizers.h, vectorised.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "common/elements_cpu.h"
#include "common/optimizers.h"
#include "common/rounding.h"
#include "hash_table/cpu/bucket.h"
#include "hash_table/table_view.h"

namespace torchrec_hkv::hash_table::cpu {

inline float sum_of(const Columns& lanes) {
  return ((lanes[0] + lanes[4]) + (lanes[2] + lanes[6])) +
         ((lanes[1] + lanes[5]) + (lanes[3] + lanes[7]));
}

// term(0) + ... + term(n - 1), in eight partial sums.
template <typename Term>
inline float vector_sum(int32_t n, const Term& term) {
  Columns lanes = {};
  int32_t c = 0;
  for (; c + 8 <= n; c += 8) {
    for (int k = 0; k < 8; ++k) lanes[k] += term(c + k);
  }
  for (; c < n; ++c) lanes[0] += term(c);
  return sum_of(lanes);
}

// The same for squares.
inline float sum_of_squares(const float* values, int32_t n) {
  Columns lanes = {};
  int32_t c = 0;
  for (; c + 8 <= n; c += 8) {
    Columns columns;
    load_columns<RowType::kFloat32>(reinterpret_cast<const char*>(values + c), columns);
    lanes += columns * columns;
  }
  for (; c < n; ++c) lanes[0] += values[c] * values[c];
  return sum_of(lanes);
}

class RowUpdater {
 public:
  RowUpdater(const OptimizerConfig& config, float learning_rate, int32_t widest)
      : config_(config),
        plain_(config.clip_value == kUnbounded && !clips_by_norm(config) && !limits_norm(config) &&
               config.coupled_decay == 0.0f),
        learning_rate_(learning_rate),
        widened_(widest) {}

  // grad: the row's gradient, [dim].
  void update(const TableView& table, int64_t slot, const float* grad) {
    update(table, &slot, 1, grad, [](int64_t) {});
  }

  // Updates several rows by one gradient. Calls before(i) before the update of the i-th row.
  template <typename Before>
  void update(const TableView& table, const int64_t* slots, int64_t n, const float* grad,
              const Before& before) {
    if (plain_ && update_plain(table, slots, n, grad, before)) return;
    for (int64_t i = 0; i < n; ++i) {
      before(i);
      update_any(table, slots[i], grad);
    }
  }

 private:
  static constexpr float kUnbounded = std::numeric_limits<float>::infinity();

  void update_any(const TableView& table, int64_t slot, const float* grad) {
    const int32_t dim = table.dim();
    char* const stored = table.row(slot);
    float* const row = widened(table.rows.type, stored, dim);
    float* const state = table.state(slot);
    apply(dim, row, grad, state, begin(table, dim, row, grad, state));
    store(table, slot, row, stored);
  }

  // A row as floats: the row itself, or a copy that store() rounds.
  float* widened(RowType type, char* stored, int32_t dim) {
    if (type == RowType::kFloat32) return reinterpret_cast<float*>(stored);
    widen_row(type, stored, 0, dim, widened_.data());
    return widened_.data();
  }

  void store(const TableView& table, int64_t slot, const float* row, char* stored) {
    const RowType type = table.rows.type;
    if (type == RowType::kFloat32) return;
    const bool rounds_by_chance = config_.stochastic_rounding || type == RowType::kInt8;
    if (!rounds_by_chance) {
      narrow_elements(type, row, table.dim(), stored);
      return;
    }
    if (&table != rounded_) {
      rounded_ = &table;
      rounding_step_ =
          rounding_step(config_.rounding_seed, table.initial_rows.seed, *table.optimizer_step);
    }
    const uint64_t key = rounding_key(rounding_step_, table.ids[slot]);
    if (type == RowType::kInt8) {
      narrow_int8_by_chance(row, table.dim(), key, stored);
      return;
    }
    auto* const to = reinterpret_cast<uint16_t*>(stored);
    for (int32_t c = 0; c < table.dim(); ++c) {
      to[c] = narrow_by_chance(type, row[c], rounding_draw(key, table.column_offset + c));
    }
  }

  // For the most common optimizers if gradient_of is the identity. Returns whether this is one of
  // them.
  template <typename Before>
  bool update_plain(const TableView& table, const int64_t* slots, int64_t n, const float* grad,
                    const Before& before) {
    switch (config_.kind) {
      case Optimizer::kSgd:
        return plain<Optimizer::kSgd>(table, slots, n, grad, before);
      case Optimizer::kAdagrad:
        return plain<Optimizer::kAdagrad>(table, slots, n, grad, before);
      case Optimizer::kRowWiseAdagrad:
        return plain<Optimizer::kRowWiseAdagrad>(table, slots, n, grad, before);
      case Optimizer::kAdam:
        return plain<Optimizer::kAdam>(table, slots, n, grad, before);
      default:
        return false;
    }
  }

  template <Optimizer kKind, typename Before>
  bool plain(const TableView& table, const int64_t* slots, int64_t n,
             const float* __restrict__ grad, const Before& before) {
    const int32_t dim = table.dim();
    const OptimizerConfig config = config_;
    float squares = 0.0f;
    if constexpr (kKind == Optimizer::kRowWiseAdagrad) squares = sum_of_squares(grad, dim);
    const SlotVectors rows(table.rows), states(table.states);
    const bool narrow = table.rows.type != RowType::kFloat32;
    // The terms are the same for all rows, unless each row counts its own steps.
    const RowTerms common = config.own_steps ? RowTerms{} : first_terms(table, dim, nullptr);
    for (int64_t i = 0; i < n; ++i) {
      before(i);
      float* __restrict__ row = reinterpret_cast<float*>(rows.at(slots[i]));
      if (narrow) row = widened(table.rows.type, rows.at(slots[i]), dim);
      float* const __restrict__ state = reinterpret_cast<float*>(states.at(slots[i]));
      float* const second_state = state + dim;
      RowTerms terms = config.own_steps ? first_terms(table, dim, state) : common;
      if constexpr (kKind == Optimizer::kRowWiseAdagrad) {
        state[0] = adapt_row(config, squares, dim, state[0], &terms);
      }
      for (int32_t c = 0; c < dim; ++c) {
        float first = 0.0f, second = 0.0f;
        if constexpr (column_states(kKind) >= 1) first = state[c];
        if constexpr (column_states(kKind) >= 2) second = second_state[c];
        row[c] = move_column<kKind>(config, terms, row[c], grad[c], first, second);
        if constexpr (column_states(kKind) >= 1) state[c] = first;
        if constexpr (column_states(kKind) >= 2) second_state[c] = second;
      }
      if (narrow) store(table, slots[i], row, rows.at(slots[i]));
    }
    return true;
  }

  // Calls begin_row once for all rows with the same number of updates. state: of the row; read only
  // if rows count their own steps.
  RowTerms first_terms(const TableView& table, int32_t dim, float* state) {
    float step = static_cast<float>(*table.optimizer_step);
    if (config_.own_steps) step = state[own_step_column(config_.kind, dim)] += 1.0f;
    if (step != terms_step_) {
      terms_ = begin_row(config_, learning_rate_, step);
      terms_step_ = step;
    }
    return terms_;
  }

  // The computations on the whole row, before those on its columns.
  RowTerms begin(const TableView& table, int32_t dim, const float* row, const float* grad,
                 float* state) {
    const OptimizerConfig config = config_;
    RowTerms terms = first_terms(table, dim, state);
    if (clips_by_norm(config)) {
      const float squares = vector_sum(dim, [&](int32_t c) {
        const float g = clipped(config, grad[c]);
        return g * g;
      });
      clip_row(config, squares, &terms);
    }
    if (adapts_by_row(config.kind)) {
      const float squares = vector_sum(dim, [&, terms](int32_t c) {
        const float g = gradient_of(config, terms, row[c], grad[c]);
        return g * g;
      });
      float& row_square = state[row_square_column(config.kind, dim)];
      row_square = adapt_row(config, squares, dim, row_square, &terms);
    }
    if (limits_norm(config)) {
      const float squares = vector_sum(dim, [&, terms](int32_t c) {
        const float value = moved(terms, row[c], gradient_of(config, terms, row[c], grad[c]));
        return value * value;
      });
      limit_row(config, squares, &terms);
    }
    return terms;
  }

  void apply(int32_t dim, float* row, const float* grad, float* state, RowTerms terms) const {
    switch (config_.kind) {
      case Optimizer::kSgd:
        return columns<Optimizer::kSgd>(dim, row, grad, state, terms);
      case Optimizer::kMomentum:
        return columns<Optimizer::kMomentum>(dim, row, grad, state, terms);
      case Optimizer::kAdagrad:
        return columns<Optimizer::kAdagrad>(dim, row, grad, state, terms);
      case Optimizer::kRowWiseAdagrad:
        return columns<Optimizer::kRowWiseAdagrad>(dim, row, grad, state, terms);
      case Optimizer::kAdam:
        return columns<Optimizer::kAdam>(dim, row, grad, state, terms);
      case Optimizer::kRowWiseAdam:
        return columns<Optimizer::kRowWiseAdam>(dim, row, grad, state, terms);
      case Optimizer::kFtrl:
        return columns<Optimizer::kFtrl>(dim, row, grad, state, terms);
      case Optimizer::kLamb:
        return lamb(dim, row, grad, state, terms);
      case Optimizer::kNone:
        return;
    }
  }

  // Config and terms are passed by value, so the compiler knows that no store changes them.
  template <Optimizer kKind>
  void columns(int32_t dim, float* __restrict__ row, const float* __restrict__ grad,
               float* __restrict__ state, const RowTerms terms) const {
    const OptimizerConfig config = config_;
    float* const second_state = state + dim;
    float none = 0.0f;
    for (int32_t c = 0; c < dim; ++c) {
      float first = none, second = none;
      if constexpr (column_states(kKind) >= 1) first = state[c];
      if constexpr (column_states(kKind) >= 2) second = second_state[c];
      row[c] = update_column<kKind>(config, terms, row[c], grad[c], first, second);
      if constexpr (column_states(kKind) >= 1) state[c] = first;
      if constexpr (column_states(kKind) >= 2) second_state[c] = second;
    }
  }

  void lamb(int32_t dim, float* __restrict__ row, const float* __restrict__ grad,
            float* __restrict__ first, const RowTerms terms) const {
    const OptimizerConfig config = config_;
    float* const second = first + dim;
    for (int32_t c = 0; c < dim; ++c) {
      update_moments(config, terms, row[c], grad[c], first[c], second[c]);
    }
    const float row_squares = vector_sum(dim, [&](int32_t c) { return row[c] * row[c]; });
    const float direction_squares = vector_sum(dim, [&](int32_t c) {
      const float direction = lamb_direction(config, terms, row[c], first[c], second[c]);
      return direction * direction;
    });
    const float rate = terms.rate * trust_ratio(row_squares, direction_squares);
    for (int32_t c = 0; c < dim; ++c) {
      row[c] -= rate * lamb_direction(config, terms, row[c], first[c], second[c]);
    }
  }

  const OptimizerConfig config_;
  const bool plain_;  // gradient_of is the identity
  const float learning_rate_;
  float terms_step_ = -1.0f;  // number of updates that terms_ belong to
  RowTerms terms_{};
  const TableView* rounded_ = nullptr;  // the table of rounding_step_
  uint64_t rounding_step_ = 0;
  std::vector<float> widened_;  // a row whose elements are not float32
};

}  // namespace torchrec_hkv::hash_table::cpu
