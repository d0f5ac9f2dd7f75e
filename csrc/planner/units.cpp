#include "planner/units.h"

#include <algorithm>

namespace torchrec_hkv::planner {
namespace {

// Adds the units of an option. False if its shards can't be assigned to hosts.
bool add_units(const Parts& parts, size_t option, int num_hosts, int per_host,
               std::vector<PlacementUnit>& units) {
  const ShardNeed* needs = parts.needs.data();
  const size_t count = parts.needs.size();
  const int64_t size = std::max(parts.hbm, parts.host);
  if (parts.spread == Spread::kAnyRank) {
    for (size_t i = 0; i < count; ++i) {
      const int64_t size = std::max(needs[i].hbm, needs[i].host);
      units.push_back({needs + i, 1, parts.spread, option, i, size});
    }
    return true;
  }
  if (num_hosts == 0) return false;
  if (parts.spread == Spread::kOneHost) {
    units.push_back({needs, count, parts.spread, option, 0, size});
    return true;
  }
  const size_t block = static_cast<size_t>(per_host);
  if (count % block != 0) return false;
  for (size_t i = 0; i < count / block; ++i) {
    // Units of an option have one size, so that they are placed one after the other.
    units.push_back({needs + i * block, block, parts.spread, option, i * block, size,
                     i % static_cast<size_t>(num_hosts)});
  }
  return true;
}

}  // namespace

bool make_units(const std::vector<const Parts*>& options,
                const std::vector<FreeMemory>& free_memory, int per_host,
                std::vector<RankState>& ranks, std::vector<PlacementUnit>& units) {
  for (const FreeMemory& rank_memory : free_memory)
    ranks.push_back({rank_memory.hbm, rank_memory.host, 0.0});
  const int num_hosts = static_cast<int>(ranks.size()) / per_host;
  for (size_t at = 0; at < options.size(); ++at) {
    const Parts& parts = *options[at];
    if (parts.spread == Spread::kAllRanks) {
      for (size_t r = 0; r < parts.needs.size(); ++r) ranks[r].take(parts.needs[r]);
    } else if (!add_units(parts, at, num_hosts, per_host, units)) {
      return false;
    }
  }
  std::stable_sort(units.begin(), units.end(),
                   [](const PlacementUnit& a, const PlacementUnit& b) { return a.size > b.size; });
  return true;
}

bool need_hosts(const std::vector<PlacementUnit>& units) {
  return std::any_of(units.begin(), units.end(),
                     [](const PlacementUnit& unit) { return unit.spread != Spread::kAnyRank; });
}

std::vector<MovableShard> movable(const std::vector<PlacementUnit>& units,
                                  const std::vector<int>& placed) {
  std::vector<MovableShard> shards;
  size_t position = 0;
  for (const PlacementUnit& unit : units) {
    if (unit.spread == Spread::kAnyRank) shards.push_back({unit.needs, placed[position], position});
    position += unit.count;
  }
  return shards;
}

}  // namespace torchrec_hkv::planner
