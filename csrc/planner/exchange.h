// Moves shards from ranks whose memory does not suffice to other ranks.
#pragma once

#include <vector>

#include "planner/sites.h"

namespace torchrec_hkv::planner {

// A shard that may be on any rank.
struct Movable {
  const Need* need;
  int rank;
  size_t position;  // of the caller's
};

using ByRank = std::vector<std::vector<Movable*>>;

// Gives a shard to another rank.
void move(Movable* shard, int to, std::vector<Rank>& ranks, ByRank& by_rank);

// Moves shards, or swaps two, as long as this lessens the memory that is missing. In each step the
// best of these changes is made for the rank that lacks most, or one that provides half of it. For
// s shards on r ranks, a step takes a time of s^2 / r.
//
// ranks: free memory, less than nothing where it is missing.
// Returns whether nothing is missing.
bool exchange(std::vector<Rank>& ranks, std::vector<Movable>& shards);

}  // namespace torchrec_hkv::planner
