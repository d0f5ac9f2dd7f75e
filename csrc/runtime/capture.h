// Whether launches are captured in a CUDA graph.
#pragma once

#include <c10/core/Device.h>

#ifdef TORCHREC_HKV_CUDA
#include <c10/cuda/CUDAStream.h>

#include "common/cuda_check.h"
#endif

namespace torchrec_hkv::runtime {

// Whether the device's current stream is captured.
inline bool is_capturing([[maybe_unused]] c10::Device device) {
#ifdef TORCHREC_HKV_CUDA
  if (device.is_cuda()) {
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    HKV_CUDA_CHECK(cudaStreamIsCapturing(c10::cuda::getCurrentCUDAStream(device.index()), &status));
    return status != cudaStreamCaptureStatusNone;
  }
#endif
  return false;
}

}  // namespace torchrec_hkv::runtime
