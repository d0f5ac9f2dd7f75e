// Chooses the kernel of pool_tiles.cuh for a group.
#include "hash_table/cuda/pool/pool_tiles.cuh"

namespace torchrec_hkv::hash_table::cuda {
namespace {

template <int kLanes>
void launch(const PoolCall& call, const GroupShape& shape, bool hot) {
  constexpr RowStorage kFloat32 = RowStorage::kFloat32, k16Bits = RowStorage::k16Bits;
  const Batch& batch = call.batch;
  const bool float32_out = call.out.type == RowType::kFloat32, scaled = call.scaled();
  if (shape.rows_of_16_bits()) {
    if (scaled || !float32_out) return launch_tiles<kLanes, true, k16Bits, false, Rows::kAny>(call);
    return launch_tiles<kLanes, false, k16Bits, true, Rows::kAny>(call);
  }
  if (!shape.float32_rows) {
    return launch_tiles<kLanes, true, RowStorage::kAny, false, Rows::kAny>(call);
  }
  if (!float32_out) return launch_tiles<kLanes, true, kFloat32, false, Rows::kAny>(call);
  if (scaled) return launch_tiles<kLanes, true, kFloat32, true, Rows::kAny>(call);
  if (batch.num_ids == batch.num_bags && batch.num_ids >= kManyOnce) {
    return launch_tiles<kLanes, false, kFloat32, true, Rows::kOnce>(call);
  }
  if (hot) return launch_tiles<kLanes, false, kFloat32, true, Rows::kHot>(call);
  launch_tiles<kLanes, false, kFloat32, true, Rows::kAny>(call);
}

}  // namespace

void pool_four_wide(const PoolCall& call, const GroupShape& shape, bool hot) {
  const int32_t columns = shape.rows_of_16_bits() ? 8 : 4;  // of a lane
  const int32_t lanes = (shape.widest + columns - 1) / columns;
  if (lanes <= 8) {
    launch<8>(call, shape, hot);
  } else if (lanes <= 16) {
    launch<16>(call, shape, hot);
  } else {
    launch<32>(call, shape, hot);
  }
}

}  // namespace torchrec_hkv::hash_table::cuda
