#include "common/side_stream.h"

#ifdef TORCHREC_HKV_CUDA

#include <map>

#include "common/cuda_check.h"

namespace torchrec_hkv {

struct SideStream::ThreadStreams {
  cudaStream_t high_priority;  // its blocks are scheduled before others
  cudaStream_t low_priority;
  cudaEvent_t begin;
  cudaEvent_t delayed;
  cudaEvent_t end;
};

SideStream::ThreadStreams& SideStream::streams() {
  // Never destroyed: when a thread ends, the device may be gone, or kernels may still run.
  static thread_local auto* const by_device = new std::map<int, ThreadStreams>;
  int device = 0;
  HKV_CUDA_CHECK(cudaGetDevice(&device));
  const auto found = by_device->find(device);
  if (found != by_device->end()) return found->second;
  int least = 0, greatest = 0;
  HKV_CUDA_CHECK(cudaDeviceGetStreamPriorityRange(&least, &greatest));
  ThreadStreams streams{};
  HKV_CUDA_CHECK(
      cudaStreamCreateWithPriority(&streams.high_priority, cudaStreamNonBlocking, greatest));
  HKV_CUDA_CHECK(cudaStreamCreateWithPriority(&streams.low_priority, cudaStreamNonBlocking, least));
  HKV_CUDA_CHECK(cudaEventCreateWithFlags(&streams.begin, cudaEventDisableTiming));
  HKV_CUDA_CHECK(cudaEventCreateWithFlags(&streams.delayed, cudaEventDisableTiming));
  HKV_CUDA_CHECK(cudaEventCreateWithFlags(&streams.end, cudaEventDisableTiming));
  return by_device->emplace(device, streams).first->second;
}

SideStream::SideStream(cudaStream_t main_stream, bool high_priority)
    : main_stream_(main_stream),
      streams_(streams()),
      stream_(high_priority ? streams_.high_priority : streams_.low_priority) {
  HKV_CUDA_CHECK(cudaEventRecord(streams_.begin, main_stream_));
  HKV_CUDA_CHECK(cudaStreamWaitEvent(stream_, streams_.begin, 0));
}

SideStream::~SideStream() {
  if (joined_) return;
  // A call has failed before and its error is being thrown, so errors here are ignored.
  static_cast<void>(cudaEventRecord(streams_.end, stream_));
  static_cast<void>(cudaStreamWaitEvent(main_stream_, streams_.end, 0));
}

cudaStream_t SideStream::stream() const { return stream_; }

void SideStream::delay_main() {
  HKV_CUDA_CHECK(cudaEventRecord(streams_.delayed, stream_));
  HKV_CUDA_CHECK(cudaStreamWaitEvent(main_stream_, streams_.delayed, 0));
}

void SideStream::join() {
  joined_ = true;
  HKV_CUDA_CHECK(cudaEventRecord(streams_.end, stream_));
  HKV_CUDA_CHECK(cudaStreamWaitEvent(main_stream_, streams_.end, 0));
}

}  // namespace torchrec_hkv

#endif
