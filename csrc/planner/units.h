// Units of shards, which are placed on ranks step by step.
#pragma once

#include <vector>

#include "planner/exchange.h"
#include "planner/packing.h"
#include "planner/placement_state.h"

namespace torchrec_hkv::planner {

// Makes the units of options, the largest first, and the ranks. Options for all ranks are
// subtracted from the ranks' free memory, which may become negative. False if shards can't be
// assigned to hosts.
bool make_units(const std::vector<const Parts*>& options,
                const std::vector<FreeMemory>& free_memory, int per_host,
                std::vector<RankState>& ranks, std::vector<PlacementUnit>& units);

// Whether there are units that must be on one host.
bool need_hosts(const std::vector<PlacementUnit>& units);

// The shards that may be on any rank.
// placed: the rank of each shard, in the order of the units.
std::vector<MovableShard> movable(const std::vector<PlacementUnit>& units,
                                  const std::vector<int>& placed);

}  // namespace torchrec_hkv::planner
