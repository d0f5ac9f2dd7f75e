// Tiles of ranks up to 256.
#include "tensor_train/cuda/contract/tile_kernel.cuh"

namespace torchrec_hkv::tensor_train::cuda {
namespace {

// Four prefixes fill a multiprocessor. All kernels read table shapes at run time.
template <int kProducts, Fit kFit, RowType kType>
struct Shapes256 {
  using Many = TileConfig<256, 32, 4, 8, kProducts, Fit::kAny, RowType::kFloat32, 1>;
  using ManyBackward = Many;
};

template <int kProducts>
using Repeatable256 = TileConfig<256, 32, 4, 8, kProducts, Fit::kAny, RowType::kFloat32, 1, true>;

}  // namespace

void run_tiles_256(const TileRun& run, const TileInput& in) {
  if (run.backward && run.deterministic) return run_fixed_point<Repeatable256>(run, in);
  if (run.precision == Precision::kTf32) {
    run_shapes<Shapes256<1, Fit::kAny, RowType::kFloat32>>(run, in);
  } else {
    run_shapes<Shapes256<3, Fit::kAny, RowType::kFloat32>>(run, in);
  }
}

}  // namespace torchrec_hkv::tensor_train::cuda
