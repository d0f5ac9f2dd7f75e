// Tiles of ranks up to 128.
#include "tensor_train/cuda/contract/tile_kernel.cuh"

namespace torchrec_hkv::tensor_train::cuda {
namespace {

template <int kProducts, Fit kFit, RowType kType>
struct Shapes128 {
  using Many = TileConfig<128, 32, 8, 8, kProducts, kFit, kType, 1>;
  using ManyBackward = TileConfig<128, 32, 8, 8, kProducts, kFit, kType, kFit == Fit::kAny ? 1 : 2>;
};

template <int kProducts>
using Repeatable128 = TileConfig<128, 32, 8, 8, kProducts, Fit::kAny, RowType::kFloat32, 1, true>;

}  // namespace

void run_tiles_128(const TileRun& run, const TileInput& in) {
  if (run.backward && run.deterministic) return run_fixed_point<Repeatable128>(run, in);
  run_rank<Shapes128>(run, in);
}

}  // namespace torchrec_hkv::tensor_train::cuda
