// Tiles of ranks up to 64.
#include "tensor_train/cuda/contract/resident_kernel.cuh"
#include "tensor_train/cuda/contract/tile_kernel.cuh"

namespace torchrec_hkv::tensor_train::cuda {
namespace {

// Two tiles fit on a multiprocessor.
template <int kProducts, Fit kFit, RowType kType>
struct Shapes64 {
  static constexpr int kBlocks = kFit == Fit::kAny ? 1 : 2;
  using Few = TileConfig<64, 64, 8, 8, kProducts, kFit, kType, kBlocks>;
  using FewBackward = TileConfig<64, 32, 8, 8, kProducts, kFit, kType, kBlocks>;
  using Many = Few;
  using ManyBackward = TileConfig<64, 32, 16, 8, kProducts, kFit, kType, kBlocks>;
};

template <int kProducts, Fit kFit>
using Resident64 = TileConfig<64, 32, 16, 16, kProducts, kFit, RowType::kFloat32, 1>;

template <Fit kFit>
bool launch_dense(const TileRun& run, const TileInput& in) {
  return run.precision == Precision::kTf32 ? launch_resident<Resident64<1, kFit>, 1>(run, in)
                                           : launch_resident<Resident64<3, kFit>, 1>(run, in);
}

template <int kProducts>
using Repeatable64 = TileConfig<64, 32, 8, 8, kProducts, Fit::kAny, RowType::kFloat32, 1, true>;

}  // namespace

bool has_dense_gradients_64(int64_t only_lasts) {
  return fits_resident<Resident64<1, Fit::kFours>, 1>(only_lasts);  // the same for any precision
}

void run_tiles_64(const TileRun& run, const TileInput& input) {
  if (run.backward && run.deterministic) return run_fixed_point<Repeatable64>(run, input);
  TileInput in = input;
  if (run.backward && run.may_be_dense && run.kernel.small && in.unit == 4) {
    in.leaves_dense = run.kernel.fours   ? launch_dense<Fit::kFours>(run, in)
                      : run.kernel.quads ? launch_dense<Fit::kQuads>(run, in)
                                         : launch_dense<Fit::kVectors>(run, in);
  }
  if (run.kernel.quads) {
    return run.precision == Precision::kTf32
               ? run_shapes<Shapes64<1, Fit::kQuads, RowType::kFloat32>>(run, in)
               : run_shapes<Shapes64<3, Fit::kQuads, RowType::kFloat32>>(run, in);
  }
  run_rank<Shapes64>(run, in);
}

}  // namespace torchrec_hkv::tensor_train::cuda
