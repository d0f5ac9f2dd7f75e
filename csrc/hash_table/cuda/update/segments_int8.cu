// The update of rows of 8 bits by segments of equal slots in the sorted order, for optimizers that
// have a RowUpdater.
#include "hash_table/cuda/update/segment_kernel.cuh"

namespace torchrec_hkv::hash_table::cuda {

void update_int8_segments(const SegmentCall& call) {
  with_updater_kind(call.update.optimizer, [&]<Optimizer kKind>() {
    is_plain_update(call.update.optimizer, RowType::kInt8)
        ? launch_for_width<kKind, int8_t, true>(call)
        : launch_for_width<kKind, int8_t, false>(call);
  });
}

}  // namespace torchrec_hkv::hash_table::cuda
