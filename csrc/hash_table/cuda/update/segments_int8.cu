// The update of rows of 8 bits by segments of equal slots in the sorted order, for optimizers that
// have a RowUpdater.
#include "hash_table/cuda/update/segment_kernel.cuh"

namespace torchrec_hkv::hash_table::cuda {

void update_int8_segments(const SegmentCall& call) {
  const auto choose_width = [&]<Optimizer kKind>() {
    switch (static_cast<WidthClass>(call.row_class % kWidthClasses)) {
      case WidthClass::k32:
        return launch_segments<kKind, int8_t, 8, 1, 4>(call);
      case WidthClass::k64:
        return launch_segments<kKind, int8_t, 16, 1, 4>(call);
      case WidthClass::k128:
        return launch_segments<kKind, int8_t, 32, 1, 4>(call);
      case WidthClass::k256:
        return launch_segments<kKind, int8_t, 32, 2, 4>(call);
      case WidthClass::k512:
        return launch_segments<kKind, int8_t, 32, 4, 2>(call);
      case WidthClass::k1024:
        return launch_segments<kKind, int8_t, 32, 8, 2>(call);
      case WidthClass::kWider:
        return;
    }
  };
  with_updater_kind(call.update.optimizer, choose_width);
}

}  // namespace torchrec_hkv::hash_table::cuda
