// Packs shards of tables into the memory of ranks (torchrec_hkv/planner/packing.py). CPU only.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

namespace torchrec_hkv::planner {

// What a shard needs of a rank: bytes of HBM and of host memory, and the time of a step.
struct Need {
  int64_t hbm;
  int64_t host;
  double time;
};

// The ranks on which the shards of an option may be.
enum class Spread {
  kAnyRank,    // each on any rank
  kAllRanks,   // on all ranks, in order
  kHostRanks,  // blocks of as many shards as a host has ranks: each on the ranks of a host, in
               // order
  kOneHost,    // on any ranks of one host
};

// The needs of the shards of an option.
struct Parts {
  Parts(std::vector<Need> shards, Spread spread);

  // Whether each shard fits where the same shard of `other` fits.
  bool fits_where(const Parts& other) const;

  std::vector<Need> needs;
  Spread spread;
  // Over all shards, and of the largest one.
  int64_t hbm = 0, host = 0;
  int64_t most_hbm = 0, most_host = 0, most_bytes = 0;
  double time = 0;
};

// Free memory of the ranks.
struct Room {
  int64_t hbm;
  int64_t host;
};

// The index of a rank for each shard of each option.
using Placement = std::vector<std::vector<int>>;

// What an assignment is for: only to know whether one exists, to estimate its time, or to be used.
enum class Effort { kFits, kQuick, kThorough };

// Assigns each shard to a rank with enough memory. Unless for kFits, minimizes the time of the
// slowest rank: by comparing all assignments of up to kFewShards shards if each may be on any rank,
// else by a search that prefers ranks and hosts with little time. Where that fails, the largest
// shards are placed where most memory is left, and shards are moved as long as the slowest rank
// becomes faster. For kFits, all are placed where most memory is left. The time for kThorough is at
// most that for kQuick. Blocks of an option are on different hosts while there are any. Nothing is
// returned if no assignment was found.
//
// rooms: of ranks, those of a host after one another.
// per_host: number of ranks of a host. Ranks that are left over belong to no host.
constexpr int kFewShards = 6;
std::optional<Placement> pack(const std::vector<const Parts*>& options,
                              const std::vector<Room>& rooms, int per_host, Effort effort);

// Where each shard is if it goes to the rank with the most memory, the largest shard first, though
// that may become less than nothing. Shards that must be on one host are not kept together.
// rooms: the free memory; what is left is returned here.
Placement overfill(const std::vector<const Parts*>& options, std::vector<Room>& rooms);

// The time of a step on the slowest rank.
double slowest(const std::vector<const Parts*>& options, const Placement& placement,
               size_t num_ranks);

}  // namespace torchrec_hkv::planner
