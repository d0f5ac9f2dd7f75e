#include "planner/exchange.h"

#include <algorithm>

namespace torchrec_hkv::planner {
namespace {

// Number of steps for each rank after which an exchange gives up.
constexpr int kMaxSteps = 8;

// Number of bytes that counts as unlimited. Sums of it fit in 64 bits.
constexpr int64_t kEndless = int64_t{1} << 60;

int64_t missing(int64_t hbm, int64_t host) {
  const auto of = [](int64_t free) { return free >= 0 ? 0 : -std::max(free, -kEndless); };
  return of(hbm) + of(host);
}
int64_t missing(const RankState& rank) { return missing(rank.hbm, rank.host); }

struct ShardMove {
  int64_t gain = 0;  // reduction of the missing memory
  MovableShard* moved = nullptr;
  MovableShard* other = nullptr;  // shard that moves the other way; null for none
  int to = -1;
};

// Reduction of the memory that two ranks lack if one gives (hbm, host) bytes to the other.
int64_t gain_of(const RankState& from, const RankState& to, int64_t hbm, int64_t host) {
  return missing(from) + missing(to) - missing(added(from.hbm, hbm), added(from.host, host)) -
         missing(subtracted(to.hbm, hbm), subtracted(to.host, host));
}

ShardMove best_change(int from, std::vector<RankState>& ranks, ByRank& by_rank) {
  ShardMove best;
  const int64_t all = missing(ranks[from]);
  const auto offer = [&](MovableShard* moved, MovableShard* other, int to) {
    const int64_t hbm = moved->need->hbm - (other ? other->need->hbm : 0);
    const int64_t host = moved->need->host - (other ? other->need->host : 0);
    const int64_t gain = gain_of(ranks[from], ranks[to], hbm, host);
    if (gain > best.gain) best = {gain, moved, other, to};
  };
  std::vector<int> others;
  for (int rank = 0; rank < static_cast<int>(ranks.size()); ++rank) {
    // A full rank would lack as much as it takes.
    if (rank != from && (ranks[rank].hbm > 0 || ranks[rank].host > 0)) others.push_back(rank);
  }
  std::stable_sort(others.begin(), others.end(), [&](int a, int b) {
    return std::max(ranks[a].hbm, ranks[a].host) > std::max(ranks[b].hbm, ranks[b].host);
  });
  for (const int to : others) {
    for (MovableShard* moved : by_rank[from]) {
      offer(moved, nullptr, to);
      for (MovableShard* other : by_rank[to]) offer(moved, other, to);
      if (best.gain == all) return best;
    }
    if (best.gain > all / 2) break;  // good enough: another rank would take as long again
  }
  return best;
}

}  // namespace

void move(MovableShard* shard, int to, std::vector<RankState>& ranks, ByRank& by_rank) {
  auto& shards_of_rank = by_rank[shard->rank];
  shards_of_rank.erase(std::find(shards_of_rank.begin(), shards_of_rank.end(), shard));
  RankState& before = ranks[shard->rank];
  before.free(*shard->need, before.time - shard->need->time);
  ranks[to].take(*shard->need);
  by_rank[to].push_back(shard);
  shard->rank = to;
}

bool exchange(std::vector<RankState>& ranks, std::vector<MovableShard>& shards) {
  ByRank by_rank(ranks.size());
  for (MovableShard& shard : shards) {
    if (shard.need->hbm > 0 || shard.need->host > 0) by_rank[shard.rank].push_back(&shard);
  }
  const auto lacks_less = [](const RankState& a, const RankState& b) {
    return missing(a) < missing(b);
  };
  for (int step = 0; step < kMaxSteps * static_cast<int>(ranks.size()); ++step) {
    const auto most = std::max_element(ranks.begin(), ranks.end(), lacks_less);
    if (missing(*most) == 0) return true;
    const int from = static_cast<int>(most - ranks.begin());
    const ShardMove change = best_change(from, ranks, by_rank);
    if (change.gain == 0) return false;
    move(change.moved, change.to, ranks, by_rank);
    if (change.other != nullptr) move(change.other, from, ranks, by_rank);
  }
  return false;
}

}  // namespace torchrec_hkv::planner
