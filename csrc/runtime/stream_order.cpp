#include "runtime/stream_order.h"

#include <algorithm>
#include <exception>

#include "runtime/capture.h"

namespace torchrec_hkv::runtime {

StreamOrder::EnqueueScope::EnqueueScope(StreamOrder& order, const AccessSet& use, bool moves)
    : order_(order), use_(use), moves_(moves), exceptions_(std::uncaught_exceptions()) {
#ifdef TORCHREC_HKV_CUDA
  order_.begin(use_, moves_);
#endif
}

// May throw like other parts of a call, unless another exception is being thrown.
StreamOrder::EnqueueScope::~EnqueueScope() noexcept(false) {
#ifdef TORCHREC_HKV_CUDA
  if (std::uncaught_exceptions() == exceptions_) order_.end(use_, moves_);
#endif
}

#ifndef TORCHREC_HKV_CUDA

StreamOrder::StreamOrder(c10::Device device) : device_(device) {}
StreamOrder::~StreamOrder() = default;
void StreamOrder::begin_moves() {}

#else

namespace {

cudaStream_t current_stream(c10::Device device) {
  return c10::cuda::getCurrentCUDAStream(device.index());
}

constexpr size_t kIndexPart = 0, kRowsPart = 1;

}  // namespace

struct StreamOrder::Event {
  Event() { HKV_CUDA_CHECK(cudaEventCreateWithFlags(&event, cudaEventDisableTiming)); }
  ~Event() { (void)cudaEventDestroy(event); }  // at exit the driver may be gone
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;
  cudaEvent_t event = nullptr;
};

StreamOrder::StreamOrder(c10::Device device) : device_(device) {
  if (device.is_cuda()) first_ = current_stream(device);
}

StreamOrder::~StreamOrder() {
  if (!multiple_streams_) return;
  // Errors are not checked: the driver may be gone at exit. No wait is needed while the stream is
  // captured, because its graph frees nothing.
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  if (cudaStreamIsCapturing(first_, &status) != cudaSuccess ||
      status != cudaStreamCaptureStatusNone) {
    (void)cudaGetLastError();
    return;
  }
  for (const AccessHistory& part : parts_) {
    for (const std::vector<StreamMark>* marks : {&part.writes, &part.reads}) {
      for (const StreamMark& mark : *marks) {
        if (mark.stream != first_) (void)cudaStreamWaitEvent(first_, mark.event->event, 0);
      }
    }
  }
  (void)cudaGetLastError();
}

std::shared_ptr<StreamOrder::Event> StreamOrder::record(cudaStream_t stream) {
  auto free = std::find_if(events_.begin(), events_.end(), [](const std::shared_ptr<Event>& event) {
    return event.use_count() == 1;
  });
  if (free == events_.end()) free = events_.insert(free, std::make_shared<Event>());
  HKV_CUDA_CHECK(cudaEventRecord((*free)->event, stream));
  return *free;
}

void StreamOrder::begin(const AccessSet& use, bool moves) {
  moving_ = false;
  const cudaStream_t stream = current_stream(device_);
  if (!multiple_streams_ && stream == first_) return;  // saves calls of the driver, which take time
  if (is_capturing(device_)) return;
  if (!multiple_streams_) {
    multiple_streams_ = true;
    // All work on the first stream so far counts as a write of everything.
    const std::shared_ptr<Event> event = record(first_);
    for (AccessHistory& part : parts_) part.writes = {StreamMark{first_, event}};
  }
  for (size_t p = 0; p < parts_.size(); ++p) {
    const Access access = use.parts()[p];
    // A call that moves rows waits for earlier moves only when it begins its own.
    const bool later = moves && p == kRowsPart;
    if (access != Access::kNone) wait(parts_[p].writes, later);
    if (access == Access::kWrite || access == Access::kFollow) wait(parts_[p].reads);
  }
}

void StreamOrder::wait(const std::vector<StreamMark>& marks, bool except_moves) {
  const cudaStream_t stream = current_stream(device_);
  for (const StreamMark& mark : marks) {
    if (mark.stream == stream || (except_moves && mark.moves)) continue;
    HKV_CUDA_CHECK(cudaStreamWaitEvent(stream, mark.event->event, 0));
  }
}

void StreamOrder::begin_moves() {
  if (!multiple_streams_ || is_capturing(device_)) return;
  const cudaStream_t stream = current_stream(device_);
  parts_[kIndexPart].writes = {StreamMark{stream, record(stream)}};
  parts_[kIndexPart].reads.clear();
  moving_ = true;
  wait(parts_[kRowsPart].writes);
}

void StreamOrder::end(const AccessSet& use, bool moves) {
  if (!multiple_streams_ || is_capturing(device_)) return;
  const cudaStream_t stream = current_stream(device_);
  const StreamMark mark{stream, record(stream), moves && moving_};
  for (size_t p = 0; p < parts_.size(); ++p) {
    AccessHistory& part = parts_[p];
    if (p == kIndexPart && moving_) continue;
    switch (use.parts()[p]) {
      case Access::kWrite:
        part.writes = {mark};
        part.reads.clear();
        break;
      case Access::kRead: {
        const auto is_own_stream = [&](const StreamMark& read) { return read.stream == stream; };
        part.reads.erase(std::remove_if(part.reads.begin(), part.reads.end(), is_own_stream),
                         part.reads.end());
        part.reads.push_back(mark);
        break;
      }
      case Access::kNone:
      case Access::kFollow:
        break;
    }
  }
}

#endif

}  // namespace torchrec_hkv::runtime
