// Of several scores that a call gives for one new id, the highest decides whether it is refused.
#pragma once

#include <cstdint>
#include <mutex>
#include <unordered_map>

#include "hash_table/table_view.h"

namespace torchrec_hkv::hash_table::cpu {

// The highest score given for each id of a batch of one table, positions that are passed over
// aside. Built when first asked, by any thread: most calls refuse nothing.
class HighestGiven {
 public:
  HighestGiven(const Batch& batch, const Visit& visit, const int64_t* slots)
      : batch_(batch), visit_(visit), slots_(slots) {}

  uint64_t of(int64_t id) {
    std::call_once(built_, [this] {
      for (int64_t at = 0; at < batch_.num_ids; ++at) {
        if (slots_[at] == kPassedOver) continue;
        uint64_t& highest = highest_[batch_.ids[at]];
        if (visit_.given(at) > highest) highest = visit_.given(at);
      }
    });
    return highest_.at(id);
  }

 private:
  const Batch& batch_;
  const Visit& visit_;
  const int64_t* slots_;
  std::once_flag built_;
  std::unordered_map<int64_t, uint64_t> highest_;
};

}  // namespace torchrec_hkv::hash_table::cpu
