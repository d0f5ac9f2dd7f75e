#include "runtime/initial_rows.h"

#include <c10/util/Exception.h>

#include <cmath>

namespace torchrec_hkv::runtime {

InitialRows make_initial_rows(const InitialConfig& config, uint64_t seed,
                              const std::string& where) {
  const double low = config.low;
  const double high = config.high;
  const double mean = config.mean;
  const double std = config.std;
  TORCH_CHECK_VALUE(low <= high, where, "initial rows from ", low, " to ", high,
                    ", but the first must not be larger.");
  if (config.distribution == "uniform") {
    const InitialRows rows = uniform_rows(seed, static_cast<float>(low), static_cast<float>(high));
    TORCH_CHECK_VALUE(std::isfinite(rows.low) && std::isfinite(rows.high - rows.low), where,
                      "uniform initial rows from ", low, " to ", high,
                      ", but the two and their distance must be finite in float32.");
    return rows;
  }
  TORCH_CHECK_VALUE(config.distribution == "normal", where, "initial rows have the distribution '",
                    config.distribution, "', but must have 'uniform' or 'normal'.");
  TORCH_CHECK_VALUE(std::isfinite(mean), where, "the mean of normal initial rows is ", mean,
                    ", but must be finite.");
  TORCH_CHECK_VALUE(std::isfinite(std) && std > 0, where,
                    "the standard deviation of normal initial rows is ", std,
                    ", but must be positive and finite.");
  const InitialRows rows = normal_rows(seed, mean, std, low, high);
  TORCH_CHECK_VALUE(rows.mass >= kMinMass, where, "initial rows from ", low, " to ", high, " hold ",
                    rows.mass, " of the probability of a normal with mean ", mean,
                    " and standard deviation ", std, ", but must hold at least 1e-9.");
  return rows;
}

}  // namespace torchrec_hkv::runtime
