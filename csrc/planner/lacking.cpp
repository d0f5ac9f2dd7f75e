#include "planner/lacking.h"

#include <algorithm>

#include "planner/exchange.h"
#include "planner/sites.h"
#include "planner/units.h"

namespace torchrec_hkv::planner {
namespace {

bool lacks_memory(const RankState& rank) { return rank.hbm < 0 || rank.host < 0; }

// Options with a shard of at least this many bytes that may be on several ranks.
std::vector<size_t> at_least(const std::vector<const Parts*>& options, int64_t bytes) {
  std::vector<size_t> found;
  for (size_t at = 0; at < options.size(); ++at) {
    const Parts& parts = *options[at];
    if (parts.spread != Spread::kAllRanks && parts.most_bytes >= bytes) found.push_back(at);
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
  PlacementState sites(std::move(ranks), per_host, need_hosts(units), false);
  std::vector<std::vector<size_t>> found;
  std::vector<PlacementUnit> placed;
  for (const PlacementUnit& unit : units) {
    const int site = sites.first(unit);
    if (site >= 0) {
      sites.take(unit, site);
    } else if (unit.spread == Spread::kAnyRank) {
      sites.overflow(unit);
    } else {
      found.push_back(at_least(options, options[unit.option]->most_bytes));
      continue;
    }
    placed.push_back(unit);
  }
  std::vector<int> on = sites.taken();
  std::vector<RankState> left = sites.ranks();
  std::vector<MovableShard> shards = movable(placed, on);
  exchange(left, shards);
  for (const MovableShard& shard : shards) on[shard.position] = shard.rank;
  std::vector<std::vector<size_t>> by_rank(left.size());
  size_t position = 0;
  for (const PlacementUnit& unit : placed) {
    for (size_t i = 0; i < unit.count; ++i) {
      std::vector<size_t>& own = by_rank[on[position++]];
      if (own.empty() || own.back() != unit.option) own.push_back(unit.option);
    }
  }
  for (size_t r = 0; r < left.size(); ++r) {
    if (lacks_memory(left[r])) found.push_back(std::move(by_rank[r]));
  }
  return found;
}

}  // namespace torchrec_hkv::planner
