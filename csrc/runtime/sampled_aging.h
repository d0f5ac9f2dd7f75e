// The half-life of a table under LFU with aging if a part of its ids is replayed in a smaller table
// (torchrec_hkv/replay). As in the whole table, it is computed from all lookups, and c by
// miniatures that get all ids.
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
  // slots: number of slots of the whole table. c: the fixed c; without a value, miniatures choose
  // it, beginning with kFirstC.
  SampledAging(int64_t slots, std::optional<double> c);

  // Begins a call. Returns the half-life in calls; infinite if c is.
  double begin_call();
  // Ends a call that looks up `ids`, int64 on the CPU. evicts: whether the table has ever evicted.
  void end_call(const at::Tensor& ids, bool evicts);

  // Begins a call, and sets the same half-life in the table of a sample.
  void begin_call_of(TableGroup& group, int64_t table);
  // Ends a call of `lookups` ids. ids: in order, at least the ids that the miniatures sample.
  void end_call(const int64_t* ids, int64_t n, int64_t lookups, bool evicts);

  // The ids that the miniatures sample have a miniature_hash() whose upper half is below this.
  uint64_t sampled() const { return entries_.empty() ? 0 : miniatures_.sampled; }
  double c() const { return aged_.c; }

 private:
  static constexpr double kFirstC = 2;  // FIRST_C of torchrec_hkv/hash_table/eviction.py

  int64_t slots_;
  hash_table::AgedLfu aged_;
  hash_table::MiniatureCounters counters_{};
  std::vector<uint32_t> entries_;  // empty if c is fixed
  hash_table::Miniatures miniatures_{};
  uint64_t lookups_ = 0;
  uint32_t now_ = 0;
};

}  // namespace torchrec_hkv::runtime
