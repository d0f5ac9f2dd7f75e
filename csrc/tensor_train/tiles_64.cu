// Tiles of ranks up to 64.
#include "tensor_train/resident_kernel.cuh"
#include "tensor_train/tile_kernel.cuh"

namespace torchrec_hkv::tensor_train::cuda {
namespace {

// As many values of a tile as fit twice on a multiprocessor.
template <int kProducts, Fit kFit, RowType kType>
struct Shapes64 {
  static constexpr int kBlocks = kFit == Fit::kAny ? 1 : 2;
  using Few = TileConfig<64, 64, 8, 8, kProducts, kFit, kType, kBlocks>;
  using FewBackward = TileConfig<64, 32, 8, 8, kProducts, kFit, kType, kBlocks>;
  using Many = Few;
  using ManyBackward = TileConfig<64, 32, 16, 8, kProducts, kFit, kType, kBlocks>;
};

template <int kProducts>
void run_many_gradients(const TileRun& run, const TileInput& in) {
  using Resident = TileConfig<64, 32, 16, 16, kProducts, Fit::kFours, RowType::kFloat32, 1>;
  using Tiles = typename Shapes64<kProducts, Fit::kFours, RowType::kFloat32>::ManyBackward;
  run_gradients<Resident, 1, Tiles>(run, in);
}

template <int kProducts>
using Repeatable64 = TileConfig<64, 32, 8, 8, kProducts, Fit::kAny, RowType::kFloat32, 1, true>;

}  // namespace

void run_tiles_64(const TileRun& run, const TileInput& in) {
  if (run.backward && run.deterministic) return run_fixed_point<Repeatable64>(run, in);
  if (!run.backward || !run.may_be_dense || !run.kernel.fours) {
    run_rank<Shapes64>(run, in);
  } else if (run.precision == Precision::kTf32) {
    run_many_gradients<1>(run, in);
  } else {
    run_many_gradients<3>(run, in);
  }
}

}  // namespace torchrec_hkv::tensor_train::cuda
