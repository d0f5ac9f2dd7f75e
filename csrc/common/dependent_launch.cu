#include <atomic>
#include <map>
#include <mutex>
#include <utility>

#include "common/dependent_launch.cuh"

namespace torchrec_hkv {
namespace {

constexpr int kFreeCluster = 8;  // blocks of a cluster that every kernel may have

}  // namespace

void allow_launch(const void* kernel, const LaunchShape& shape) {
  const bool prefers = shape.shared_percent >= 0;
  if (shape.shared_bytes == 0 && shape.cluster <= kFreeCluster && !prefers) return;
  static std::mutex mutex;
  static std::map<std::pair<int, const void*>, size_t> allowed;  // bytes
  int device = 0;
  HKV_CUDA_CHECK(cudaGetDevice(&device));
  const std::lock_guard<std::mutex> lock(mutex);
  const auto [at, is_new] = allowed.try_emplace({device, kernel}, 0);
  if (is_new && shape.cluster > kFreeCluster) {
    HKV_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1));
  }
  if (is_new && prefers) {
    HKV_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                                        shape.shared_percent));
  }
  if (shape.shared_bytes <= at->second) return;
  HKV_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                      static_cast<int>(shape.shared_bytes)));
  at->second = shape.shared_bytes;
}

int compute_capability() {
  constexpr int kMax = 64;  // devices that are remembered
  static std::atomic<int> known[kMax];
  int device = 0;
  HKV_CUDA_CHECK(cudaGetDevice(&device));
  int major = device < kMax ? known[device].load(std::memory_order_relaxed) : 0;
  if (major != 0) return major;
  HKV_CUDA_CHECK(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
  if (device < kMax) known[device].store(major, std::memory_order_relaxed);
  return major;
}

unsigned multiprocessors() {
  int device = 0, number = 0;
  HKV_CUDA_CHECK(cudaGetDevice(&device));
  HKV_CUDA_CHECK(cudaDeviceGetAttribute(&number, cudaDevAttrMultiProcessorCount, device));
  return static_cast<unsigned>(number);
}

void launch_dependent(const void* kernel, const LaunchShape& shape, cudaStream_t stream,
                      void** arguments) {
  allow_launch(kernel, shape);
  cudaLaunchConfig_t config = {};
  config.gridDim = shape.grid;
  config.blockDim = dim3(static_cast<unsigned>(shape.threads));
  config.dynamicSmemBytes = shape.shared_bytes;
  config.stream = stream;
  cudaLaunchAttribute attributes[2];
  unsigned count = 0;
  if (shape.together) {
    attributes[count].id = cudaLaunchAttributeCooperative;
    attributes[count++].val.cooperative = 1;
  } else if (compute_capability() >= 9) {
    attributes[count].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[count++].val.programmaticStreamSerializationAllowed = 1;
  }
  if (shape.cluster > 1) {
    attributes[count].id = cudaLaunchAttributeClusterDimension;
    attributes[count].val.clusterDim.x = static_cast<unsigned>(shape.cluster);
    attributes[count].val.clusterDim.y = 1;
    attributes[count++].val.clusterDim.z = 1;
  }
  config.attrs = attributes;
  config.numAttrs = count;
  HKV_CUDA_CHECK(cudaLaunchKernelExC(&config, kernel, arguments));
  HKV_CUDA_CHECK_LAUNCH();
}

}  // namespace torchrec_hkv
