#include "planner/packing.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <tuple>

namespace torchrec_hkv::planner {
namespace {

// Number of additional attempts to place a unit after which a search gives up; fewer if there are
// many units.
constexpr size_t kManyUnits = 64;
constexpr int64_t kMostAttempts = 2000, kFewerAttempts = 200;

// Sums of bytes may exceed 64 bits if the memory of ranks is taken as endless.
int64_t added(int64_t a, int64_t b) {
  int64_t sum;
  return __builtin_add_overflow(a, b, &sum) ? std::numeric_limits<int64_t>::max() : sum;
}
int64_t subtracted(int64_t a, int64_t b) {
  int64_t rest;
  return __builtin_sub_overflow(a, b, &rest) ? std::numeric_limits<int64_t>::min() : rest;
}

struct Rank {
  int64_t hbm;
  int64_t host;
  double time;

  bool has(const Need& need) const { return hbm >= need.hbm && host >= need.host; }
  void take(const Need& need) {
    hbm = subtracted(hbm, need.hbm);
    host = subtracted(host, need.host);
    time += need.time;
  }
  // Undoes take(). before: the time before.
  void free(const Need& need, double before) {
    hbm += need.hbm;
    host += need.host;
    time = before;
  }
  bool equals(const Rank& other) const {
    return hbm == other.hbm && host == other.host && time == other.time;
  }
};

// Ranks are preferred by their time, or the emptiest first; of equal ones the first.
bool is_preferred(const Rank& a, const Rank& b, bool by_time) {
  if (by_time) return a.time < b.time;
  return std::tuple(-a.hbm, -a.host, a.time) < std::tuple(-b.hbm, -b.host, b.time);
}

// What is placed in one step: a shard, or all shards that must be on one host.
struct Unit {
  const Need* needs;
  size_t count;
  Spread spread;
  size_t option, shard;  // the first shard
  int64_t size;          // units are placed by size, the largest first
  size_t apart = 0;      // number of units before this one that must be on other hosts
};

// Ranks while units are placed. The sites of a unit are ranks or hosts.
class Sites {
 public:
  Sites(std::vector<Rank> ranks, int per_host, bool has_hosts)
      : ranks_(std::move(ranks)), per_host_(per_host), has_hosts_(has_hosts) {}

  double slowest() const {
    double most = 0;
    for (const Rank& rank : ranks_) most = std::max(most, rank.time);
    return most;
  }

  // The preferred site with enough memory; -1 if there is none.
  int first(const Unit& unit, bool by_time) {
    if (unit.spread != Spread::kAnyRank) {
      for (const int site : hosts(unit, by_time)) {
        if (take(unit, site)) {
          free(unit);
          return site;
        }
      }
      return -1;
    }
    int found = -1;
    for (int r = 0; r < static_cast<int>(ranks_.size()); ++r) {
      if (!ranks_[r].has(*unit.needs)) continue;
      if (found < 0 || is_preferred(ranks_[r], ranks_[found], by_time)) found = r;
    }
    return found;
  }

  // Sites with enough memory, the preferred first. Of equal ones only the first is listed.
  std::vector<int> all(const Unit& unit, bool by_time) {
    std::vector<int> found;
    const auto add = [&](int site) {
      const auto is_equal = [&](int other) { return are_equal(unit, site, other); };
      if (std::none_of(found.begin(), found.end(), is_equal)) found.push_back(site);
    };
    if (unit.spread != Spread::kAnyRank) {
      for (const int site : hosts(unit, by_time)) {
        if (!take(unit, site)) continue;
        free(unit);
        add(site);
      }
      return found;
    }
    for (int r = 0; r < static_cast<int>(ranks_.size()); ++r) {
      if (ranks_[r].has(*unit.needs)) add(r);
    }
    std::stable_sort(found.begin(), found.end(),
                     [&](int a, int b) { return is_preferred(ranks_[a], ranks_[b], by_time); });
    return found;
  }

  // Places a unit; false if there is not enough memory.
  bool take(const Unit& unit, int site) {
    const size_t begin = taken_.size();
    for (size_t i = 0; i < unit.count; ++i) {
      const Need& need = unit.needs[i];
      int rank = site;
      if (unit.spread == Spread::kHostRanks) rank = site * per_host_ + static_cast<int>(i);
      if (unit.spread == Spread::kOneHost) rank = in_host(need, site);
      if (rank < 0 || !ranks_[rank].has(need)) {
        undo(unit, begin);
        return false;
      }
      taken_.push_back(rank);
      before_.push_back(ranks_[rank].time);
      ranks_[rank].take(need);
    }
    placed_.push_back(site);
    return true;
  }

  // Undoes the last successful take().
  void free(const Unit& unit) {
    undo(unit, taken_.size() - unit.count);
    placed_.pop_back();
  }

  size_t num_placed() const { return placed_.size(); }
  // The rank of each shard, in the order of the units.
  const std::vector<int>& taken() const { return taken_; }

 private:
  void undo(const Unit& unit, size_t begin) {
    while (taken_.size() > begin) {
      ranks_[taken_.back()].free(unit.needs[taken_.size() - begin - 1], before_.back());
      taken_.pop_back();
      before_.pop_back();
    }
  }

  // The rank of a host with the least time, of those with enough memory; -1 if there is none.
  int in_host(const Need& need, int host) const {
    int found = -1;
    for (int r = host * per_host_; r < (host + 1) * per_host_; ++r) {
      if (ranks_[r].has(need) && (found < 0 || ranks_[r].time < ranks_[found].time)) found = r;
    }
    return found;
  }

  // Hosts on which a unit may be, the preferred first: by the time of all ranks together, or those
  // whose fullest rank is emptiest.
  std::vector<int> hosts(const Unit& unit, bool by_time) const {
    std::vector<Rank> of_hosts;
    std::vector<int> order;
    for (int h = 0; h < static_cast<int>(ranks_.size()) / per_host_; ++h) {
      Rank all = ranks_[h * per_host_];
      for (int r = h * per_host_ + 1; r < (h + 1) * per_host_; ++r) {
        all.hbm = std::min(all.hbm, ranks_[r].hbm);
        all.host = std::min(all.host, ranks_[r].host);
        all.time += ranks_[r].time;
      }
      of_hosts.push_back(all);
      if (std::find(placed_.end() - unit.apart, placed_.end(), h) == placed_.end()) {
        order.push_back(h);
      }
    }
    std::stable_sort(order.begin(), order.end(), [&](int a, int b) {
      return is_preferred(of_hosts[a], of_hosts[b], by_time);
    });
    return order;
  }

  bool are_equal(const Unit& unit, int a, int b) const {
    if (unit.spread == Spread::kAnyRank) {
      // Ranks of different hosts differ if others must be on one host.
      return ranks_[a].equals(ranks_[b]) && (!has_hosts_ || a / per_host_ == b / per_host_);
    }
    const auto ranks = ranks_.begin();
    return std::equal(ranks + a * per_host_, ranks + (a + 1) * per_host_, ranks + b * per_host_,
                      [](const Rank& one, const Rank& other) { return one.equals(other); });
  }

  std::vector<Rank> ranks_;
  int per_host_;
  bool has_hosts_;
  std::vector<int> taken_;      // ranks of shards
  std::vector<double> before_;  // times of these ranks before
  std::vector<int> placed_;     // sites of units
};

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
    for (const int site : sites_.all(unit, true)) {
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
std::vector<int> search(const std::vector<Unit>& units, Sites sites, bool by_time) {
  struct Step {
    bool listed = false;      // whether `others` is set
    std::vector<int> others;  // sites still to be tried, the last first
  };
  std::vector<Step> steps;
  bool back = false;
  const int64_t more = units.size() <= kManyUnits ? kMostAttempts : kFewerAttempts;
  for (int64_t i = static_cast<int64_t>(units.size()) + more; i > 0; --i) {
    // After a step back the last step has no site.
    const size_t depth = steps.size() - (back ? 1 : 0);
    if (depth == units.size()) return sites.taken();
    const Unit& unit = units[depth];
    int site = -1;
    if (!back) {
      steps.emplace_back();
      site = sites.first(unit, by_time);
    } else {
      Step& step = steps.back();
      if (!step.listed) {
        step.listed = true;
        step.others = sites.all(unit, by_time);
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

Parts::Parts(std::vector<Need> shards, Spread spread)
    : needs(std::move(shards)), spread(spread) {
  for (const Need& need : needs) {
    hbm = added(hbm, need.hbm);
    host = added(host, need.host);
    time += need.time;
    most_hbm = std::max(most_hbm, need.hbm);
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
  const bool has_hosts = std::any_of(units.begin(), units.end(), [](const Unit& unit) {
    return unit.spread != Spread::kAnyRank;
  });
  const Sites sites(std::move(ranks), per_host, has_hosts);
  std::vector<int> found;
  if (fast && !has_hosts && units.size() <= kFewShards) {
    found = Fastest(units, sites).run();
  } else {
    if (fast) found = search(units, sites, true);
    if (found.empty()) found = search(units, sites, false);
  }
  if (found.empty() && !units.empty()) return std::nullopt;
  auto rank = found.begin();
  for (const Unit& unit : units) {
    for (size_t i = 0; i < unit.count; ++i) placement[unit.option][unit.shard + i] = *rank++;
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
