// Updates rows of 32 and 16 bits as segments.cu does, with features that most updates do not use:
// clipped gradients, coupled weight decay, bounded norms of rows, and stochastic rounding.
#include "hash_table/cuda/update/segment_kernel.cuh"

namespace torchrec_hkv::hash_table::cuda {

void update_extended_segments(const SegmentCall& call) {
  with_updater_kind(call.update.optimizer, [&]<Optimizer kKind>() {
    call.row_class < kWidthClasses ? launch_for_width<kKind, float, false>(call)
                                   : launch_for_width<kKind, uint16_t, false>(call);
  });
}

}  // namespace torchrec_hkv::hash_table::cuda
