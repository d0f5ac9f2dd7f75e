// Moves shards from slow ranks to faster ones.
#pragma once

#include <vector>

#include "planner/exchange.h"
#include "planner/placement_state.h"

namespace torchrec_hkv::planner {

// Moves shards, or swaps one or several for another, as long as this makes the slowest rank faster
// and all shards fit. For s shards on r ranks, a step takes O(s^2 / r^2) if another rank has little
// to do, and at most O(s^2 / r).
//
// ranks: free memory, at least 0.
// max_offers: approximate limit of the number of changes that are tried.
void balance(std::vector<RankState>& ranks, std::vector<MovableShard>& shards, int64_t max_offers);

}  // namespace torchrec_hkv::planner
