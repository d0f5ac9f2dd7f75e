// Tiles of ranks up to 32.
#include "tensor_train/tile_kernel.cuh"

namespace torchrec_hkv::tensor_train::cuda {
namespace {

template <int kProducts, Fit kFit, RowType kType>
struct Shapes {
  static constexpr bool kAny = kFit == Fit::kAny;
  static constexpr bool kLean = kFit == Fit::kFours && kProducts == 1;  // in registers
  using Few = TileConfig<32, 32, 8, 4, kProducts, kFit, kType, kAny ? 3 : 5>;
  using FewBackward = TileConfig<32, 32, 8, 4, kProducts, kFit, kType, kAny ? 2 : kLean ? 5 : 4>;
  using Many = TileConfig<32, 32, 16, 8, kProducts, kFit, kType, kAny ? 2 : 3>;
  using ManyBackward = TileConfig<32, 32, 16, 8, kProducts, kFit, kType, kAny ? 1 : kLean ? 3 : 2>;
};

}  // namespace

void run_tiles_32(const TileRun& run, const TileInput& in) { run_rank<Shapes>(run, in); }

}  // namespace torchrec_hkv::tensor_train::cuda
