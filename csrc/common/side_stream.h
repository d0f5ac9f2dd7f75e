// A second stream, for kernels of a call that can run concurrently with the others.
#pragma once

#ifdef TORCHREC_HKV_CUDA

#include <cuda_runtime.h>

namespace torchrec_hkv {

// From construction until join() or destruction, work on stream() runs concurrently with the main
// stream. It first waits for earlier work on the main stream, and at the end the main stream waits
// for it. So it may use the main stream's memory, and a CUDA graph that captures the main stream
// captures both. Each thread has its own streams and events on each device, until the process ends.
class SideStream {
 public:
  // main_stream: the main stream, of the current device. high_priority: blocks of stream() are
  // scheduled before the main stream's, also in graphs that keep node priorities, as PyTorch's do.
  explicit SideStream(cudaStream_t main_stream, bool high_priority = true);
  ~SideStream();
  SideStream(const SideStream&) = delete;
  SideStream& operator=(const SideStream&) = delete;

  cudaStream_t stream() const;
  // Makes later launches on the main stream wait for the present work on stream().
  void delay_main();
  void join();

 private:
  struct ThreadStreams;
  static ThreadStreams& streams();

  const cudaStream_t main_stream_;
  ThreadStreams& streams_;
  const cudaStream_t stream_;
  bool joined_ = false;
};

}  // namespace torchrec_hkv

#endif
