#include "planner/options_to_spread.h"

#include <algorithm>

#include "planner/exchange.h"
#include "planner/placement_state.h"
#include "planner/units.h"

namespace torchrec_hkv::planner {
namespace {

bool lacks_memory(const RankState& rank) { return rank.hbm < 0 || rank.host < 0; }

// Options with a shard of at least this many bytes that may be on several ranks.
std::vector<size_t> at_least(const std::vector<const Parts*>& options, int64_t bytes) {
  std::vector<size_t> found;
  for (size_t at = 0; at < options.size(); ++at) {
    const Parts& parts = *options[at];
    if (parts.spread != Spread::kAllRanks && parts.max_bytes >= bytes) found.push_back(at);
  }
  return found;
}

}  // namespace

std::vector<std::vector<size_t>> options_to_spread(const std::vector<const Parts*>& options,
                                                   const std::vector<FreeMemory>& free_memory,
                                                   int per_host) {
  std::vector<RankState> ranks;
  std::vector<PlacementUnit> units;
  if (!make_units(options, free_memory, per_host, ranks, units)) return {{}};
  if (std::any_of(ranks.begin(), ranks.end(), lacks_memory)) return {{}};
  PlacementState state(std::move(ranks), per_host, need_hosts(units), false);
  std::vector<std::vector<size_t>> found;
  std::vector<PlacementUnit> placed;
  for (const PlacementUnit& unit : units) {
    const int site = state.first(unit);
    if (site >= 0) {
      state.take(unit, site);
    } else if (unit.spread == Spread::kAnyRank) {
      state.overflow(unit);
    } else {
      found.push_back(at_least(options, options[unit.option]->max_bytes));
      continue;
    }
    placed.push_back(unit);
  }
  std::vector<int> on = state.taken();
  std::vector<RankState> ranks_after = state.ranks();
  std::vector<MovableShard> shards = movable(placed, on);
  exchange(ranks_after, shards);
  for (const MovableShard& shard : shards) on[shard.position] = shard.rank;
  std::vector<std::vector<size_t>> by_rank(ranks_after.size());
  size_t position = 0;
  for (const PlacementUnit& unit : placed) {
    for (size_t i = 0; i < unit.count; ++i) {
      std::vector<size_t>& options_of_rank = by_rank[on[position++]];
      if (options_of_rank.empty() || options_of_rank.back() != unit.option)
        options_of_rank.push_back(unit.option);
    }
  }
  for (size_t r = 0; r < ranks_after.size(); ++r) {
    if (lacks_memory(ranks_after[r])) found.push_back(std::move(by_rank[r]));
  }
  return found;
}

}  // namespace torchrec_hkv::planner
