// Moves shards from ranks with too little memory to other ranks.
#pragma once

#include <vector>

#include "planner/placement_state.h"

namespace torchrec_hkv::planner {

// A shard that may be on any rank.
struct MovableShard {
  const ShardNeed* need;
  int rank;
  size_t position;  // index of the shard for the caller
};

using ByRank = std::vector<std::vector<MovableShard*>>;

// Moves a shard to another rank.
void move(MovableShard* shard, int to, std::vector<RankState>& ranks, ByRank& by_rank);

// Moves shards, or swaps two, as long as this reduces the missing memory. Each step makes the best
// change for the rank that lacks the most, or one that provides half of what it lacks. For s shards
// on r ranks, a step takes O(s^2 / r).
//
// ranks: free memory, negative if memory is missing.
// Returns whether all shards fit.
bool exchange(std::vector<RankState>& ranks, std::vector<MovableShard>& shards);

}  // namespace torchrec_hkv::planner
