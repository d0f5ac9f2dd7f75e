// Words of host memory that a GPU writes and the host reads without waiting.
#pragma once

#include <c10/core/Device.h>

#include <cstdint>

#include "hash_table/kernels.h"

namespace torchrec_hkv::runtime {

struct HostWords {
  hash_table::UpdateHint update_hint;
  hash_table::BadOffsets bad_offsets;
};

// The words of one group; none on a CPU. Their memory lives as long as the process. A kernel that
// is still running when a group ends may therefore write the words of a later group. This is
// harmless: a hint affects only speed, and the reader of the other word compares the group's
// number.
class GroupHostWords {
 public:
  explicit GroupHostWords(c10::Device device);
  ~GroupHostWords();
  GroupHostWords(const GroupHostWords&) = delete;
  GroupHostWords& operator=(const GroupHostWords&) = delete;

  hash_table::UpdateHint* update_hint() const {
    return words_ == nullptr ? nullptr : &words_->update_hint;
  }
  hash_table::BadOffsets* bad_offsets() const {
    return words_ == nullptr ? nullptr : &words_->bad_offsets;
  }
  // Differs from the numbers of all earlier groups; never 0.
  uint32_t number() const { return number_; }

 private:
  HostWords* words_ = nullptr;
  uint32_t number_ = 0;
};

}  // namespace torchrec_hkv::runtime
