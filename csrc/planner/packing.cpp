#include "planner/packing.h"

#include <algorithm>
#include <limits>
#include <numeric>

#include "planner/balance.h"
#include "planner/exchange.h"
#include "planner/placement_state.h"
#include "planner/units.h"

namespace torchrec_hkv::planner {
namespace {

// Besides one attempt per unit, a search makes at most this many attempts to place a unit:
// kMaxAttempts for up to kFewUnits units, otherwise kFewerAttempts.
constexpr size_t kFewUnits = 64;
constexpr int64_t kMaxAttempts = 2000, kFewerAttempts = 200;
// Number of changes that are tried to make the slowest rank faster.
constexpr int64_t kMaxOffers = 4'000'000, kFewerOffers = 100'000;
// Shares of all bytes that are placed by memory before the rest is placed by time.
constexpr double kShares[] = {0.5, 0.9, 0.97, 0.99, 0.999};

// Branch and bound over all assignments.
class FastestSearch {
 public:
  FastestSearch(const std::vector<PlacementUnit>& units, PlacementState state)
      : units_(units), state_(std::move(state)) {}

  std::vector<int> run() {
    go_on();
    return best_;
  }

 private:
  void go_on() {
    const double time = state_.slowest();
    if (time >= least_) return;
    if (state_.num_placed() == units_.size()) {
      least_ = time;
      best_ = state_.taken();
      return;
    }
    const PlacementUnit& unit = units_[state_.num_placed()];
    for (const int site : state_.all(unit)) {
      state_.take(unit, site);
      go_on();
      state_.free(unit);
    }
  }

  const std::vector<PlacementUnit>& units_;
  PlacementState state_;
  double least_ = std::numeric_limits<double>::infinity();
  std::vector<int> best_;
};

// Depth-first search in the order of the units. Empty if it fails.
// is_greedy: out: whether each unit is on its preferred site, so that memory had no influence.
std::vector<int> search(const std::vector<PlacementUnit>& units, PlacementState state,
                        bool* is_greedy = nullptr) {
  struct ShardStep {
    bool listed = false;      // whether `others` is set
    std::vector<int> others;  // sites that are not tried yet, the last one first
  };
  std::vector<ShardStep> steps;
  bool back = false;
  const int64_t more = units.size() <= kFewUnits ? kMaxAttempts : kFewerAttempts;
  for (int64_t i = static_cast<int64_t>(units.size()) + more; i > 0; --i) {
    // After a step back the last step has no site.
    const size_t depth = steps.size() - (back ? 1 : 0);
    if (depth == units.size()) {
      if (is_greedy != nullptr) *is_greedy = !state.skipped_preferred();
      return state.taken();
    }
    const PlacementUnit& unit = units[depth];
    int site = -1;
    if (!back) {
      steps.emplace_back();
      site = state.first(unit);
    } else {
      ShardStep& step = steps.back();
      if (!step.listed) {
        step.listed = true;
        step.others = state.all(unit);
        std::reverse(step.others.begin(), step.others.end());
        step.others.pop_back();  // this site has been tried
      }
      if (!step.others.empty()) {
        site = step.others.back();
        step.others.pop_back();
      }
    }
    if (site >= 0) {
      state.take(unit, site);
      back = false;
      continue;
    }
    steps.pop_back();
    if (steps.empty()) return {};
    state.free(units[depth - 1]);
    back = true;
  }
  return {};
}

// Places units, the largest first, and then exchanges shards that do not fit. Empty if it fails.
// first: number of units that go where most memory is left. The others go where `state` prefers.
std::vector<int> exchanged(const std::vector<PlacementUnit>& units, PlacementState state,
                           size_t first) {
  bool all_fit = true;
  state.prefer_time(false);
  for (size_t at = 0; at < units.size(); ++at) {
    const PlacementUnit& unit = units[at];
    if (at == first) state.prefer_time(true);
    const int site = state.first(unit);
    if (site >= 0) {
      state.take(unit, site);
    } else if (unit.spread == Spread::kAnyRank) {
      state.overflow(unit);
      all_fit = false;
    } else {
      return {};
    }
  }
  std::vector<int> placed = state.taken();
  if (all_fit) return placed;
  std::vector<MovableShard> shards = movable(units, placed);
  std::vector<RankState> ranks = state.ranks();
  if (!exchange(ranks, shards)) return {};
  for (const MovableShard& shard : shards) placed[shard.position] = shard.rank;
  return placed;
}

// Places units if the ranks with the least time lack memory for some: the units that take the most
// memory go where most memory is left, and the others where time is least.
std::vector<int> mixed(const std::vector<PlacementUnit>& units, const PlacementState& state) {
  double all = 0;
  for (const PlacementUnit& unit : units) all += static_cast<double>(unit.size);
  double taken = 0;
  size_t count = 0;
  for (const double share : kShares) {
    while (count < units.size() && taken < share * all) {
      taken += static_cast<double>(units[count++].size);
    }
    std::vector<int> placed = exchanged(units, state, count);
    if (!placed.empty()) return placed;
  }
  return {};
}

// Moves shards as long as the slowest rank becomes faster. Returns its time.
double balanced(const std::vector<PlacementUnit>& units, std::vector<RankState> ranks,
                int64_t max_offers, std::vector<int>& placed) {
  auto rank = placed.begin();
  for (const PlacementUnit& unit : units) {
    for (size_t i = 0; i < unit.count; ++i) ranks[*rank++].take(unit.needs[i]);
  }
  std::vector<MovableShard> shards = movable(units, placed);
  balance(ranks, shards, max_offers);
  for (const MovableShard& shard : shards) placed[shard.position] = shard.rank;
  double most = 0;
  for (const RankState& each : ranks) most = std::max(most, each.time);
  return most;
}

// The fastest assignment after balancing. To save time, only the assignment that is fastest before
// is balanced, unless `all` is set.
std::vector<int> fastest(const std::vector<PlacementUnit>& units,
                         const std::vector<RankState>& ranks, bool all,
                         std::vector<std::vector<int>> found) {
  std::vector<int> best;
  double least = std::numeric_limits<double>::infinity();
  for (const bool last : {false, true}) {
    for (std::vector<int>& placed : found) {
      if (placed.empty() || (last && !all)) continue;
      const double time = balanced(units, ranks, last ? kMaxOffers : 0, placed);
      if (time < least) {
        least = time;
        best = placed;
      }
    }
  }
  if (!all && !best.empty()) balanced(units, ranks, kFewerOffers, best);
  return best;
}

}  // namespace

Parts::Parts(std::vector<ShardNeed> shards, Spread spread)
    : needs(std::move(shards)), spread(spread) {
  for (const ShardNeed& need : needs) {
    hbm = added(hbm, need.hbm);
    host = added(host, need.host);
    time += need.time;
    max_hbm = std::max(max_hbm, need.hbm);
    max_host = std::max(max_host, need.host);
    max_bytes = std::max(max_bytes, added(need.hbm, need.host));
  }
}

bool Parts::fits_where(const Parts& other) const {
  if (needs.size() != other.needs.size()) return false;
  for (size_t i = 0; i < needs.size(); ++i) {
    if (needs[i].hbm > other.needs[i].hbm || needs[i].host > other.needs[i].host) return false;
  }
  return true;
}

std::optional<ShardPlacement> pack(const std::vector<const Parts*>& options,
                                   const std::vector<FreeMemory>& free_memory, int per_host,
                                   PackEffort effort) {
  std::vector<RankState> ranks;
  std::vector<PlacementUnit> units;
  if (!make_units(options, free_memory, per_host, ranks, units)) return std::nullopt;
  double hbm = 0, host = 0;
  for (const Parts* parts : options) {
    if (parts->spread == Spread::kAllRanks) continue;
    hbm += static_cast<double>(parts->hbm);
    host += static_cast<double>(parts->host);
  }
  double has_hbm = 0, has_host = 0;
  for (const RankState& rank : ranks) {
    if (rank.hbm < 0 || rank.host < 0) return std::nullopt;
    has_hbm += static_cast<double>(rank.hbm);
    has_host += static_cast<double>(rank.host);
  }
  // Sums of doubles are exact up to 2^53 bytes; beyond that, the search decides.
  constexpr double kRounding = 1 + 1e-12;
  if (hbm > has_hbm * kRounding || host > has_host * kRounding) return std::nullopt;
  const bool has_hosts = need_hosts(units), fast = effort != PackEffort::kFits;
  const PlacementState by_time(ranks, per_host, has_hosts, true);
  const PlacementState by_memory(ranks, per_host, has_hosts, false);
  std::vector<int> found;
  if (fast && !has_hosts && units.size() <= kFewShards) {
    found = FastestSearch(units, by_time).run();
  } else {
    bool is_greedy = false;
    if (fast) found = search(units, by_time, &is_greedy);
    if (!is_greedy) {
      // Memory determines where shards are, so some ranks may have little to do.
      std::vector<int> some = fast ? mixed(units, by_time) : std::vector<int>();
      std::vector<int> all = exchanged(units, by_memory, units.size());
      if (found.empty() && some.empty() && all.empty() && units.size() <= kFewUnits) {
        all = search(units, by_memory);
      }
      const bool is_last = effort == PackEffort::kThorough;
      found = fast ? fastest(units, ranks, is_last, {found, some, all}) : all;
    }
  }
  if (found.empty() && !units.empty()) return std::nullopt;
  ShardPlacement placement(options.size());
  for (size_t at = 0; at < options.size(); ++at) {
    placement[at].resize(options[at]->needs.size());
    std::iota(placement[at].begin(), placement[at].end(), 0);
  }
  auto rank = found.begin();
  for (const PlacementUnit& unit : units) {
    for (size_t i = 0; i < unit.count; ++i) placement[unit.option][unit.shard + i] = *rank++;
  }
  return placement;
}

ShardPlacement pack_overfull(const std::vector<const Parts*>& options,
                             std::vector<FreeMemory>& free_memory) {
  struct Shard {
    const ShardNeed* need;
    int* rank;
  };
  ShardPlacement placement(options.size());
  std::vector<Shard> free;
  const auto put = [&](const ShardNeed& need, size_t rank) {
    free_memory[rank].hbm = subtracted(free_memory[rank].hbm, need.hbm);
    free_memory[rank].host = subtracted(free_memory[rank].host, need.host);
  };
  for (size_t at = 0; at < options.size(); ++at) {
    const Parts& parts = *options[at];
    placement[at].resize(parts.needs.size());
    std::iota(placement[at].begin(), placement[at].end(), 0);
    for (size_t i = 0; i < parts.needs.size(); ++i) {
      if (parts.spread == Spread::kAllRanks) {
        put(parts.needs[i], i);
      } else {
        free.push_back({&parts.needs[i], &placement[at][i]});
      }
    }
  }
  const auto size = [](const Shard& shard) { return std::max(shard.need->hbm, shard.need->host); };
  std::stable_sort(free.begin(), free.end(),
                   [&](const Shard& a, const Shard& b) { return size(a) > size(b); });
  for (const Shard& shard : free) {
    const auto has_less = [&](const FreeMemory& a, const FreeMemory& b) {
      return shard.need->hbm > 0 ? a.hbm < b.hbm : a.host < b.host;
    };
    const auto most = std::max_element(free_memory.begin(), free_memory.end(), has_less);
    *shard.rank = static_cast<int>(most - free_memory.begin());
    put(*shard.need, static_cast<size_t>(*shard.rank));
  }
  return placement;
}

double slowest(const std::vector<const Parts*>& options, const ShardPlacement& placement,
               size_t num_ranks) {
  std::vector<double> times(num_ranks);
  for (size_t at = 0; at < options.size(); ++at) {
    const std::vector<ShardNeed>& needs = options[at]->needs;
    for (size_t i = 0; i < needs.size(); ++i) {
      times[static_cast<size_t>(placement[at][i])] += needs[i].time;
    }
  }
  double most = 0;
  for (const double time : times) most = std::max(most, time);
  return most;
}

}  // namespace torchrec_hkv::planner
