// Loops over a row's columns that compilers vectorise. GCC does not vectorise a conditional
// expression whose alternatives it may skip, so these loops compute both alternatives and select
// one by its bits. The results equal those of common/optimizers.h bit for bit.
#pragma once

#include <cmath>
#include <cstdint>

#include "common/dtypes.h"
#include "common/optimizers.h"
#include "common/vectors_cpu.h"

namespace torchrec_hkv::hash_table::cpu {

// `condition ? then : otherwise`, with both alternatives computed.
inline float either(bool condition, float then, float otherwise) {
  const uint32_t bits = float_bits(otherwise);
  return bits_float(bits ^ ((float_bits(then) ^ bits) & -static_cast<uint32_t>(condition)));
}

// The sum of squares, in eight partial sums.
inline float sum_of_squares(const float* values, int32_t n) {
  Columns lanes = {};
  int32_t c = 0;
  for (; c + 8 <= n; c += 8) {
    Columns columns;
    load_columns<RowType::kFloat32>(reinterpret_cast<const char*>(values + c), columns);
    lanes += columns * columns;
  }
  for (; c < n; ++c) lanes[0] += values[c] * values[c];
  return ((lanes[0] + lanes[4]) + (lanes[2] + lanes[6])) +
         ((lanes[1] + lanes[5]) + (lanes[3] + lanes[7]));
}

// to[c] = `clipped` of a gradient's columns.
inline void clip_columns(float bound, const float* __restrict__ grad, int32_t n,
                         float* __restrict__ to) {
  for (int32_t c = 0; c < n; ++c) {
    const float g = grad[c];
    to[c] = either(g > bound, bound, either(g < -bound, -bound, g));
  }
}

inline void scale_columns(float scale, const float* __restrict__ grad, int32_t n,
                          float* __restrict__ to) {
  for (int32_t c = 0; c < n; ++c) to[c] = grad[c] * scale;
}

// to[c] = a gradient with coupled weight decay.
inline void decay_columns(float decay, const float* __restrict__ grad,
                          const float* __restrict__ row, int32_t n, float* __restrict__ to) {
  for (int32_t c = 0; c < n; ++c) to[c] = grad[c] + decay * row[c];
}

// move_column of FTRL.
inline void move_ftrl_columns(const OptimizerConfig& config, float learning_rate,
                              const float* __restrict__ grad, int32_t n, float* __restrict__ row,
                              float* __restrict__ state) {
  if (!(learning_rate > 0.0f)) return;
  const float initial = config.initial_accumulator, beta = config.ftrl_beta;
  const float l1 = config.l1, l2 = config.l2;
  float* __restrict__ const firsts = state;
  float* __restrict__ const seconds = state + n;
  for (int32_t c = 0; c < n; ++c) {
    const float value = row[c], g = grad[c];
    float first = firsts[c], second = seconds[c];
    const float before = sqrtf(second + initial);
    const bool is_new = (first == 0.0f) & (second == 0.0f);
    first = either(is_new, -(beta + before) / learning_rate * value, first);
    second += g * g;
    const float after = sqrtf(second + initial);
    const float grown = either(after > 0.0f, g * g / (after + before), 0.0f);
    first += g - grown / learning_rate * value;
    const float quadratic = (beta + after) / learning_rate + l2;
    const float moved_to = (copysignf(l1, first) - first) / quadratic;
    const bool stays = !(quadratic > 0.0f) & (first == 0.0f);
    row[c] = either(stays, value, either(fabsf(first) <= l1, 0.0f, moved_to));
    firsts[c] = first;
    seconds[c] = second;
  }
}

// move_column of the other optimizers. Config and terms are passed by value, so the compiler knows
// that no store changes them.
template <Optimizer kKind>
inline void move_columns(const OptimizerConfig config, const RowTerms terms,
                         const float* __restrict__ grad, int32_t n, float* __restrict__ row,
                         float* __restrict__ state) {
  float* const second_state = state + n;
  for (int32_t c = 0; c < n; ++c) {
    float first = 0.0f, second = 0.0f;
    if constexpr (column_states(kKind) >= 1) first = state[c];
    if constexpr (column_states(kKind) >= 2) second = second_state[c];
    row[c] = move_column<kKind>(config, terms, row[c], grad[c], first, second);
    if constexpr (column_states(kKind) >= 1) state[c] = first;
    if constexpr (column_states(kKind) >= 2) second_state[c] = second;
  }
}

// The update of a row by LAMB. direction: a buffer.
inline void move_lamb_columns(const OptimizerConfig config, const RowTerms terms,
                              const float* __restrict__ grad, int32_t n, float* __restrict__ row,
                              float* __restrict__ state, float* __restrict__ direction) {
  float* const second_state = state + n;
  for (int32_t c = 0; c < n; ++c) {
    float first = state[c], second = second_state[c];
    move_column<Optimizer::kAdam>(config, terms, row[c], grad[c], first, second);  // its moments
    state[c] = first;
    second_state[c] = second;
    direction[c] = lamb_direction(config, terms, row[c], first, second);
  }
  const float rate = terms.rate * trust_ratio(sum_of_squares(row, n), sum_of_squares(direction, n));
  for (int32_t c = 0; c < n; ++c) row[c] -= rate * direction[c];
}

}  // namespace torchrec_hkv::hash_table::cpu
