// The half-life of a table under LFU with aging, where a part of its ids is replayed in a smaller
// table (torchrec_hkv/replay). It follows from all lookups, and c from miniatures that see all ids,
// as in the table itself.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "hash_table/aged_lfu.h"
#include "hash_table/miniatures.h"
#include "runtime/table_group.h"

namespace torchrec_hkv::runtime {

class SampledAging {
 public:
  // slots: of the table. c: fixed; without a value, miniatures choose it, beginning with kFirstC.
  SampledAging(int64_t slots, std::optional<double> c);

  // Begins a call. Returns the half-life in calls; infinite where c is.
  double begin_call();
  // Ends it: the table looks up `ids`, int64 on the CPU. `evicts`: whether it has ever evicted.
  void end_call(const at::Tensor& ids, bool evicts);

  // Begins a call, and gives a table of a sample the same half-life.
  void begin_call_of(TableGroup& group, int64_t table);
  // Ends a call of `lookups` ids. `ids`: at least those that the miniatures sample, in order.
  void end_call(const int64_t* ids, int64_t n, int64_t lookups, bool evicts);

  // The ids that the miniatures sample have a miniature_hash() whose upper half is below this.
  uint64_t sampled() const { return entries_.empty() ? 0 : miniatures_.sampled; }
  double c() const { return aged_.c; }

 private:
  static constexpr double kFirstC = 2;  // FIRST_C of torchrec_hkv/hash_table/eviction.py

  int64_t slots_;
  hash_table::AgedLfu aged_;
  hash_table::MiniatureTally tally_{};
  std::vector<uint32_t> entries_;  // none: c is fixed
  hash_table::Miniatures miniatures_{};
  uint64_t lookups_ = 0;
  uint32_t now_ = 0;
};

}  // namespace torchrec_hkv::runtime
