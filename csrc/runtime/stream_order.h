// Orders a group's calls in several threads (call_lock.h) and on several CUDA streams. Events order
// conflicting calls on streams, so the host does not wait for the device. Readers run together; a
// writer runs alone. As long as a group has used only one stream, no events are recorded.
//
// Calls that are captured in a CUDA graph are not ordered with calls outside: the caller orders the
// replay (docs/concepts/ordering.md).
#pragma once

#include <c10/core/Device.h>
#include <c10/core/DeviceGuard.h>

#include <array>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "runtime/call_lock.h"

#ifdef TORCHREC_HKV_CUDA
#include <cuda_runtime.h>
#endif

namespace torchrec_hkv::runtime {

class StreamOrder {
 public:
  // The group's memory belongs to the current stream, as in PyTorch's allocator.
  explicit StreamOrder(c10::Device device);
  // Makes later work of the constructor's stream wait for all calls.
  ~StreamOrder();
  StreamOrder(const StreamOrder&) = delete;
  StreamOrder& operator=(const StreamOrder&) = delete;

  // Waits for conflicting calls of other threads, makes the current stream wait for conflicting
  // work, and calls enqueue(), which launches on that stream. On a GPU threads take turns, so that
  // the launches of one call stay together. Must not be nested.
  template <typename Enqueue>
  auto run(const AccessSet& use, Enqueue&& enqueue) {
    const CallLock::Call call(calls_, use);
    if (!device_.is_cuda()) return enqueue();
    const std::lock_guard<std::mutex> lock(mutex_);
    const c10::OptionalDeviceGuard guard(device_);
    const EnqueueScope turn(*this, use);
    return enqueue();
  }
  // The same for a call that first writes the index and then moves rows: enqueue(moves_begin) calls
  // moves_begin() in between. The next such call on another stream can then run up to its own moves
  // while this call's rows move.
  template <typename Enqueue>
  auto run_and_move(const AccessSet& use, Enqueue&& enqueue) {
    const CallLock::Call call(calls_, use);
    const std::function<void()> moves_begin = [this] { begin_moves(); };
    if (!device_.is_cuda()) return enqueue(moves_begin);
    const std::lock_guard<std::mutex> lock(mutex_);
    const c10::OptionalDeviceGuard guard(device_);
    const EnqueueScope turn(*this, use, /*moves=*/true);
    return enqueue(moves_begin);
  }

  // Holds the group over several calls of this thread; see CallLock.
  void hold(Hold kind) { calls_.hold(kind); }
  void release(Hold kind) { calls_.release(kind); }

 private:
  // A call enqueues its work between construction and destruction.
  class EnqueueScope {
   public:
    EnqueueScope(StreamOrder& order, const AccessSet& use, bool moves = false);
    ~EnqueueScope() noexcept(false);

   private:
    [[maybe_unused]] StreamOrder& order_;
    [[maybe_unused]] const AccessSet use_;
    [[maybe_unused]] const bool moves_;
    [[maybe_unused]] const int exceptions_;
  };

  void begin_moves();

  const c10::Device device_;
  CallLock calls_;
  std::mutex mutex_;
#ifdef TORCHREC_HKV_CUDA
  struct Event;
  struct StreamMark {  // the work of a stream up to an event
    cudaStream_t stream;
    std::shared_ptr<Event> event;
    bool moves = false;  // whether the work includes moves of run_and_move
  };
  struct AccessHistory {
    std::vector<StreamMark> writes;  // the last write, if any
    std::vector<StreamMark> reads;   // later reads, at most one per stream
  };

  std::shared_ptr<Event> record(cudaStream_t stream);
  void wait(const std::vector<StreamMark>& marks, bool except_moves = false);
  void begin(const AccessSet& use, bool moves);
  void end(const AccessSet& use, bool moves);

  cudaStream_t first_ = nullptr;
  bool multiple_streams_ = false;  // whether several streams have been used
  bool moving_ = false;            // whether the current call has written and marked its index
  std::array<AccessHistory, 3> parts_;
  std::vector<std::shared_ptr<Event>> events_;  // reused once no mark refers to them
#endif
};

}  // namespace torchrec_hkv::runtime

// Runs one of two calls on a group, in order with its other calls. See HKV_ON_DEVICE.
#define HKV_ON_GROUP(group, use, cpu_call, cuda_call) \
  (group).order().run(use, [&] { HKV_ON_DEVICE((group).device(), cpu_call, cuda_call) })
