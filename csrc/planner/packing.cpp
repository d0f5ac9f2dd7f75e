#include "planner/packing.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <tuple>

namespace torchrec_hkv::planner {
namespace {

// Number of additional attempts to place a shard after which a search gives up; fewer if there are
// many shards.
constexpr size_t kManyShards = 64;
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

int first_rank(const std::vector<Rank>& ranks, const Need& need, bool by_time) {
  int found = -1;
  for (int r = 0; r < static_cast<int>(ranks.size()); ++r) {
    if (!ranks[r].has(need)) continue;
    if (found < 0 || is_preferred(ranks[r], ranks[found], by_time)) found = r;
  }
  return found;
}

// Ranks with enough memory, the preferred first. Of equal ranks only the first is listed.
std::vector<int> fitting_ranks(const std::vector<Rank>& ranks, const Need& need, bool by_time) {
  std::vector<int> found;
  for (int r = 0; r < static_cast<int>(ranks.size()); ++r) {
    if (!ranks[r].has(need)) continue;
    const auto is_equal = [&](int other) { return ranks[r].equals(ranks[other]); };
    if (std::none_of(found.begin(), found.end(), is_equal)) found.push_back(r);
  }
  std::stable_sort(found.begin(), found.end(),
                   [&](int a, int b) { return is_preferred(ranks[a], ranks[b], by_time); });
  return found;
}

double slowest_of(const std::vector<Rank>& ranks) {
  double most = 0;
  for (const Rank& rank : ranks) most = std::max(most, rank.time);
  return most;
}

// Branch and bound over all assignments.
class Fastest {
 public:
  Fastest(const std::vector<Need>& needs, std::vector<Rank> ranks)
      : needs_(needs), ranks_(std::move(ranks)) {}

  std::vector<int> run() {
    go_on();
    return best_;
  }

 private:
  void go_on() {
    const double time = slowest_of(ranks_);
    if (time >= least_) return;
    if (taken_.size() == needs_.size()) {
      least_ = time;
      best_ = taken_;
      return;
    }
    const Need& need = needs_[taken_.size()];
    for (const int r : fitting_ranks(ranks_, need, true)) {
      const double before = ranks_[r].time;
      ranks_[r].take(need);
      taken_.push_back(r);
      go_on();
      taken_.pop_back();
      ranks_[r].free(need, before);
    }
  }

  const std::vector<Need>& needs_;
  std::vector<Rank> ranks_;
  double least_ = std::numeric_limits<double>::infinity();
  std::vector<int> taken_, best_;
};

// Depth-first search in the order of the shards. Empty if it fails.
std::vector<int> search(const std::vector<Need>& needs, std::vector<Rank> ranks, bool by_time) {
  struct Step {
    int rank;
    double time;              // of the rank before
    bool listed = false;      // whether `others` is set
    std::vector<int> others;  // ranks still to be tried, the last first
  };
  std::vector<Step> steps;
  bool back = false;
  const int64_t more = needs.size() <= kManyShards ? kMostAttempts : kFewerAttempts;
  for (int64_t i = static_cast<int64_t>(needs.size()) + more; i > 0; --i) {
    // After a step back the last step has no rank.
    const size_t depth = steps.size() - (back ? 1 : 0);
    if (depth == needs.size()) {
      std::vector<int> taken;
      for (const Step& step : steps) taken.push_back(step.rank);
      return taken;
    }
    const Need& need = needs[depth];
    int rank = -1;
    if (!back) {
      steps.emplace_back();
      rank = first_rank(ranks, need, by_time);
    } else {
      Step& step = steps.back();
      if (!step.listed) {
        step.listed = true;
        step.others = fitting_ranks(ranks, need, by_time);
        std::reverse(step.others.begin(), step.others.end());
        step.others.pop_back();  // was tried
      }
      if (!step.others.empty()) {
        rank = step.others.back();
        step.others.pop_back();
      }
    }
    if (rank >= 0) {
      steps.back().rank = rank;
      steps.back().time = ranks[rank].time;
      ranks[rank].take(need);
      back = false;
      continue;
    }
    steps.pop_back();
    if (steps.empty()) return {};
    ranks[steps.back().rank].free(needs[depth - 1], steps.back().time);
    back = true;
  }
  return {};
}

}  // namespace

Parts::Parts(std::vector<Need> shards, bool uniform)
    : needs(std::move(shards)), is_uniform(uniform) {
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
                              const std::vector<Room>& rooms, bool fast) {
  struct Free {
    const Need* need;
    size_t option;
    size_t shard;
  };
  std::vector<Rank> ranks;
  for (const Room& room : rooms) ranks.push_back({room.hbm, room.host, 0.0});
  Placement placement(options.size());
  std::vector<Free> free;
  double hbm = 0, host = 0;
  for (size_t at = 0; at < options.size(); ++at) {
    const Parts& parts = *options[at];
    placement[at].resize(parts.needs.size());
    if (parts.is_uniform) {
      std::iota(placement[at].begin(), placement[at].end(), 0);
      for (size_t r = 0; r < parts.needs.size(); ++r) ranks[r].take(parts.needs[r]);
      continue;
    }
    for (size_t i = 0; i < parts.needs.size(); ++i) free.push_back({&parts.needs[i], at, i});
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
  std::stable_sort(free.begin(), free.end(), [](const Free& a, const Free& b) {
    return std::max(a.need->hbm, a.need->host) > std::max(b.need->hbm, b.need->host);
  });
  std::vector<Need> needs;
  for (const Free& shard : free) needs.push_back(*shard.need);
  std::vector<int> found;
  if (fast && needs.size() <= kFewShards) {
    found = Fastest(needs, ranks).run();
  } else {
    if (fast) found = search(needs, ranks, true);
    if (found.empty()) found = search(needs, ranks, false);
  }
  if (found.empty() && !needs.empty()) return std::nullopt;
  for (size_t i = 0; i < free.size(); ++i) placement[free[i].option][free[i].shard] = found[i];
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
