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

// The words of one group; none on a CPU. Their memory lives as long as the process: a kernel that
// is still under way when the group ends may write those of a later one. Of a hint only speed
// depends; who reads the other sees by its number that it is not meant.
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
  // Other than those of all groups before; not 0.
  uint32_t number() const { return number_; }

 private:
  HostWords* words_ = nullptr;
  uint32_t number_ = 0;
};

}  // namespace torchrec_hkv::runtime
