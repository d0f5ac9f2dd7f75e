#include "planner/packing.h"

#include <algorithm>
#include <limits>
#include <numeric>

#include "planner/exchange.h"
#include "planner/sites.h"

namespace torchrec_hkv::planner {
namespace {

// A search gives up after this number of attempts to place a unit, beside one for each unit:
// kMostAttempts for up to kFewUnits units, else kFewerAttempts.
constexpr size_t kFewUnits = 64;
constexpr int64_t kMostAttempts = 2000, kFewerAttempts = 200;

// Branch and bound over all assignments.
class Fastest {
 public:
  Fastest(const std::vector<Unit>& units, Sites sites) : units_(units), sites_(std::move(sites)) {}

  std::vector<int> run() {
    go_on();
    return best_;
  }

 private:
  void go_on() {
    const double time = sites_.slowest();
    if (time >= least_) return;
    if (sites_.num_placed() == units_.size()) {
      least_ = time;
      best_ = sites_.taken();
      return;
    }
    const Unit& unit = units_[sites_.num_placed()];
    for (const int site : sites_.all(unit)) {
      sites_.take(unit, site);
      go_on();
      sites_.free(unit);
    }
  }

  const std::vector<Unit>& units_;
  Sites sites_;
  double least_ = std::numeric_limits<double>::infinity();
  std::vector<int> best_;
};

// Depth-first search in the order of the units. Empty if it fails.
std::vector<int> search(const std::vector<Unit>& units, Sites sites) {
  struct Step {
    bool listed = false;      // whether `others` is set
    std::vector<int> others;  // sites still to be tried, the last first
  };
  std::vector<Step> steps;
  bool back = false;
  const int64_t more = units.size() <= kFewUnits ? kMostAttempts : kFewerAttempts;
  for (int64_t i = static_cast<int64_t>(units.size()) + more; i > 0; --i) {
    // After a step back the last step has no site.
    const size_t depth = steps.size() - (back ? 1 : 0);
    if (depth == units.size()) return sites.taken();
    const Unit& unit = units[depth];
    int site = -1;
    if (!back) {
      steps.emplace_back();
      site = sites.first(unit);
    } else {
      Step& step = steps.back();
      if (!step.listed) {
        step.listed = true;
        step.others = sites.all(unit);
        std::reverse(step.others.begin(), step.others.end());
        step.others.pop_back();  // was tried
      }
      if (!step.others.empty()) {
        site = step.others.back();
        step.others.pop_back();
      }
    }
    if (site >= 0) {
      sites.take(unit, site);
      back = false;
      continue;
    }
    steps.pop_back();
    if (steps.empty()) return {};
    sites.free(units[depth - 1]);
    back = true;
  }
  return {};
}

// Places units, the largest first, where most memory is left, and then exchanges shards that do not
// fit. Empty if it fails.
std::vector<int> exchanged(const std::vector<Unit>& units, Sites sites) {
  bool all_fit = true;
  for (const Unit& unit : units) {
    const int site = sites.first(unit);
    if (site >= 0) {
      sites.take(unit, site);
    } else if (unit.spread == Spread::kAnyRank) {
      sites.overflow(unit);
      all_fit = false;
    } else {
      return {};
    }
  }
  std::vector<int> placed = sites.taken();
  if (all_fit) return placed;
  std::vector<Movable> shards;
  size_t position = 0;
  for (const Unit& unit : units) {
    if (unit.spread == Spread::kAnyRank) shards.push_back({unit.needs, placed[position], position});
    position += unit.count;
  }
  std::vector<Rank> ranks = sites.ranks();
  if (!exchange(ranks, shards)) return {};
  for (const Movable& shard : shards) placed[shard.position] = shard.rank;
  return placed;
}

// Adds the units of an option. False if its shards can't be given to hosts.
bool add_units(const Parts& parts, size_t option, int num_hosts, int per_host,
               std::vector<Unit>& units) {
  const Need* needs = parts.needs.data();
  const size_t count = parts.needs.size();
  const int64_t size = std::max(parts.hbm, parts.host);
  if (parts.spread == Spread::kAnyRank) {
    for (size_t i = 0; i < count; ++i) {
      const int64_t own = std::max(needs[i].hbm, needs[i].host);
      units.push_back({needs + i, 1, parts.spread, option, i, own});
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
    // Of one size, so that they are placed after one another.
    units.push_back({needs + i * block, block, parts.spread, option, i * block, size,
                     i % static_cast<size_t>(num_hosts)});
  }
  return true;
}

}  // namespace

Parts::Parts(std::vector<Need> shards, Spread spread) : needs(std::move(shards)), spread(spread) {
  for (const Need& need : needs) {
    hbm = added(hbm, need.hbm);
    host = added(host, need.host);
    time += need.time;
    most_hbm = std::max(most_hbm, need.hbm);
    most_host = std::max(most_host, need.host);
    most_bytes = std::max(most_bytes, added(need.hbm, need.host));
  }
}

bool Parts::fits_where(const Parts& other) const {
  if (needs.size() != other.needs.size()) return false;
  for (size_t i = 0; i < needs.size(); ++i) {
    if (needs[i].hbm > other.needs[i].hbm || needs[i].host > other.needs[i].host) return false;
  }
  return true;
}

std::optional<Placement> pack(const std::vector<const Parts*>& options,
                              const std::vector<Room>& rooms, int per_host, bool fast) {
  std::vector<Rank> ranks;
  for (const Room& room : rooms) ranks.push_back({room.hbm, room.host, 0.0});
  const int num_hosts = static_cast<int>(ranks.size()) / per_host;
  Placement placement(options.size());
  std::vector<Unit> units;
  double hbm = 0, host = 0;
  for (size_t at = 0; at < options.size(); ++at) {
    const Parts& parts = *options[at];
    placement[at].resize(parts.needs.size());
    if (parts.spread == Spread::kAllRanks) {
      std::iota(placement[at].begin(), placement[at].end(), 0);
      for (size_t r = 0; r < parts.needs.size(); ++r) ranks[r].take(parts.needs[r]);
      continue;
    }
    if (!add_units(parts, at, num_hosts, per_host, units)) return std::nullopt;
    hbm += static_cast<double>(parts.hbm);
    host += static_cast<double>(parts.host);
  }
  double has_hbm = 0, has_host = 0;
  for (const Rank& rank : ranks) {
    if (rank.hbm < 0 || rank.host < 0) return std::nullopt;
    has_hbm += static_cast<double>(rank.hbm);
    has_host += static_cast<double>(rank.host);
  }
  // Sums of doubles are exact up to 2^53 bytes; the search decides beyond.
  constexpr double kRounding = 1 + 1e-12;
  if (hbm > has_hbm * kRounding || host > has_host * kRounding) return std::nullopt;
  std::stable_sort(units.begin(), units.end(),
                   [](const Unit& a, const Unit& b) { return a.size > b.size; });
  const bool has_hosts = std::any_of(
      units.begin(), units.end(), [](const Unit& unit) { return unit.spread != Spread::kAnyRank; });
  const Sites by_time(ranks, per_host, has_hosts, true);
  const Sites by_memory(std::move(ranks), per_host, has_hosts, false);
  std::vector<int> found;
  if (fast && !has_hosts && units.size() <= kFewShards) {
    found = Fastest(units, by_time).run();
  } else {
    if (fast) found = search(units, by_time);
    if (found.empty()) found = exchanged(units, by_memory);
    if (found.empty() && units.size() <= kFewUnits) found = search(units, by_memory);
  }
  if (found.empty() && !units.empty()) return std::nullopt;
  auto rank = found.begin();
  for (const Unit& unit : units) {
    for (size_t i = 0; i < unit.count; ++i) placement[unit.option][unit.shard + i] = *rank++;
  }
  return placement;
}

Placement overfill(const std::vector<const Parts*>& options, std::vector<Room>& rooms) {
  struct Shard {
    const Need* need;
    int* rank;
  };
  Placement placement(options.size());
  std::vector<Shard> free;
  const auto put = [&](const Need& need, size_t rank) {
    rooms[rank].hbm = subtracted(rooms[rank].hbm, need.hbm);
    rooms[rank].host = subtracted(rooms[rank].host, need.host);
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
    const auto has_less = [&](const Room& a, const Room& b) {
      return shard.need->hbm > 0 ? a.hbm < b.hbm : a.host < b.host;
    };
    const auto most = std::max_element(rooms.begin(), rooms.end(), has_less);
    *shard.rank = static_cast<int>(most - rooms.begin());
    put(*shard.need, static_cast<size_t>(*shard.rank));
  }
  return placement;
}

double slowest(const std::vector<const Parts*>& options, const Placement& placement,
               size_t num_ranks) {
  std::vector<double> times(num_ranks);
  for (size_t at = 0; at < options.size(); ++at) {
    const std::vector<Need>& needs = options[at]->needs;
    for (size_t i = 0; i < needs.size(); ++i) {
      times[static_cast<size_t>(placement[at][i])] += needs[i].time;
    }
  }
  double most = 0;
  for (const double time : times) most = std::max(most, time);
  return most;
}

}  // namespace torchrec_hkv::planner
