// Tiles of ranks up to 32.
#include "tensor_train/cuda/contract/resident_kernel.cuh"
#include "tensor_train/cuda/contract/resident_lookup.cuh"
#include "tensor_train/cuda/contract/share_kernel.cuh"
#include "tensor_train/cuda/contract/tile_kernel.cuh"

namespace torchrec_hkv::tensor_train::cuda {
namespace {

template <int kProducts, Fit kFit, RowType kType>
struct Shapes32 {
  static constexpr bool kAny = kFit == Fit::kAny;
  static constexpr bool kLean = kFit == Fit::kFours && kProducts == 1;  // needs few registers
  using Few = TileConfig<32, 32, 8, 4, kProducts, kFit, kType, kAny ? 3 : 5>;
  using FewBackward = TileConfig<32, 32, 8, 4, kProducts, kFit, kType, kAny ? 2 : kLean ? 5 : 4>;
  using Many = TileConfig<32, 32, 16, 8, kProducts, kFit, kType, kAny ? 2 : 3>;
  using ManyBackward = TileConfig<32, 32, 16, 8, kProducts, kFit, kType, kLean ? 3 : 2>;
};

template <int kProducts, Fit kFit>
using Resident32 = TileConfig<32, 32, 8, 8, kProducts, kFit, RowType::kFloat32, 1>;

// Launches the kernel for many ids per prefix, if there is one for the table. Returns whether it
// did.
template <int kProducts, Fit kFit>
bool launch_dense(const TileRun& run, const TileInput& in) {
  return run.backward ? launch_resident<Resident32<kProducts, kFit>, 2>(run, in)
                      : launch_resident_lookup<Resident32<kProducts, kFit>, 2>(run, in);
}

template <int kProducts>
using Repeatable32 = TileConfig<32, 32, 8, 4, kProducts, Fit::kAny, RowType::kFloat32, 1, true>;

// Processes ids in pairs if there are few, and always in single precision. Lookups have registers
// for three blocks per multiprocessor.
template <int kProducts, Fit kFit>
void run_shares(const TileRun& run, const TileInput& in) {
  using Lookup = TileConfig<32, 32, 8, 8, kProducts, kFit, RowType::kFloat32, 3>;
  using Gradients = TileConfig<32, 32, 8, 8, kProducts, kFit, RowType::kFloat32, 2>;
  if constexpr (kProducts == 1) {
    if (!run.few) {
      return run.backward ? launch_shares<Gradients, true, false>(run, in)
                          : launch_shares<Lookup, false, false>(run, in);
    }
  }
  return run.backward ? launch_shares<Gradients, true, true>(run, in)
                      : launch_shares<Lookup, false, true>(run, in);
}

}  // namespace

bool has_dense_gradients_32(int64_t only_lasts) {
  return fits_resident<Resident32<1, Fit::kFours>, 2>(only_lasts);  // the same for any precision
}

void run_tiles_32(const TileRun& run, const TileInput& input) {
  if (run.backward && run.deterministic) return run_fixed_point<Repeatable32>(run, input);
  const bool tf32 = run.precision == Precision::kTf32;
  TileInput in = input;
  const bool dense = run.may_be_dense && run.kernel.small && in.unit == 4;
  if (run.kernel.fours) {
    if (dense) {
      in.leaves_dense =
          tf32 ? launch_dense<1, Fit::kFours>(run, in) : launch_dense<3, Fit::kFours>(run, in);
    }
    if (!run.shares) return run_rank<Shapes32>(run, in);
    return tf32 ? run_shares<1, Fit::kFours>(run, in) : run_shares<3, Fit::kFours>(run, in);
  }
  if (dense && run.kernel.quads) {
    in.leaves_dense =
        tf32 ? launch_dense<1, Fit::kQuads>(run, in) : launch_dense<3, Fit::kQuads>(run, in);
  } else if (dense) {
    in.leaves_dense =
        tf32 ? launch_dense<1, Fit::kVectors>(run, in) : launch_dense<3, Fit::kVectors>(run, in);
  }
  if (!run.shares) return run_rank<Shapes32>(run, in);
  if (run.kernel.narrow) {
    return tf32 ? run_shares<1, Fit::kNarrow>(run, in) : run_shares<3, Fit::kNarrow>(run, in);
  }
  return tf32 ? run_shares<1, Fit::kVectors>(run, in) : run_shares<3, Fit::kVectors>(run, in);
}

}  // namespace torchrec_hkv::tensor_train::cuda
