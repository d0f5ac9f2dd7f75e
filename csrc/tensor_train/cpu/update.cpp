#include <algorithm>
#include <vector>

#include "common/parallel.h"
#include "common/rounding.h"
#include "tensor_train/cpu/kernels.h"

namespace torchrec_hkv::tensor_train::cpu {
namespace {

// Computes term(0) + ... + term(n - 1) with partial sums that fit in one vector register.
template <typename Term>
float vector_sum(int64_t n, const Term& term) {
  constexpr int kSums = 8;
  float sums[kSums] = {};
  int64_t i = 0;
  for (; i + kSums <= n; i += kSums) {
    for (int k = 0; k < kSums; ++k) sums[k] += term(i + k);
  }
  for (; i < n; ++i) sums[0] += term(i);
  float total = 0.0f;
  for (const float sum : sums) total += sum;
  return total;
}

// Updates a slice. It is a row in the formulas, and its elements are the columns.
class SliceUpdater {
 public:
  SliceUpdater(const OptimizerConfig& config, float learning_rate, int64_t step, int64_t size)
      : config_(config), learning_rate_(learning_rate), step_(step), size_(size) {}

  void update(float* values, const float* grad, float* state) const {
    const RowTerms terms = begin(values, grad, state);
    switch (config_.kind) {
      case Optimizer::kSgd:
        return elements<Optimizer::kSgd>(values, grad, state, terms);
      case Optimizer::kMomentum:
        return elements<Optimizer::kMomentum>(values, grad, state, terms);
      case Optimizer::kAdagrad:
        return elements<Optimizer::kAdagrad>(values, grad, state, terms);
      case Optimizer::kRowWiseAdagrad:
        return elements<Optimizer::kRowWiseAdagrad>(values, grad, state, terms);
      case Optimizer::kAdam:
        return elements<Optimizer::kAdam>(values, grad, state, terms);
      case Optimizer::kRowWiseAdam:
        return elements<Optimizer::kRowWiseAdam>(values, grad, state, terms);
      case Optimizer::kFtrl:
        return elements<Optimizer::kFtrl>(values, grad, state, terms);
      case Optimizer::kNone:
      case Optimizer::kLamb:  // refused when a group is created
        return;
    }
  }

 private:
  RowTerms begin(const float* values, const float* grad, float* state) const {
    const OptimizerConfig config = config_;
    const auto size = static_cast<int32_t>(size_);
    float step = static_cast<float>(step_);
    if (config.own_steps) step = state[own_step_column(config.kind, size)] += 1.0f;
    RowTerms terms = begin_row(config, learning_rate_, step);
    if (clips_by_norm(config)) {
      clip_row(config,
               vector_sum(size_,
                          [&](int64_t i) {
                            const float g = clipped(config, grad[i]);
                            return g * g;
                          }),
               &terms);
    }
    if (adapts_by_row(config.kind)) {
      const float squares = vector_sum(size_, [&, terms](int64_t i) {
        const float g = gradient_of(config, terms, values[i], grad[i]);
        return g * g;
      });
      float& square = state[row_square_column(config.kind, size)];
      square = adapt_row(config, squares, size, square, &terms);
    }
    return terms;
  }

  // Config and terms are passed by value, so that the compiler knows that stores don't change them.
  template <Optimizer kKind>
  void elements(float* __restrict__ values, const float* __restrict__ grad,
                float* __restrict__ state, const RowTerms terms) const {
    const OptimizerConfig config = config_;
    float* const second_state = state + size_;
    for (int64_t i = 0; i < size_; ++i) {
      float first = 0.0f, second = 0.0f;
      if constexpr (column_states(kKind) >= 1) first = state[i];
      if constexpr (column_states(kKind) >= 2) second = second_state[i];
      values[i] = update_column<kKind>(config, terms, values[i], grad[i], first, second);
      if constexpr (column_states(kKind) >= 1) state[i] = first;
      if constexpr (column_states(kKind) >= 2) second_state[i] = second;
    }
  }

  const OptimizerConfig config_;
  const float learning_rate_;
  const int64_t step_;
  const int64_t size_;
};

void narrow(const float* values, int64_t size, bool by_chance, uint64_t key, uint16_t* out) {
  for (int64_t i = 0; i < size; ++i) {
    out[i] = by_chance
                 ? to_bfloat16_by_chance(values[i], rounding_draw(key, static_cast<uint32_t>(i)))
                 : to_bfloat16(values[i]);
  }
}

}  // namespace

void clear_slices(float* gradient, const uint8_t* touched, int64_t slices, int64_t slice_size,
                  int threads) {
  const int64_t grain = std::max<int64_t>(1, 65536 / slice_size);
  parallel_for(slices, grain, threads, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      if (touched[i]) std::fill_n(gradient + i * slice_size, slice_size, 0.0f);
    }
  });
}

void update_core(char* core, RowType type, int64_t slices, int64_t slice_size, float* state,
                 const float* grad, const uint8_t* touched, const OptimizerConfig& config,
                 float learning_rate, int64_t step, uint64_t core_seed, int threads) {
  const int64_t width = state_width(config, static_cast<int32_t>(slice_size));
  const int64_t grain = std::max<int64_t>(1, 16384 / slice_size);
  parallel_for(slices, grain, threads, [&](int64_t begin, int64_t end) {
    const SliceUpdater updater(config, learning_rate, step, slice_size);
    std::vector<float> widened(type == RowType::kFloat32 ? 0 : slice_size);
    for (int64_t i = begin; i < end; ++i) {
      if (!touched[i]) continue;
      const float* const gradient = grad + i * slice_size;
      if (type == RowType::kFloat32) {
        float* const values = reinterpret_cast<float*>(core) + i * slice_size;
        updater.update(values, gradient, state + i * width);
        continue;
      }
      uint16_t* const stored = reinterpret_cast<uint16_t*>(core) + i * slice_size;
      for (int64_t c = 0; c < slice_size; ++c) widened[c] = from_bfloat16(stored[c]);
      updater.update(widened.data(), gradient, state + i * width);
      const uint64_t key = rounding_key(config.rounding_seed, core_seed, i, step);
      narrow(widened.data(), slice_size, config.stochastic_rounding, key, stored);
    }
  });
}

}  // namespace torchrec_hkv::tensor_train::cpu
