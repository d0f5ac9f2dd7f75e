// Updates rows of 32 and 16 bits by segments of equal slots in the sorted order, for optimizers
// that have a RowUpdater.
#include "hash_table/cuda/update/segment_kernel.cuh"

namespace torchrec_hkv::hash_table::cuda {

bool updates_segments(const OptimizerConfig& optimizer, int32_t row_class) {
  return has_row_updater(optimizer) &&
         row_class % kWidthClasses != static_cast<int32_t>(WidthClass::kWider);
}

void update_segments(const TableView* tables, const UpdateArguments& update,
                     const UpdateScratch& scratch, const GroupShape& shape, int32_t row_class,
                     bool first, cudaStream_t stream) {
  const SegmentCall call{tables, update, scratch, shape, row_class, first, stream};
  if (row_class >= first_row_class(RowType::kInt8)) return update_int8_segments(call);
  const RowType type = row_class < kWidthClasses ? RowType::kFloat32 : RowType::kFloat16;
  if (!is_plain_update(update.optimizer, type)) return update_extended_segments(call);
  if (updates_narrow_segments(shape, update.optimizer)) return update_narrow_segments(call);
  with_updater_kind(update.optimizer, [&]<Optimizer kKind>() {
    row_class < kWidthClasses ? launch_for_width<kKind, float>(call)
                              : launch_for_width<kKind, uint16_t>(call);
  });
}

}  // namespace torchrec_hkv::hash_table::cuda
