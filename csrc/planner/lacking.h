// Options that must be spread over more ranks for all to fit.
#pragma once

#include <vector>

#include "planner/packing.h"

namespace torchrec_hkv::planner {

// Lists of options, of each of which some must be spread further for all to fit. For each rank that
// lacks memory after the largest shards were placed where most is left: the options with a shard on
// it. For each block of shards that fits no host: the options with shards at least as large. No
// list if all fit, and only an empty one if the options for all ranks do not fit.
//
// rooms, per_host: as for pack.
std::vector<std::vector<size_t>> lacking(const std::vector<const Parts*>& options,
                                         const std::vector<Room>& rooms, int per_host);

}  // namespace torchrec_hkv::planner
