// A second stream, for kernels of a call that can run beside others of it.
#pragma once

#ifdef TORCHREC_HKV_CUDA

#include <cuda_runtime.h>

namespace torchrec_hkv {

// From its construction until join(), or its end, work on stream() runs beside what is launched on
// the other. Before that it waits for what is there, and after that the other waits for it, so that
// memory of the other's may be used, and a CUDA graph that captures the other has both. Of one
// thread: each has streams and events of its own, on each device, until the process ends.
class SideStream {
 public:
  // beside: of the current device. goes_first: its blocks go before the other's, in graphs that are
  // made with priorities of nodes, as PyTorch's are, too.
  explicit SideStream(cudaStream_t beside, bool goes_first = true);
  ~SideStream();
  SideStream(const SideStream&) = delete;
  SideStream& operator=(const SideStream&) = delete;

  cudaStream_t stream() const;
  // What is launched on the other from here on waits for what is on stream() so far.
  void hold_other();
  void join();

 private:
  struct Kept;
  static Kept& kept();

  const cudaStream_t beside_;
  Kept& kept_;
  const cudaStream_t stream_;
  bool joined_ = false;
};

}  // namespace torchrec_hkv

#endif
