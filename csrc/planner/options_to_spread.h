// Options that must be spread over more ranks for all to fit.
#pragma once

#include <vector>

#include "planner/packing.h"

namespace torchrec_hkv::planner {

// Lists of options. For all options to fit, some options of each list must be spread over more
// ranks. There is a list for each rank that lacks memory after shards were placed, the largest
// first, where most memory is left: the options with a shard on it. There is a list for each block
// of shards that fits no host: the options with shards at least as large. The result has no list if
// all fit, and only an empty list if the options for all ranks do not fit.
//
// rooms, per_host: as for pack.
std::vector<std::vector<size_t>> options_to_spread(const std::vector<const Parts*>& options,
                                                   const std::vector<FreeMemory>& free_memory,
                                                   int per_host);

}  // namespace torchrec_hkv::planner
