// Optimizers of rows, shared by both devices. A gradient is the sum over all occurrences of an id
// in the batch. Each row of the batch is updated once a step; other rows do not change.
//
// An update has row parts and column parts. The row parts are computed once for each row, from sums
// over its columns: begin_row, then for some optimizers clip_row, adapt_row and limit_row, or at
// the end trust_ratio. The column parts, gradient_of and update_column, are computed for each
// column in any order. A warp and a vector loop differ only in how they sum and store.
//
// The state of a new row is zero. It is float32: for each quantity the values of all columns, then
// the values of the row, then padding.
//
// | optimizer    | of each column                    | of the row                            |
// | ---          | ---                               | ---                                   |
// | kSgd         |                                   |                                       |
// | kMomentum    | velocity                          |                                       |
// | kAdagrad     | sum of g^2                        |                                       |
// | kRowWiseAdagrad |                                | sum of mean(g^2)                      |
// | kAdam, kLamb | mean of g, mean of g^2            | steps, if they are counted by row     |
// | kRowWiseAdam | mean of g                         | mean of mean(g^2), steps as for kAdam |
// | kFtrl        | z, sum of g^2                     |                                       |
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>

#include "common/macros.h"

namespace torchrec_hkv {

// Saved states contain these numbers.
enum class Optimizer : int32_t {
  kNone = 0,  // not trained
  kSgd = 1,
  kMomentum = 2,  // SGD with momentum
  kAdagrad = 3,
  kRowWiseAdagrad = 4,  // FBGEMM's EXACT_ROWWISE_ADAGRAD
  kAdam = 5,
  kRowWiseAdam = 6,  // FBGEMM's PARTIAL_ROWWISE_ADAM
  kLamb = 7,
  kFtrl = 8,  // FTRL-Proximal (McMahan et al. 2013)
};

struct OptimizerConfig {
  Optimizer kind = Optimizer::kNone;
  float eps = 0.0f;
  // Weight decay: added to the gradient (coupled, L2) or subtracted from the row (decoupled). LAMB
  // has its own, inside the trust ratio.
  float coupled_decay = 0.0f;
  float decoupled_decay = 0.0f;
  float lamb_decay = 0.0f;
  float momentum = 0.0f;
  bool nesterov = false;
  float beta1 = 0.0f;
  float beta2 = 0.0f;
  // 1 - beta and log(beta), computed from beta in double precision: 1 - 0.999 in float is off by
  // 1e-5.
  float new_part1 = 1.0f;
  float new_part2 = 1.0f;
  float log_beta1 = 0.0f;
  float log_beta2 = 0.0f;
  bool own_steps = false;            // bias correction by the row's own number of updates
  float initial_accumulator = 0.0f;  // added to sums of g^2 when they are used
  float ftrl_beta = 0.0f;
  float l1 = 0.0f;
  float l2 = 0.0f;
  // Bounds on the row's gradient; infinite for no bound.
  float clip_value = std::numeric_limits<float>::infinity();
  float clip_norm = std::numeric_limits<float>::infinity();
  // Bound on the norm of the updated row; infinite for no bound. Row-wise Adagrad only.
  float max_norm = std::numeric_limits<float>::infinity();
  // Bound on the values of the pooled output's gradient, before they are summed by row.
  float clip_output = std::numeric_limits<float>::infinity();
  bool stochastic_rounding = false;  // of 16-bit rows, see rounding.h
  uint64_t rounding_seed = 0;
};

// a * x + b * y. A compiler may fuse either product with the sum, and may choose differently in
// each kernel. Here it is always the first product, so that all kernels compute the same.
HKV_HOST_DEVICE float sum_of_products(float a, float x, float b, float y) {
#ifdef __CUDA_ARCH__
  return __fmaf_rn(a, x, __fmul_rn(b, y));
#else
  return a * x + b * y;
#endif
}

// Number of state quantities of each column.
HKV_HOST_DEVICE constexpr int32_t column_states(Optimizer kind) {
  switch (kind) {
    case Optimizer::kMomentum:
    case Optimizer::kAdagrad:
    case Optimizer::kRowWiseAdam:
      return 1;
    case Optimizer::kAdam:
    case Optimizer::kLamb:
    case Optimizer::kFtrl:
      return 2;
    default:
      return 0;
  }
}

// Whether the state has one mean of squares for the row.
HKV_HOST_DEVICE bool adapts_by_row(Optimizer kind) {
  return kind == Optimizer::kRowWiseAdagrad || kind == Optimizer::kRowWiseAdam;
}

// Whether the optimizer uses beta1 and beta2.
HKV_HOST_DEVICE bool has_moments(Optimizer kind) {
  return kind == Optimizer::kAdam || kind == Optimizer::kRowWiseAdam || kind == Optimizer::kLamb;
}

// Positions in a row's state of the mean of squares and of the number of updates.
HKV_HOST_DEVICE int32_t row_square_column(Optimizer kind, int32_t dim) {
  return column_states(kind) * dim;
}
HKV_HOST_DEVICE int32_t own_step_column(Optimizer kind, int32_t dim) {
  return column_states(kind) * dim + (adapts_by_row(kind) ? 1 : 0);
}

// Number of fp32 state values of a row. If the number of columns is a multiple of four, the state
// is padded to a multiple of four, so that both can be read four values at a time.
HKV_HOST_DEVICE int32_t state_width(const OptimizerConfig& config, int32_t dim) {
  const int32_t used = own_step_column(config.kind, dim) + (config.own_steps ? 1 : 0);
  return used > 1 && dim % 4 == 0 ? (used + 3) / 4 * 4 : used;
}

// Identifies the layout of the state. Saved states contain this number.
HKV_HOST_DEVICE int64_t state_layout(const OptimizerConfig& config) {
  return static_cast<int64_t>(config.kind) + (config.own_steps ? 256 : 0);
}

// Values of one update that all columns of a row share.
struct RowTerms {
  float learning_rate;
  float gradient_scale;     // factor of the gradient after clipping by norm
  float decay_factor;       // factor of the row after decoupled weight decay
  float rate;               // factor of the direction
  float first_correction;   // 1 / (1 - beta1^step)
  float second_correction;  // 1 / sqrt(1 - beta2^step)
};

// `step` is the number of updates of the table or of the row, this update included.
HKV_HOST_DEVICE RowTerms begin_row(const OptimizerConfig& config, float learning_rate, float step) {
  RowTerms terms;
  terms.learning_rate = learning_rate;
  terms.gradient_scale = 1.0f;
  terms.decay_factor = 1.0f - learning_rate * config.decoupled_decay;
  terms.rate = learning_rate;
  terms.first_correction = 1.0f;
  terms.second_correction = 1.0f;
  if (has_moments(config.kind)) {
    terms.first_correction = 1.0f / -expm1f(step * config.log_beta1);
    terms.second_correction = 1.0f / sqrtf(-expm1f(step * config.log_beta2));
    if (config.kind != Optimizer::kLamb) terms.rate *= terms.first_correction;
  }
  return terms;
}

// The gradient, clipped by value. NaN stays NaN.
HKV_HOST_DEVICE float clipped(const OptimizerConfig& config, float gradient) {
  return gradient > config.clip_value    ? config.clip_value
         : gradient < -config.clip_value ? -config.clip_value
                                         : gradient;
}

// Whether clip_row must be called.
HKV_HOST_DEVICE bool clips_by_norm(const OptimizerConfig& config) {
  return config.clip_norm < std::numeric_limits<float>::infinity();
}

// squares: the sum over columns of clipped(gradient)^2.
HKV_HOST_DEVICE void clip_row(const OptimizerConfig& config, float squares, RowTerms* terms) {
  const float norm = sqrtf(squares);
  terms->gradient_scale = norm > config.clip_norm ? config.clip_norm / norm : 1.0f;
}

// The gradient in the formulas: clipped, with coupled weight decay.
HKV_HOST_DEVICE float gradient_of(const OptimizerConfig& config, const RowTerms& terms, float value,
                                  float gradient) {
  const float g = clipped(config, gradient);
  return config.coupled_decay != 0.0f
             ? sum_of_products(config.coupled_decay, value, terms.gradient_scale, g)
             : g * terms.gradient_scale;
}

// Whether gradient_of is the identity.
HKV_HOST_DEVICE bool has_plain_gradient(const OptimizerConfig& config) {
  return config.clip_value == std::numeric_limits<float>::infinity() && !clips_by_norm(config) &&
         config.coupled_decay == 0.0f;
}

// Only if adapts_by_row. squares: the sum over columns of gradient_of^2. Returns the row's new
// mean.
HKV_HOST_DEVICE float adapt_row(const OptimizerConfig& config, float squares, int32_t dim,
                                float row_square, RowTerms* terms) {
  const float mean = squares / static_cast<float>(dim);
  if (config.kind == Optimizer::kRowWiseAdagrad) {
    row_square += mean;
    terms->rate /= sqrtf(row_square + config.initial_accumulator) + config.eps;
  } else {
    row_square = sum_of_products(config.beta2, row_square, config.new_part2, mean);
    terms->rate /= sqrtf(row_square) * terms->second_correction + config.eps;
  }
  return row_square;
}

// Whether limit_row must be called.
HKV_HOST_DEVICE bool limits_norm(const OptimizerConfig& config) {
  return config.max_norm < std::numeric_limits<float>::infinity();
}

// The new value of a column without state. direction: the result of gradient_of.
HKV_HOST_DEVICE float moved(const RowTerms& terms, float value, float direction) {
  return sum_of_products(terms.decay_factor, value, -terms.rate, direction);
}

// Scales the updated row down to max_norm. Called last, if limits_norm; the columns must have no
// state. squares: the sum over columns of moved^2. `moved` is linear in both of its factors, so the
// column parts need no change.
HKV_HOST_DEVICE void limit_row(const OptimizerConfig& config, float squares, RowTerms* terms) {
  const float norm = sqrtf(squares);
  if (!(norm > config.max_norm)) return;
  const float scale = config.max_norm / norm;
  terms->decay_factor *= scale;
  terms->rate *= scale;
}

// Updates a column's state in place and returns its new value. g: the result of gradient_of. Not
// for LAMB.
template <Optimizer kKind>
HKV_HOST_DEVICE float move_column(const OptimizerConfig& config, const RowTerms& terms, float value,
                                  float g, float& first, float& second) {
  float direction = g;
  if constexpr (kKind == Optimizer::kMomentum) {
    first = config.momentum * first + g;
    direction = config.nesterov ? g + config.momentum * first : first;
  } else if constexpr (kKind == Optimizer::kAdagrad) {
    first += g * g;
    direction = g / (sqrtf(first + config.initial_accumulator) + config.eps);
  } else if constexpr (kKind == Optimizer::kAdam) {
    first = sum_of_products(config.beta1, first, config.new_part1, g);
    second = sum_of_products(config.beta2, second, config.new_part2, g * g);
    direction = first / (sqrtf(second) * terms.second_correction + config.eps);
  } else if constexpr (kKind == Optimizer::kRowWiseAdam) {
    first = sum_of_products(config.beta1, first, config.new_part1, g);
    direction = first;
  } else if constexpr (kKind == Optimizer::kFtrl) {
    // A learning rate of 0 would be a denominator; the row does not change then.
    if (!(terms.learning_rate > 0.0f)) return value;
    const float before = sqrtf(second + config.initial_accumulator);
    // The regularisation of a new row is centred at its initial value; the published form uses 0.
    if (first == 0.0f && second == 0.0f) {
      first = -(config.ftrl_beta + before) / terms.learning_rate * value;
    }
    second += g * g;
    const float after = sqrtf(second + config.initial_accumulator);
    // (after - before), without cancellation.
    const float grown = after > 0.0f ? g * g / (after + before) : 0.0f;
    first += g - grown / terms.learning_rate * value;
    const float quadratic = (config.ftrl_beta + after) / terms.learning_rate + config.l2;
    if (!(quadratic > 0.0f) && first == 0.0f) return value;
    if (fabsf(first) <= config.l1) return 0.0f;
    return (copysignf(config.l1, first) - first) / quadratic;
  }
  return moved(terms, value, direction);
}

// As move_column, from the row's gradient.
template <Optimizer kKind>
HKV_HOST_DEVICE float update_column(const OptimizerConfig& config, const RowTerms& terms,
                                    float value, float gradient, float& first, float& second) {
  return move_column<kKind>(config, terms, value, gradient_of(config, terms, value, gradient),
                            first, second);
}

// LAMB, part 1: a column's new state.
HKV_HOST_DEVICE void update_moments(const OptimizerConfig& config, const RowTerms& terms,
                                    float value, float gradient, float& first, float& second) {
  const float g = gradient_of(config, terms, value, gradient);
  first = sum_of_products(config.beta1, first, config.new_part1, g);
  second = sum_of_products(config.beta2, second, config.new_part2, g * g);
}

// LAMB, part 2: the direction at a learning rate of 1, from the new state.
HKV_HOST_DEVICE float lamb_direction(const OptimizerConfig& config, const RowTerms& terms,
                                     float value, float first, float second) {
  return terms.first_correction * first / (sqrtf(second) * terms.second_correction + config.eps) +
         config.lamb_decay * value;
}

// LAMB, part 3: the scale of the step, from the sums of squares of the row and of the direction. It
// is 1 if either is 0; otherwise a row of zeros would never change.
HKV_HOST_DEVICE float trust_ratio(float row_squares, float direction_squares) {
  return row_squares > 0.0f && direction_squares > 0.0f
             ? sqrtf(row_squares) / sqrtf(direction_squares)
             : 1.0f;
}

}  // namespace torchrec_hkv
