// The state of ranks and hosts while shards are placed on them (packing.cpp).
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

#include "planner/packing.h"

namespace torchrec_hkv::planner {

// Adds bytes. Sums may exceed 64 bits if the memory of ranks counts as unlimited.
inline int64_t added(int64_t a, int64_t b) {
  int64_t sum;
  return __builtin_add_overflow(a, b, &sum) ? std::numeric_limits<int64_t>::max() : sum;
}
inline int64_t subtracted(int64_t a, int64_t b) {
  int64_t rest;
  return __builtin_sub_overflow(a, b, &rest) ? std::numeric_limits<int64_t>::min() : rest;
}

// Free memory of a rank, and the time of the shards on it.
struct RankState {
  int64_t hbm;
  int64_t host;
  double time;

  bool has(const ShardNeed& need) const { return hbm >= need.hbm && host >= need.host; }
  void take(const ShardNeed& need) {
    hbm = subtracted(hbm, need.hbm);
    host = subtracted(host, need.host);
    time += need.time;
  }
  // Undoes take(). before: the rank's time before take().
  void free(const ShardNeed& need, double before) {
    hbm += need.hbm;
    host += need.host;
    time = before;
  }
  bool equals(const RankState& other) const {
    return hbm == other.hbm && host == other.host && time == other.time;
  }
};

// The shards that are placed in one step: one shard, or all shards that must be on one host.
struct PlacementUnit {
  const ShardNeed* needs;
  size_t count;
  Spread spread;
  size_t option, shard;              // the first shard
  int64_t size;                      // units are placed by size, the largest first
  size_t distinct_hosts_before = 0;  // number of units before this one that must be on other hosts
};

// The ranks while units are placed. The sites of a unit are ranks or hosts.
class PlacementState {
 public:
  // has_hosts: whether there are units that must be on one host.
  // by_time: whether ranks and hosts with little time are preferred, rather than empty ones. If
  // false, times are zeros, so that the result does not depend on whether times are known.
  PlacementState(std::vector<RankState> ranks, int per_host, bool has_hosts, bool by_time);

  // Changes the preference; times are kept.
  void prefer_time(bool prefers_time) { prefers_time_ = prefers_time; }

  // Whether first() has skipped a preferred site because it lacked memory.
  bool skipped_preferred() const { return skipped_preferred_; }

  double slowest() const;
  // The preferred site with enough memory; -1 if there is none.
  int first(const PlacementUnit& unit);
  // Sites with enough memory, the preferred first. Among equal sites only the first is listed.
  std::vector<int> all(const PlacementUnit& unit);
  // Places a unit; false if there is not enough memory.
  bool take(const PlacementUnit& unit, int site);
  // Places a shard on the rank with the most free memory, which may become negative.
  void overflow(const PlacementUnit& unit);
  // Undoes the last successful take().
  void free(const PlacementUnit& unit);

  size_t num_placed() const { return placed_.size(); }
  // The rank of each shard, in the order of the units.
  const std::vector<int>& taken() const { return taken_; }
  const std::vector<RankState>& ranks() const { return ranks_; }

 private:
  bool is_preferred(const RankState& a, const RankState& b) const;
  void put(const ShardNeed& need, int rank);
  void undo(const PlacementUnit& unit, size_t begin);
  int in_host(const ShardNeed& need, int host) const;
  std::vector<int> hosts(const PlacementUnit& unit) const;
  bool are_equal(const PlacementUnit& unit, int a, int b) const;

  std::vector<RankState> ranks_;
  int per_host_;
  bool has_hosts_, by_time_, prefers_time_;
  bool skipped_preferred_ = false;
  std::vector<int> order_;      // ranks: the first of each host, the second of each, and so on
  std::vector<int> taken_;      // ranks of the placed shards
  std::vector<double> before_;  // times of these ranks before the shards were placed
  std::vector<int> placed_;     // sites of the placed units
};

}  // namespace torchrec_hkv::planner
