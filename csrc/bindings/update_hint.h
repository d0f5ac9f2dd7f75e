// Words of host memory that a GPU writes and the host reads without waiting.
#pragma once

#include <c10/core/Device.h>

#include "hash_table/kernels.h"

namespace torchrec_hkv::bindings {

// The hint of one group; none on a CPU. Its memory lives as long as the process: a kernel that is
// still under way when the group ends may write the hint of a later one, of which only speed
// depends.
class GroupUpdateHint {
 public:
  explicit GroupUpdateHint(c10::Device device);
  ~GroupUpdateHint();
  GroupUpdateHint(const GroupUpdateHint&) = delete;
  GroupUpdateHint& operator=(const GroupUpdateHint&) = delete;

  hash_table::UpdateHint* get() const { return hint_; }

 private:
  hash_table::UpdateHint* hint_ = nullptr;
};

}  // namespace torchrec_hkv::bindings
