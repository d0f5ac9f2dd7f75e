// Packs shards of tables into the memory of ranks (torchrec_hkv/planner/packing.py). CPU only.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

namespace torchrec_hkv::planner {

// The needs of a shard on its rank: bytes of HBM and of host memory, and the time of a step.
struct ShardNeed {
  int64_t hbm;
  int64_t host;
  double time;
};

// The ranks on which the shards of an option may be.
enum class Spread {
  kAnyRank,    // each on any rank
  kAllRanks,   // on all ranks, in order
  kHostRanks,  // in blocks of as many shards as a host has ranks; each block is on the ranks of one
               // host, in order
  kOneHost,    // on any ranks of one host
};

// The needs of the shards of an option.
struct Parts {
  Parts(std::vector<ShardNeed> shards, Spread spread);

  // Whether each shard fits where the same shard of `other` fits.
  bool fits_where(const Parts& other) const;

  std::vector<ShardNeed> needs;
  Spread spread;
  // Sums over all shards, and values of the largest shard.
  int64_t hbm = 0, host = 0;
  int64_t max_hbm = 0, max_host = 0, max_bytes = 0;
  double time = 0;
};

// Free memory of the ranks.
struct FreeMemory {
  int64_t hbm;
  int64_t host;
};

// The index of a rank for each shard of each option.
using ShardPlacement = std::vector<std::vector<int>>;

// The purpose of an assignment: to know whether one exists, to estimate its time, or to use it.
enum class PackEffort { kFits, kQuick, kThorough };

// Assigns each shard to a rank with enough memory; returns nothing if no assignment was found. For
// kFits, all shards are placed where most memory is left. Otherwise the time of the slowest rank is
// minimized: for up to kFewShards shards that may be on any rank, by comparing all assignments; in
// other cases by a search that prefers ranks and hosts with little time. If the search fails, the
// largest shards are placed where most memory is left, and shards are moved as long as the slowest
// rank becomes faster. The time for kThorough is at most that for kQuick. Blocks of an option are
// on different hosts as long as there are unused hosts.
//
// free_memory: free memory of the ranks; ranks of a host are adjacent.
// per_host: number of ranks of a host. Remaining ranks belong to no host.
constexpr int kFewShards = 6;
std::optional<ShardPlacement> pack(const std::vector<const Parts*>& options,
                                   const std::vector<FreeMemory>& free_memory, int per_host,
                                   PackEffort effort);

// Assigns each shard, the largest first, to the rank with the most free memory, which may become
// negative. Shards that must be on one host are not kept together.
// free_memory: free memory of the ranks; in and out.
ShardPlacement pack_overfull(const std::vector<const Parts*>& options,
                             std::vector<FreeMemory>& free_memory);

// The time of a step on the slowest rank.
double slowest(const std::vector<const Parts*>& options, const ShardPlacement& placement,
               size_t num_ranks);

}  // namespace torchrec_hkv::planner
