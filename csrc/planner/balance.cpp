#include "planner/balance.h"

#include <algorithm>
#include <numeric>

namespace torchrec_hkv::planner {
namespace {

// Number of steps for each shard after which the search gives up.
constexpr size_t kMostSteps = 4;
// Times that differ by a smaller part are equal.
constexpr double kRounding = 1e-9;

struct Change {
  double time;  // of the slower one of the two ranks
  Movable* moved = nullptr;
  Movable* other = nullptr;  // goes the other way; none if null
  int to = -1;
};

// Whether a rank has room for one shard if it gives away another.
bool fits(const Rank& rank, const Need& comes, const Need& goes) {
  return added(rank.hbm, goes.hbm) >= comes.hbm && added(rank.host, goes.host) >= comes.host;
}

Change best_change(int from, const std::vector<Rank>& ranks,
                   const std::vector<std::vector<Movable*>>& by_rank) {
  constexpr Need kNothing{0, 0, 0};
  const double time = ranks[from].time;
  Change best{time * (1 - kRounding)};
  const auto offer = [&](Movable* moved, Movable* other, int to) {
    const Need& comes = *moved->need;
    const Need& goes = other ? *other->need : kNothing;
    const double less = comes.time - goes.time;
    if (less <= 0) return;
    const double slower = std::max(time - less, ranks[to].time + less);
    if (slower >= best.time || !fits(ranks[to], comes, goes) || !fits(ranks[from], goes, comes)) {
      return;
    }
    best = {slower, moved, other, to};
  };
  std::vector<int> others(ranks.size());
  std::iota(others.begin(), others.end(), 0);
  std::stable_sort(others.begin(), others.end(),
                   [&](int a, int b) { return ranks[a].time < ranks[b].time; });
  for (const int to : others) {
    if (ranks[to].time >= best.time) break;
    for (Movable* moved : by_rank[from]) {
      offer(moved, nullptr, to);
      for (Movable* other : by_rank[to]) offer(moved, other, to);
    }
    // Good enough: other ranks would take as long again.
    if (best.moved != nullptr && best.time <= 0.75 * time + 0.25 * ranks[to].time) break;
  }
  return best;
}

void move(Movable* shard, int to, std::vector<Rank>& ranks,
          std::vector<std::vector<Movable*>>& by_rank) {
  auto& own = by_rank[shard->rank];
  own.erase(std::find(own.begin(), own.end(), shard));
  Rank& before = ranks[shard->rank];
  before.free(*shard->need, before.time - shard->need->time);
  ranks[to].take(*shard->need);
  by_rank[to].push_back(shard);
  shard->rank = to;
}

}  // namespace

void balance(std::vector<Rank>& ranks, std::vector<Movable>& shards) {
  std::vector<std::vector<Movable*>> by_rank(ranks.size());
  for (Movable& shard : shards) by_rank[shard.rank].push_back(&shard);
  const auto is_faster = [](const Rank& a, const Rank& b) { return a.time < b.time; };
  for (size_t step = 0; step < kMostSteps * shards.size(); ++step) {
    const auto slowest = std::max_element(ranks.begin(), ranks.end(), is_faster);
    const int from = static_cast<int>(slowest - ranks.begin());
    const Change change = best_change(from, ranks, by_rank);
    if (change.moved == nullptr) return;
    move(change.moved, change.to, ranks, by_rank);
    if (change.other != nullptr) move(change.other, from, ranks, by_rank);
  }
}

}  // namespace torchrec_hkv::planner
