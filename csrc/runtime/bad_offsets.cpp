// Invalid offsets on a GPU. Kernels report them in host memory, and the next call of the group
// throws.
#include <ATen/core/LegacyTypeDispatch.h>

#include <atomic>

#include "runtime/table_group.h"

namespace torchrec_hkv::runtime {

void TableGroup::watch_offsets(hash_table::Batch* batch) const {
  if (!refused_.defined()) return;
  batch->refused = reinterpret_cast<uint32_t*>(refused_.data_ptr<int32_t>());
  batch->bad_offsets = host_words_.bad_offsets();
  batch->group_number = host_words_.number();
}

void TableGroup::check_bad_offsets() const {
  const volatile hash_table::BadOffsets* const report = host_words_.bad_offsets();
  if (report == nullptr || report->found != host_words_.number()) return;
  std::atomic_thread_fence(std::memory_order_acquire);  // the other words were written earlier
  const int64_t bag = report->bag, from = report->from, to = report->to, ids = report->num_ids;
  host_words_.bad_offsets()->found = 0;
  order_->run(kWriteAll, [&] {
    const at::AutoDispatchBelowADInplaceOrView below;
    refused_.zero_();
  });
  const char* const when =
      ". The GPU found this in an earlier call; no row has been updated since.";
  TORCH_CHECK_VALUE(bag != 0 || from == 0, "offsets must begin with 0, but begin with ", from,
                    when);
  TORCH_CHECK_VALUE(to >= from, "offsets must not decrease, but go from ", from, " to ", to,
                    " at bag ", bag, when);
  TORCH_CHECK_VALUE(from >= 0, "offsets must not be negative, but bag ", bag, " begins at ", from,
                    when);
  TORCH_CHECK_VALUE(false, "offsets must end with the number of ids, ", ids, ", but bag ", bag,
                    " ends with ", to, when);
}

}  // namespace torchrec_hkv::runtime
