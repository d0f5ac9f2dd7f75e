#include "planner/balance.h"

#include <algorithm>
#include <numeric>

namespace torchrec_hkv::planner {
namespace {

// Times whose relative difference is smaller count as equal.
constexpr double kRounding = 1e-9;
// Ranks are balanced if the slowest rank takes at most this multiple of the mean time.
constexpr double kBalanced = 1.005;

// A move of shards between two ranks.
struct Swap {
  double time;                       // time of the slower one of the two ranks
  std::vector<MovableShard*> moved;  // shards that leave the slowest rank
  MovableShard* other = nullptr;     // shard that moves to it; null for none
  int to = -1;
};

constexpr ShardNeed kNothing{0, 0, 0};

// Whether a rank has memory for `incoming` once `outgoing` has left.
bool fits(const RankState& rank, const ShardNeed& incoming, const ShardNeed& outgoing) {
  return added(rank.hbm, outgoing.hbm) >= incoming.hbm &&
         added(rank.host, outgoing.host) >= incoming.host;
}

// The other ranks, in ascending order of time.
std::vector<int> fastest_first(const std::vector<RankState>& ranks) {
  std::vector<int> order(ranks.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](int a, int b) { return ranks[a].time < ranks[b].time; });
  return order;
}

// Stores a move as the best if the slower of its two ranks is faster than with the best so far.
void offer(const std::vector<RankState>& ranks, int from, int to,
           const std::vector<MovableShard*>& moved, const ShardNeed& incoming, MovableShard* other,
           Swap& best) {
  const ShardNeed& outgoing = other ? *other->need : kNothing;
  const double less = incoming.time - outgoing.time;
  if (less <= 0) return;
  const double slower = std::max(ranks[from].time - less, ranks[to].time + less);
  if (slower >= best.time || !fits(ranks[to], incoming, outgoing) ||
      !fits(ranks[from], outgoing, incoming)) {
    return;
  }
  best = {slower, moved, other, to};
}

// Moves a shard, or swaps it for another.
Swap best_of_one(int from, const std::vector<RankState>& ranks, const ByRank& by_rank,
                 int64_t& budget) {
  const double time = ranks[from].time;
  Swap best{time * (1 - kRounding), {}};
  for (const int to : fastest_first(ranks)) {
    if (ranks[to].time >= best.time || budget <= 0) break;
    budget -= static_cast<int64_t>(by_rank[from].size() * (by_rank[to].size() + 1));
    for (MovableShard* moved : by_rank[from]) {
      if (moved->need->time <= 0) continue;
      offer(ranks, from, to, {moved}, *moved->need, nullptr, best);
      for (MovableShard* other : by_rank[to])
        offer(ranks, from, to, {moved}, *moved->need, other, best);
    }
    // Good enough: trying another rank would take as long again.
    if (!best.moved.empty() && best.time <= 0.75 * time + 0.25 * ranks[to].time) break;
  }
  return best;
}

// Swaps several shards for one that takes as much memory but less time.
Swap best_of_many(int from, const std::vector<RankState>& ranks, const ByRank& by_rank,
                  int64_t& budget) {
  Swap best{ranks[from].time * (1 - kRounding), {}};
  std::vector<MovableShard*> shards_of_rank = by_rank[from];
  const auto size = [](const MovableShard* shard) {
    return static_cast<double>(shard->need->hbm) + static_cast<double>(shard->need->host) + 1;
  };
  // Shards with the most time for their memory come first.
  std::stable_sort(shards_of_rank.begin(), shards_of_rank.end(),
                   [&](const MovableShard* a, const MovableShard* b) {
                     return a->need->time * size(b) > b->need->time * size(a);
                   });
  for (const int to : fastest_first(ranks)) {
    if (ranks[to].time >= best.time || budget <= 0) break;
    budget -= static_cast<int64_t>(shards_of_rank.size() * by_rank[to].size());
    for (MovableShard* other : by_rank[to]) {
      const ShardNeed& outgoing = *other->need;
      const double most = (ranks[from].time - ranks[to].time) / 2 + outgoing.time;
      std::vector<MovableShard*> moved;
      ShardNeed sum = kNothing;
      const auto take = [&](MovableShard* shard) {
        const ShardNeed then{added(sum.hbm, shard->need->hbm), added(sum.host, shard->need->host),
                             sum.time + shard->need->time};
        if (then.time > most || !fits(ranks[to], then, outgoing)) return false;
        moved.push_back(shard);
        sum = then;
        return true;
      };
      // Takes slow shards up to half of the time difference, then fast ones to fill the memory.
      size_t count = 0;
      while (count < shards_of_rank.size() && take(shards_of_rank[count])) ++count;
      for (size_t at = shards_of_rank.size(); at > count; --at) {
        if (fits(ranks[from], outgoing, sum)) break;
        take(shards_of_rank[at - 1]);
      }
      offer(ranks, from, to, moved, sum, other, best);
    }
  }
  return best;
}

}  // namespace

void balance(std::vector<RankState>& ranks, std::vector<MovableShard>& shards, int64_t max_offers) {
  ByRank by_rank(ranks.size());
  for (MovableShard& shard : shards) by_rank[shard.rank].push_back(&shard);
  const auto is_faster = [](const RankState& a, const RankState& b) { return a.time < b.time; };
  double mean = 0;
  for (const RankState& rank : ranks) mean += rank.time / static_cast<double>(ranks.size());
  while (max_offers > 0) {
    const auto slowest = std::max_element(ranks.begin(), ranks.end(), is_faster);
    if (slowest->time <= kBalanced * mean) return;
    const int from = static_cast<int>(slowest - ranks.begin());
    Swap change = best_of_one(from, ranks, by_rank, max_offers);
    if (change.moved.empty()) change = best_of_many(from, ranks, by_rank, max_offers);
    if (change.moved.empty()) return;
    for (MovableShard* moved : change.moved) move(moved, change.to, ranks, by_rank);
    if (change.other != nullptr) move(change.other, from, ranks, by_rank);
  }
}

}  // namespace torchrec_hkv::planner
