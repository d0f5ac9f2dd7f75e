// The update of one row on the CPU: the formulas of common/optimizers.h, vectorised.
#pragma once

#include <cstdint>
#include <limits>
#include <vector>

#include "common/elements_cpu.h"
#include "common/optimizers.h"
#include "common/rounding.h"
#include "common/rounding_cpu.h"
#include "hash_table/cpu/bucket.h"
#include "hash_table/cpu/column_loops.h"
#include "hash_table/table_view.h"

namespace torchrec_hkv::hash_table::cpu {

// begin_row by a row's own number of updates, which many rows share.
class RowTermsCache {
 public:
  RowTermsCache() {
    for (float& step : steps_) step = std::numeric_limits<float>::quiet_NaN();  // equals none
  }

  const RowTerms& get(const OptimizerConfig& config, float learning_rate, float step) {
    const uint32_t at = float_bits(step) * 0x9e3779b1u >> (32 - kBits);
    if (steps_[at] != step) {
      terms_[at] = begin_row(config, learning_rate, step);
      steps_[at] = step;
    }
    return terms_[at];
  }

 private:
  static constexpr int kBits = 6;
  float steps_[1 << kBits];
  RowTerms terms_[1 << kBits];
};

inline bool rounds_by_chance(const OptimizerConfig& config, RowType type) {
  if (type == RowType::kFloat32) return false;
  return config.stochastic_rounding || type == RowType::kInt8;
}

class RowUpdater {
 public:
  RowUpdater(const OptimizerConfig& config, float learning_rate, int32_t widest)
      : config_(config),
        clips_(config.clip_value < kUnbounded || clips_by_norm(config)),
        learning_rate_(learning_rate),
        stride_((widest + kRoundedTogether - 1) / kRoundedTogether * kRoundedTogether),
        buffers_(kBuffers * int64_t{stride_}) {}

  // grad: the row's gradient, [dim].
  void update(const TableView& table, int64_t slot, const float* grad) {
    update(table, &slot, 1, grad, [](int64_t) {});
  }

  // Updates several rows by one gradient. Calls before(i) before the update of the i-th row.
  template <typename Before>
  void update(const TableView& table, const int64_t* slots, int64_t n, const float* grad,
              const Before& before) {
    switch (config_.kind) {
      case Optimizer::kSgd:
        return update_by<Optimizer::kSgd>(table, slots, n, grad, before);
      case Optimizer::kMomentum:
        return update_by<Optimizer::kMomentum>(table, slots, n, grad, before);
      case Optimizer::kAdagrad:
        return update_by<Optimizer::kAdagrad>(table, slots, n, grad, before);
      case Optimizer::kRowWiseAdagrad:
        return update_by<Optimizer::kRowWiseAdagrad>(table, slots, n, grad, before);
      case Optimizer::kAdam:
        return update_by<Optimizer::kAdam>(table, slots, n, grad, before);
      case Optimizer::kRowWiseAdam:
        return update_by<Optimizer::kRowWiseAdam>(table, slots, n, grad, before);
      case Optimizer::kFtrl:
        return update_by<Optimizer::kFtrl>(table, slots, n, grad, before);
      case Optimizer::kLamb:
        return update_by<Optimizer::kLamb>(table, slots, n, grad, before);
      case Optimizer::kNone:
        return;
    }
  }

 private:
  static constexpr float kUnbounded = std::numeric_limits<float>::infinity();

  // Not inlined: the loops of all optimizers in one function take more registers than there are.
  template <Optimizer kKind, typename Before>
  [[gnu::noinline]] void update_by(const TableView& table, const int64_t* slots, int64_t n,
                                   const float* grad, const Before& before) {
    if (&table != table_) begin_table(table);
    const int32_t dim = table.dim();
    OptimizerConfig config = config_;
    config.kind = kKind;
    const bool decays = config.coupled_decay != 0.0f;
    if (clips_) grad = clip_gradient(grad, dim);
    float squares = 0.0f;
    if (adapts_by_row(kKind) && !decays) squares = sum_of_squares(grad, dim);
    const SlotVectors rows(table.rows), states(table.states);
    const bool narrow = table.rows.type != RowType::kFloat32;
    for (int64_t i = 0; i < n; ++i) {
      before(i);
      float* row = reinterpret_cast<float*>(rows.at(slots[i]));
      if (narrow) {
        row = buffer(kWidened);
        widen_row(table.rows.type, rows.at(slots[i]), 0, dim, row);
      }
      float* const state = reinterpret_cast<float*>(states.at(slots[i]));
      RowTerms terms = table_terms_;
      if (config.own_steps) {
        const float step = state[own_step_column(kKind, dim)] += 1.0f;
        terms = terms_.get(config_, learning_rate_, step);
      }
      const float* row_grad = grad;
      if (decays) {
        row_grad = buffer(kDecayed);
        decay_columns(config.coupled_decay, grad, row, dim, buffer(kDecayed));
        if (adapts_by_row(kKind)) squares = sum_of_squares(row_grad, dim);
      }
      if (adapts_by_row(kKind)) {
        float& row_square = state[row_square_column(kKind, dim)];
        row_square = adapt_row(config, squares, dim, row_square, &terms);
      }
      if constexpr (column_states(kKind) == 0) {
        if (limits_norm(config)) terms = limit_norm(row, row_grad, dim, terms);
      }
      if constexpr (kKind == Optimizer::kLamb) {
        move_lamb_columns(config, terms, row_grad, dim, row, state, buffer(kMoved));
      } else if constexpr (kKind == Optimizer::kFtrl) {
        move_ftrl_columns(config, terms.learning_rate, row_grad, dim, row, state);
      } else {
        move_columns<kKind>(config, terms, row_grad, dim, row, state);
      }
      if (narrow) store(table, slots[i], row, rows.at(slots[i]));
    }
  }

  void begin_table(const TableView& table) {
    table_ = &table;
    const int64_t step = *table.optimizer_step;
    if (!config_.own_steps)
      table_terms_ = begin_row(config_, learning_rate_, static_cast<float>(step));
    rounding_step_ = rounding_step(config_.rounding_seed, table.initial_rows.seed, step);
  }

  // The gradient, clipped by value and by norm: a part of gradient_of that does not depend on the
  // row.
  const float* clip_gradient(const float* grad, int32_t dim) {
    if (config_.clip_value < kUnbounded) {
      clip_columns(config_.clip_value, grad, dim, buffer(kClipped));
      grad = buffer(kClipped);
    }
    if (clips_by_norm(config_)) {
      RowTerms terms{};
      clip_row(config_, sum_of_squares(grad, dim), &terms);
      if (terms.gradient_scale != 1.0f) {
        scale_columns(terms.gradient_scale, grad, dim, buffer(kScaled));
        grad = buffer(kScaled);
      }
    }
    return grad;
  }

  RowTerms limit_norm(const float* __restrict__ row, const float* __restrict__ grad, int32_t dim,
                      RowTerms terms) {
    float* __restrict__ const to = buffer(kMoved);
    for (int32_t c = 0; c < dim; ++c) to[c] = moved(terms, row[c], grad[c]);
    limit_row(config_, sum_of_squares(to, dim), &terms);
    return terms;
  }

  // Rounds a row that is not stored as floats. row: the buffer kWidened.
  void store(const TableView& table, int64_t slot, const float* row, char* stored) {
    const RowType type = table.rows.type;
    if (!rounds_by_chance(config_, type)) {
      narrow_elements(type, row, table.dim(), stored);
      return;
    }
    const uint64_t key = rounding_key(rounding_step_, table.ids[slot]);
    if (type == RowType::kInt8) {
      narrow_int8_by_chance(row, table.dim(), key, stored);
    } else {
      narrow_elements_by_chance(type, row, table.dim(), key, table.column_offset, stored);
    }
  }

  enum Buffer { kWidened, kClipped, kScaled, kDecayed, kMoved, kBuffers };
  float* buffer(Buffer which) { return buffers_.data() + which * int64_t{stride_}; }

  const OptimizerConfig config_;
  const bool clips_;  // whether gradients are clipped
  const float learning_rate_;
  const TableView* table_ = nullptr;  // to which the next two belong
  RowTerms table_terms_{};            // of its rows, unless they count their own steps
  uint64_t rounding_step_ = 0;
  RowTermsCache terms_;
  const int32_t stride_;  // of a buffer
  std::vector<float> buffers_;
};

}  // namespace torchrec_hkv::hash_table::cpu
