// Pooling of groups whose rows all have 8 bits a column.
#include "hash_table/cuda/pool/pool_tiles.cuh"

namespace torchrec_hkv::hash_table::cuda {
namespace {

template <int kLanes>
void launch(const PoolCall& call) {
  if (call.scaled() || call.out.type != RowType::kFloat32) {
    return launch_pool<kLanes, true, Storage::kInt8, false, Rows::kAny>(call);
  }
  launch_pool<kLanes, false, Storage::kInt8, true, Rows::kAny>(call);
}

}  // namespace

void pool_int8(const PoolCall& call) {
  const int32_t lanes = (call.shape.widest + 7) / 8;
  if (lanes <= 8) {
    launch<8>(call);
  } else if (lanes <= 16) {
    launch<16>(call);
  } else {
    launch<32>(call);
  }
}

}  // namespace torchrec_hkv::hash_table::cuda
