// The configuration of an optimizer from Python.
#pragma once

#include <cstdint>
#include <optional>

#include "common/optimizers.h"

namespace torchrec_hkv::runtime {

// The fields of the dataclasses in torchrec_hkv/hash_table/optimizers.py, which check them.
struct OptimizerArguments {
  Optimizer kind = Optimizer::kNone;
  double eps = 0.0;
  double coupled_decay = 0.0;
  double decoupled_decay = 0.0;
  double lamb_decay = 0.0;
  double momentum = 0.0;
  bool nesterov = false;
  double beta1 = 0.0;
  double beta2 = 0.0;
  bool own_steps = false;
  double initial_accumulator = 0.0;
  double ftrl_beta = 0.0;
  double l1 = 0.0;
  double l2 = 0.0;
  std::optional<double> clip_value;
  std::optional<double> clip_norm;
  std::optional<double> clip_output;
  bool stochastic_rounding = false;
  int64_t rounding_seed = 0;
  std::optional<double> max_norm;
};

OptimizerConfig make_optimizer_config(const OptimizerArguments& arguments);

}  // namespace torchrec_hkv::runtime
