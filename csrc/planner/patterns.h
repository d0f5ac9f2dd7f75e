// Combinations of options that are likely to fit, for many tables.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "planner/packing.h"

namespace torchrec_hkv::planner {

// The options of a table, and the most economical ones.
class TableOptions {
 public:
  // options: at least one. Among equal options the first is preferred.
  explicit TableOptions(std::vector<std::shared_ptr<const Parts>> options);

  const Parts& at(int option) const { return *options_[static_cast<size_t>(option)]; }
  // The option that takes the least memory in total.
  int whole() const { return whole_; }
  // The option whose largest shard takes the least memory.
  int spread() const { return spread_; }
  // The corresponding options if only HBM counts.
  int whole_in_host() const { return whole_in_host_; }
  int spread_in_host() const { return spread_in_host_; }
  // The option with the least memory whose shards each take at most this much; spread() if there is
  // none.
  int within(int64_t hbm, int64_t host) const;
  // The option with the least memory whose largest shard takes much less than that of `option` and,
  // if in_host, that takes no more HBM in total. -1 if there is none.
  int spread_further(int option, bool in_host) const;

 private:
  std::vector<std::shared_ptr<const Parts>> options_;
  int whole_, spread_, whole_in_host_, spread_in_host_;
};

// Calls `fits` with combinations of options, by table, until it returns true. Only combinations
// that fit into the memory of all ranks together are tried.
//
// First, tables are spread so that no shard takes more than a part of a rank's memory; this part
// decreases. Then the largest tables are spread as far as possible, in increasing numbers. This is
// repeated with as many tables in host memory as needed, and with all tables in host memory. If
// nothing fits, tables on ranks that lack memory are spread further one by one. Tables that then
// take little additional memory come first.
//
// per_host: number of ranks of a host.
// Returns whether a combination was found.
bool find_pattern(const std::vector<const TableOptions*>& tables,
                  const std::vector<FreeMemory>& free_memory, int per_host,
                  const std::function<bool(const std::vector<int>&)>& fits);

}  // namespace torchrec_hkv::planner
