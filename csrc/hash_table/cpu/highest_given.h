// If a call gives several scores for a new id, the highest decides whether the id is refused.
#pragma once

#include <cstdint>
#include <mutex>
#include <unordered_map>

#include "hash_table/table_view.h"

namespace torchrec_hkv::hash_table::cpu {

// The highest score given for each id of a batch, by table. Skipped positions do not count. Built
// at the first query, by any thread, because most calls refuse nothing.
class HighestGiven {
 public:
  HighestGiven(const Batch& batch, const CallContext& context, const int64_t* slots)
      : batch_(batch), context_(context), slots_(slots) {}

  uint64_t of(int32_t table, int64_t id) {
    std::call_once(built_, [this] {
      for (int32_t feature = 0; feature < batch_.num_features; ++feature) {
        auto& highest_of = highest_[batch_.feature_tables[feature]];
        const int64_t end = batch_.feature_start(feature + 1);
        for (int64_t at = batch_.feature_start(feature); at < end; ++at) {
          if (slots_[at] == kSkipped) continue;
          uint64_t& highest = highest_of[batch_.ids[at]];
          if (context_.given(at) > highest) highest = context_.given(at);
        }
      }
    });
    return highest_.at(table).at(id);
  }

 private:
  const Batch& batch_;
  const CallContext& context_;
  const int64_t* slots_;
  std::once_flag built_;
  std::unordered_map<int32_t, std::unordered_map<int64_t, uint64_t>> highest_;
};

}  // namespace torchrec_hkv::hash_table::cpu
