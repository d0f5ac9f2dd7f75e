#include "planner/placement_state.h"

#include <algorithm>
#include <numeric>
#include <utility>

namespace torchrec_hkv::planner {

PlacementState::PlacementState(std::vector<RankState> ranks, int per_host, bool has_hosts,
                               bool by_time)
    : ranks_(std::move(ranks)),
      per_host_(per_host),
      has_hosts_(has_hosts),
      by_time_(by_time),
      prefers_time_(by_time),
      order_(ranks_.size()) {
  std::iota(order_.begin(), order_.end(), 0);
  std::stable_sort(order_.begin(), order_.end(),
                   [&](int a, int b) { return a % per_host < b % per_host; });
  if (by_time) return;
  for (RankState& rank : ranks_) rank.time = 0;
}

// Prefers ranks with less time, or emptier ranks. Among equal ranks, those with lower numbers on
// their host come first, as in TorchRec.
bool PlacementState::is_preferred(const RankState& a, const RankState& b) const {
  if (prefers_time_) return a.time < b.time;
  return std::pair(-a.hbm, -a.host) < std::pair(-b.hbm, -b.host);
}

double PlacementState::slowest() const {
  double most = 0;
  for (const RankState& rank : ranks_) most = std::max(most, rank.time);
  return most;
}

int PlacementState::first(const PlacementUnit& unit) {
  if (unit.spread != Spread::kAnyRank) {
    for (const int site : hosts(unit)) {
      if (take(unit, site)) {
        free(unit);
        return site;
      }
      skipped_preferred_ = true;
    }
    return -1;
  }
  int found = -1, first = order_.front();
  for (const int r : order_) {
    if (is_preferred(ranks_[r], ranks_[first])) first = r;
    if (!ranks_[r].has(*unit.needs)) continue;
    if (found < 0 || is_preferred(ranks_[r], ranks_[found])) found = r;
  }
  if (found != first) skipped_preferred_ = true;
  return found;
}

std::vector<int> PlacementState::all(const PlacementUnit& unit) {
  std::vector<int> found;
  const auto add = [&](int site) {
    const auto is_equal = [&](int other) { return are_equal(unit, site, other); };
    if (std::none_of(found.begin(), found.end(), is_equal)) found.push_back(site);
  };
  if (unit.spread != Spread::kAnyRank) {
    for (const int site : hosts(unit)) {
      if (!take(unit, site)) continue;
      free(unit);
      add(site);
    }
    return found;
  }
  for (const int r : order_) {
    if (ranks_[r].has(*unit.needs)) add(r);
  }
  std::stable_sort(found.begin(), found.end(),
                   [&](int a, int b) { return is_preferred(ranks_[a], ranks_[b]); });
  return found;
}

bool PlacementState::take(const PlacementUnit& unit, int site) {
  const size_t begin = taken_.size();
  for (size_t i = 0; i < unit.count; ++i) {
    const ShardNeed& need = unit.needs[i];
    int rank = site;
    if (unit.spread == Spread::kHostRanks) rank = site * per_host_ + static_cast<int>(i);
    if (unit.spread == Spread::kOneHost) rank = in_host(need, site);
    if (rank < 0 || !ranks_[rank].has(need)) {
      undo(unit, begin);
      return false;
    }
    put(need, rank);
  }
  placed_.push_back(site);
  return true;
}

void PlacementState::overflow(const PlacementUnit& unit) {
  const ShardNeed& need = *unit.needs;
  const auto more = [&](const RankState& a, const RankState& b) {
    return need.hbm > 0 ? a.hbm < b.hbm : a.host < b.host;
  };
  const auto most = std::max_element(ranks_.begin(), ranks_.end(), more);
  const int rank = static_cast<int>(most - ranks_.begin());
  put(need, rank);
  placed_.push_back(rank);
}

void PlacementState::free(const PlacementUnit& unit) {
  undo(unit, taken_.size() - unit.count);
  placed_.pop_back();
}

void PlacementState::put(const ShardNeed& need, int rank) {
  taken_.push_back(rank);
  before_.push_back(ranks_[rank].time);
  ranks_[rank].take(by_time_ ? need : ShardNeed{need.hbm, need.host, 0});
}

void PlacementState::undo(const PlacementUnit& unit, size_t begin) {
  while (taken_.size() > begin) {
    ranks_[taken_.back()].free(unit.needs[taken_.size() - begin - 1], before_.back());
    taken_.pop_back();
    before_.pop_back();
  }
}

// The preferred rank of a host with enough memory; -1 if there is none.
int PlacementState::in_host(const ShardNeed& need, int host) const {
  int found = -1;
  for (int r = host * per_host_; r < (host + 1) * per_host_; ++r) {
    if (ranks_[r].has(need) && (found < 0 || is_preferred(ranks_[r], ranks_[found]))) found = r;
  }
  return found;
}

// Hosts on which a unit may be, the preferred first: by the total time of their ranks, or by the
// free memory of their fullest rank.
std::vector<int> PlacementState::hosts(const PlacementUnit& unit) const {
  std::vector<RankState> of_hosts;
  std::vector<int> order;
  for (int h = 0; h < static_cast<int>(ranks_.size()) / per_host_; ++h) {
    RankState all = ranks_[h * per_host_];
    for (int r = h * per_host_ + 1; r < (h + 1) * per_host_; ++r) {
      all.hbm = std::min(all.hbm, ranks_[r].hbm);
      all.host = std::min(all.host, ranks_[r].host);
      all.time += ranks_[r].time;
    }
    of_hosts.push_back(all);
    if (std::find(placed_.end() - unit.distinct_hosts_before, placed_.end(), h) == placed_.end()) {
      order.push_back(h);
    }
  }
  std::stable_sort(order.begin(), order.end(),
                   [&](int a, int b) { return is_preferred(of_hosts[a], of_hosts[b]); });
  return order;
}

bool PlacementState::are_equal(const PlacementUnit& unit, int a, int b) const {
  if (unit.spread == Spread::kAnyRank) {
    // Ranks of different hosts are not equal if other units must be on one host.
    return ranks_[a].equals(ranks_[b]) && (!has_hosts_ || a / per_host_ == b / per_host_);
  }
  const auto ranks = ranks_.begin();
  return std::equal(ranks + a * per_host_, ranks + (a + 1) * per_host_, ranks + b * per_host_,
                    [](const RankState& one, const RankState& other) { return one.equals(other); });
}

}  // namespace torchrec_hkv::planner
