// The configuration of initial rows from Python.
#pragma once

#include <cstdint>
#include <string>

#include "common/initial_rows.h"

namespace torchrec_hkv::runtime {

// A normal distribution needs at least this probability between its bounds. Otherwise there are too
// few doubles among its quantiles to fill the range of a float.
constexpr double kMinMass = 1e-9;

struct InitialConfig {
  std::string distribution;  // "uniform" or "normal"
  double low;                // range of a uniform, bounds of a normal distribution
  double high;
  double mean;  // mean of a normal distribution
  double std;
};

// Throws ValueError for an invalid config; the message starts with `where`. seed: mixed with the
// table's name.
InitialRows make_initial_rows(const InitialConfig& config, uint64_t seed, const std::string& where);

}  // namespace torchrec_hkv::runtime
