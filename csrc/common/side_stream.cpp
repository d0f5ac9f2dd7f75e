#include "common/side_stream.h"

#ifdef TORCHREC_HKV_CUDA

#include <map>

#include "common/cuda_check.h"

namespace torchrec_hkv {

struct SideStream::Kept {
  cudaStream_t first;  // its blocks are scheduled before others
  cudaStream_t in_turn;
  cudaEvent_t begin;
  cudaEvent_t held;
  cudaEvent_t end;
};

SideStream::Kept& SideStream::kept() {
  // Never destroyed: when a thread ends, the device may be gone, or kernels may still run.
  static thread_local auto* const by_device = new std::map<int, Kept>;
  int device = 0;
  HKV_CUDA_CHECK(cudaGetDevice(&device));
  const auto found = by_device->find(device);
  if (found != by_device->end()) return found->second;
  int least = 0, greatest = 0;
  HKV_CUDA_CHECK(cudaDeviceGetStreamPriorityRange(&least, &greatest));
  Kept kept{};
  HKV_CUDA_CHECK(cudaStreamCreateWithPriority(&kept.first, cudaStreamNonBlocking, greatest));
  HKV_CUDA_CHECK(cudaStreamCreateWithPriority(&kept.in_turn, cudaStreamNonBlocking, least));
  HKV_CUDA_CHECK(cudaEventCreateWithFlags(&kept.begin, cudaEventDisableTiming));
  HKV_CUDA_CHECK(cudaEventCreateWithFlags(&kept.held, cudaEventDisableTiming));
  HKV_CUDA_CHECK(cudaEventCreateWithFlags(&kept.end, cudaEventDisableTiming));
  return by_device->emplace(device, kept).first->second;
}

SideStream::SideStream(cudaStream_t beside, bool goes_first)
    : beside_(beside), kept_(kept()), stream_(goes_first ? kept_.first : kept_.in_turn) {
  HKV_CUDA_CHECK(cudaEventRecord(kept_.begin, beside_));
  HKV_CUDA_CHECK(cudaStreamWaitEvent(stream_, kept_.begin, 0));
}

SideStream::~SideStream() {
  if (joined_) return;
  // A call has failed before and its error is being thrown, so errors here are ignored.
  static_cast<void>(cudaEventRecord(kept_.end, stream_));
  static_cast<void>(cudaStreamWaitEvent(beside_, kept_.end, 0));
}

cudaStream_t SideStream::stream() const { return stream_; }

void SideStream::hold_other() {
  HKV_CUDA_CHECK(cudaEventRecord(kept_.held, stream_));
  HKV_CUDA_CHECK(cudaStreamWaitEvent(beside_, kept_.held, 0));
}

void SideStream::join() {
  joined_ = true;
  HKV_CUDA_CHECK(cudaEventRecord(kept_.end, stream_));
  HKV_CUDA_CHECK(cudaStreamWaitEvent(beside_, kept_.end, 0));
}

}  // namespace torchrec_hkv

#endif
