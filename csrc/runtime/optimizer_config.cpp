#include "runtime/optimizer_config.h"

#include <cmath>
#include <limits>

namespace torchrec_hkv::runtime {

OptimizerConfig make_optimizer_config(const OptimizerArguments& arguments) {
  const auto single = [](double value) { return static_cast<float>(value); };
  const auto bound = [](const std::optional<double>& value) {
    return static_cast<float>(value.value_or(std::numeric_limits<double>::infinity()));
  };
  OptimizerConfig config;
  config.kind = arguments.kind;
  config.eps = single(arguments.eps);
  config.coupled_decay = single(arguments.coupled_decay);
  config.decoupled_decay = single(arguments.decoupled_decay);
  config.lamb_decay = single(arguments.lamb_decay);
  config.momentum = single(arguments.momentum);
  config.nesterov = arguments.nesterov;
  config.beta1 = single(arguments.beta1);
  config.beta2 = single(arguments.beta2);
  config.new_part1 = single(1.0 - arguments.beta1);
  config.new_part2 = single(1.0 - arguments.beta2);
  config.log_beta1 = single(std::log(arguments.beta1));
  config.log_beta2 = single(std::log(arguments.beta2));
  config.own_steps = arguments.own_steps;
  config.initial_accumulator = single(arguments.initial_accumulator);
  config.ftrl_beta = single(arguments.ftrl_beta);
  config.l1 = single(arguments.l1);
  config.l2 = single(arguments.l2);
  config.clip_value = bound(arguments.clip_value);
  config.clip_norm = bound(arguments.clip_norm);
  config.clip_output = bound(arguments.clip_output);
  config.max_norm = bound(arguments.max_norm);
  config.stochastic_rounding = arguments.stochastic_rounding;
  config.rounding_seed = static_cast<uint64_t>(arguments.rounding_seed);
  return config;
}

}  // namespace torchrec_hkv::runtime
