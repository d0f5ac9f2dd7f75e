#include "common/initial_rows.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace torchrec_hkv {

InitialRows uniform_rows(uint64_t seed, float low, float high) {
  InitialRows init{};
  init.seed = seed;
  init.distribution = Distribution::kUniform;
  init.low = low;
  init.high = high;
  return init;
}

// A range above the mean is reflected, so that its quantiles are near 0, where doubles have the
// best resolution.
InitialRows normal_rows(uint64_t seed, double mean, double std, double low, double high) {
  const auto below = [](double z) { return 0.5 * std::erfc(-z * 0.70710678118654752440); };
  constexpr float kMax = std::numeric_limits<float>::max();
  const double from = (low - mean) / std;
  const double to = (high - mean) / std;
  const bool reflect = from > 0.0;
  InitialRows init{};
  init.seed = seed;
  init.distribution = Distribution::kNormal;
  init.low = std::max(static_cast<float>(low), -kMax);
  init.high = std::min(static_cast<float>(high), kMax);
  init.mean = mean;
  init.scale = reflect ? -std : std;
  init.first = below(reflect ? -to : from);
  init.mass = below(reflect ? -from : to) - init.first;
  return init;
}

}  // namespace torchrec_hkv
