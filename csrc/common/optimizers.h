// Optimizer formulas, written once for both devices. A gradient is the sum over all occurrences of
// an id in the batch; each row is updated once a step.
#pragma once

#include <cmath>
#include <cstdint>

#include "common/macros.h"

namespace torchrec_hkv {

enum class Optimizer : int32_t {
  kNone = 0,            // not trained
  kSgd = 1,             // row -= lr * g
  kRowWiseAdagrad = 2,  // state += mean(g^2); row -= lr / (sqrt(state) + eps) * g
};

struct OptimizerConfig {
  Optimizer kind;
  float eps;
};

// fp32 values of state a row keeps.
HKV_HOST_DEVICE int32_t state_width(Optimizer kind) {
  return kind == Optimizer::kRowWiseAdagrad ? 1 : 0;
}

// What multiplies the gradient; updates the row's state. `squares` is the sum of g^2 over the row's
// columns, `dim` their number (FBGEMM's EXACT_ROWWISE_ADAGRAD).
HKV_HOST_DEVICE float row_step(const OptimizerConfig& config, float learning_rate, float squares,
                               int32_t dim, float* state) {
  if (config.kind == Optimizer::kRowWiseAdagrad) {
    *state += squares / static_cast<float>(dim);
    return learning_rate / (sqrtf(*state) + config.eps);
  }
  return learning_rate;
}

}  // namespace torchrec_hkv
