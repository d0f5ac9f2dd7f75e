// Initial rows, as configured by Python.
#pragma once

#include <cstdint>
#include <string>

#include "common/initial_rows.h"

namespace torchrec_hkv::runtime {

// A normal distribution needs at least this probability between its bounds. Otherwise its quantiles
// would be too few doubles to fill the range of a float.
constexpr double kLeastMass = 1e-9;

struct InitialConfig {
  std::string distribution;  // "uniform" or "normal"
  double low;                // range of the uniform, bounds of the normal
  double high;
  double mean;  // of the normal
  double std;
};

// Throws ValueError for an invalid config; the message starts with `where`. seed: already mixed
// with the table's name.
InitialRows make_initial_rows(const InitialConfig& config, uint64_t seed, const std::string& where);

}  // namespace torchrec_hkv::runtime
