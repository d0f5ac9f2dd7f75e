// Initial rows as Python asks for them.
#pragma once

#include <cstdint>
#include <string>

#include "common/initial_rows.h"

namespace torchrec_hkv::runtime {

// A normal needs at least this much probability between its bounds: with less, its quantiles would
// be too few doubles to fill a float's range.
constexpr double kLeastMass = 1e-9;

struct InitialConfig {
  std::string distribution;  // "uniform" or "normal"
  double low;                // range of the uniform, bounds of the normal
  double high;
  double mean;  // of the normal
  double std;
};

// Throws ValueError for a config that makes no sense; its sentence starts with `where`.
// seed: already mixed with the table's name.
InitialRows make_initial_rows(const InitialConfig& config, uint64_t seed, const std::string& where);

}  // namespace torchrec_hkv::runtime
