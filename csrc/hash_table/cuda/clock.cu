#include "common/cuda_check.h"
#include "hash_table/cuda/clock.cuh"
#include "hash_table/kernels.h"

namespace torchrec_hkv::hash_table::cuda {
namespace {

__global__ void __launch_bounds__(kWarp)
    tick_kernel(Clock* clock, const __grid_constant__ Tick tick) {
  tick_warp(clock, tick);
}

__global__ void release_kernel(Clock* clock, int32_t pin_index, uint32_t generation) {
  release_pin(*clock, pin_index, generation);
}

}  // namespace

void tick(Clock* clock, const Tick& tick, cudaStream_t stream) {
  tick_kernel<<<1, kWarp, 0, stream>>>(clock, tick);
  HKV_CUDA_CHECK_LAUNCH();
}

void release(Clock* clock, int32_t pin_index, uint32_t generation, cudaStream_t stream) {
  release_kernel<<<1, 1, 0, stream>>>(clock, pin_index, generation);
  HKV_CUDA_CHECK_LAUNCH();
}

}  // namespace torchrec_hkv::hash_table::cuda
