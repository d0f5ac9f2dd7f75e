// The update of rows of 32 and 16 bits by segments of equal slots in the sorted order, for
// optimizers that have a RowUpdater.
#include "hash_table/cuda/update/segment_kernel.cuh"

namespace torchrec_hkv::hash_table::cuda {

bool updates_segments(const OptimizerConfig& optimizer, int32_t row_class) {
  return has_row_updater(optimizer) &&
         row_class % kWidthClasses != static_cast<int32_t>(WidthClass::kWider);
}

void update_segments(const TableView* tables, const Update& update, const Scratch& scratch,
                     const GroupShape& shape, int32_t row_class, bool first, cudaStream_t stream) {
  const SegmentCall call{tables, update, scratch, shape, row_class, first, stream};
  const auto choose_width = [&]<Optimizer kKind>() {
    // The last argument is kDepth. Two wide rows keep the memory as busy as four narrow ones.
    switch (row_class) {
      case 0:
        return launch_segments<kKind, float, 8, 1, 4>(call);
      case 1:
        return launch_segments<kKind, float, 16, 1, 4>(call);
      case 2:
        return launch_segments<kKind, float, 32, 1, 4>(call);
      case 3:
        return launch_segments<kKind, float, 32, 2, 4>(call);
      case 4:
        return launch_segments<kKind, float, 32, 4, 2>(call);
      case 5:
        return launch_segments<kKind, float, 32, 8, 2>(call);
      case kWidthClasses:
      case kWidthClasses + 1:
        return launch_segments<kKind, uint16_t, 8, 1, 4>(call);
      case kWidthClasses + 2:
        return launch_segments<kKind, uint16_t, 16, 1, 4>(call);
      case kWidthClasses + 3:
        return launch_segments<kKind, uint16_t, 32, 1, 4>(call);
      case kWidthClasses + 4:
        return launch_segments<kKind, uint16_t, 32, 2, 4>(call);
      case kWidthClasses + 5:
        return launch_segments<kKind, uint16_t, 32, 4, 2>(call);
      default:
        return;
    }
  };
  if (row_class >= first_row_class(RowType::kInt8)) return update_int8_segments(call);
  with_updater_kind(update.optimizer, choose_width);
}

}  // namespace torchrec_hkv::hash_table::cuda
