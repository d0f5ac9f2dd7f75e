// The host's part of a group's clock: the pins in use, and the changes that the next counted call
// must report to the device. The step itself is on the device (csrc/hash_table/clock.h).
#pragma once

#include <array>
#include <atomic>
#include <memory>
#include <mutex>
#include <optional>

#include "hash_table/clock.h"
#include "runtime/stream_order.h"
#include "runtime/tensor.h"

namespace torchrec_hkv::runtime {

class GroupClock;

// Keeps the rows of a lookup in place from find_or_insert to the backward. It ends with release()
// or when the last reference is dropped.
class Pin {
 public:
  Pin(std::shared_ptr<GroupClock> clock, int32_t pin_index, uint32_t generation)
      : clock_(std::move(clock)), index_(pin_index), generation_(generation) {}
  ~Pin();
  Pin(const Pin&) = delete;
  Pin& operator=(const Pin&) = delete;

  // The number by which ops name the pin. Unique in a group.
  int64_t number() const {
    return static_cast<int64_t>(generation_) * hash_table::kMaxPins + index_;
  }
  // Called when the work that needs the pin has been enqueued.
  void release();
  // TableGroup::growths() when the slots of the lookup were found.
  int64_t growths() const { return growths_; }
  void set_growths(int64_t growths) { growths_ = growths; }

 private:
  friend class GroupClock;
  const std::shared_ptr<GroupClock> clock_;
  const int32_t index_;
  const uint32_t generation_;
  std::atomic<int64_t> growths_ = 0;
};

class GroupClock : public std::enable_shared_from_this<GroupClock> {
 public:
  explicit GroupClock(at::Device device);

  // Creates a pin. It has no effect until a counted call takes it. Throws if all pins are in use.
  std::shared_ptr<Pin> pin();
  // The pin with this number. Throws ValueError if it is not in use.
  std::shared_ptr<Pin> find(int64_t number);

  // Reads the device's clock, and waits for the device.
  int64_t now();
  // The earliest step whose rows may still change without another lookup: the step of the oldest
  // lookup whose backward has not run, otherwise the next step. Lookups without a pin have no
  // backward. Waits for the device.
  int64_t first_open_step();
  // Throws if a backward has not run, because it would write to slots that then have other ids.
  void set(int64_t now);
  // Sets the clock to at least this step.
  void set_at_least(int64_t now);
  // epoch: from 0 to 2^32 - 1. Does not wait for the device.
  void set_epoch(int64_t epoch);

 private:
  friend class Pin;
  friend class CountedCall;

  struct PinSlot {
    uint32_t generation = 0;
    std::weak_ptr<Pin> pin;  // the place is free if the pin is expired or released
    bool in_use = false;
    bool captured = false;  // a CUDA graph takes the pin in each replay: never free again
  };

  hash_table::Clock* data() const;
  void write(int64_t word, int64_t value);
  void write_now(int64_t now);
  // The tick of the next call. Clears the list of released pins.
  hash_table::Tick next(const std::optional<int64_t>& pin, bool counts);
  bool captured(const Pin& pin);
  // reported: whether the next counted call reports the end to the device.
  void end(const Pin& pin, bool reported);

  const at::Device device_;
  const at::Tensor clock_;  // the bytes of a Clock
  mutable std::mutex mutex_;
  std::array<PinSlot, hash_table::kMaxPins> pin_slots_;
  uint64_t released_ = 0;  // places whose pins ended since the last counted call
  std::array<uint32_t, hash_table::kMaxPins> released_generations_{};
  int64_t counted_ = 0;  // the device's step, without replays of graphs
};

// One counted call. Construct it when only the call itself can still fail. On a CPU the constructor
// advances the clock, and the visit keeps its value even if other threads advance it; on a GPU the
// call's first kernel advances the clock.
class CountedCall {
 public:
  // counts: false if the call belongs to the current step and only ends pins.
  CountedCall(GroupClock& clock, const std::optional<int64_t>& pin, bool counts = true);

  hash_table::CallContext context(const uint64_t* scores) const {
    return hash_table::CallContext{on_cpu_ ? &snapshot_ : clock_, scores};
  }
  // Rows of pins that end may be replaced, so work that needs them must come first. Rows of other
  // pins stay in place, so their lookups and backwards need not wait for the call.
  AccessSet use(bool inserts) const {
    return AccessSet{Access::kWrite, inserts ? Access::kWrite : Access::kNone,
                     tick_.released != 0 ? Access::kFollow : Access::kNone};
  }
  hash_table::Clock* clock() const { return clock_; }
  const hash_table::Tick& tick() const { return tick_; }

 private:
  hash_table::Clock* clock_;
  hash_table::Tick tick_;
  hash_table::Clock snapshot_;
  bool on_cpu_;
};

}  // namespace torchrec_hkv::runtime
