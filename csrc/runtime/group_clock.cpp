#include "runtime/group_clock.h"

#include <c10/core/DeviceGuard.h>

#include <algorithm>
#include <cstddef>
#include <limits>

#include "hash_table/kernels.h"
#include "runtime/capture.h"
#include "runtime/on_device.h"

namespace torchrec_hkv::runtime {
namespace {

using hash_table::Clock;
using hash_table::kMaxPins;
using hash_table::Tick;

constexpr int64_t kLastStep = std::numeric_limits<uint32_t>::max();
constexpr int64_t kWords = sizeof(Clock) / sizeof(int32_t);

at::Tensor new_clock(at::Device device) {
  at::Tensor clock = at::zeros({kWords}, at::dtype(at::kInt));
  auto* first = static_cast<Clock*>(clock.data_ptr());
  std::fill_n(first->pins, kMaxPins, hash_table::kFreeStep);
  return clock.to(device);
}

}  // namespace

Pin::~Pin() { clock_->end(*this, true); }

void Pin::release() {
  // A captured backward ends its pin in its graph, because the host does not see replays.
  const bool in_graph = is_capturing(clock_->device_) && clock_->captured(*this);
#ifdef TORCHREC_HKV_CUDA
  if (in_graph) {
    HKV_ON_DEVICE(clock_->device_, (void)0,
                  hash_table::cuda::release(clock_->data(), index_, generation_, stream));
  }
#endif
  clock_->end(*this, !in_graph);
}

GroupClock::GroupClock(at::Device device) : device_(device), clock_(new_clock(device)) {}

Clock* GroupClock::data() const { return static_cast<Clock*>(clock_.data_ptr()); }

std::shared_ptr<Pin> GroupClock::pin() {
  std::lock_guard<std::mutex> lock(mutex_);
  int waiting = 0, captured_before = 0;
  for (int32_t at = 0; at < kMaxPins; ++at) {
    PinSlot& pin_index = pin_slots_[at];
    captured_before += pin_index.captured;
    waiting += pin_index.in_use && !pin_index.captured;
    if (pin_index.in_use || pin_index.captured) continue;
    pin_index.in_use = true;
    ++pin_index.generation;
    auto pin = std::make_shared<Pin>(shared_from_this(), at, pin_index.generation);
    pin_index.pin = pin;
    return pin;
  }
  TORCH_CHECK(false, waiting, " lookups of this group wait for their backward, and ",
              captured_before, " belong to CUDA graphs, but it can keep the rows of at most ",
              kMaxPins, " in place; run a backward, or drop what needs none.");
}

std::shared_ptr<Pin> GroupClock::find(int64_t number) {
  std::shared_ptr<Pin> pin;  // declared before the lock, because its destructor takes the lock
  std::lock_guard<std::mutex> lock(mutex_);
  const bool in_use = number >= 0 && pin_slots_[number % kMaxPins].in_use;
  if (in_use) pin = pin_slots_[number % kMaxPins].pin.lock();
  TORCH_CHECK_VALUE(pin != nullptr && pin->number() == number, "pin is ", number,
                    ", but this group holds no such pin; it may have ended with its backward.");
  return pin;
}

bool GroupClock::captured(const Pin& pin) {
  std::lock_guard<std::mutex> lock(mutex_);
  return pin_slots_[pin.index_].captured;
}

void GroupClock::end(const Pin& pin, bool reported) {
  std::lock_guard<std::mutex> lock(mutex_);
  PinSlot& pin_index = pin_slots_[pin.index_];
  if (!pin_index.in_use || pin_index.generation != pin.generation_) return;  // has already ended
  pin_index.in_use = false;
  if (!reported) return;
  released_ |= uint64_t{1} << pin.index_;
  released_generations_[pin.index_] = pin.generation_;
}

Tick GroupClock::next(const std::optional<int64_t>& pin, bool counts) {
  Tick tick{};
  tick.counts = counts;
  tick.pin = -1;
  if (pin) {
    tick.pin = static_cast<int32_t>(*pin % kMaxPins);
    tick.generation = static_cast<uint32_t>(*pin / kMaxPins);
  }
  const bool capturing = is_capturing(device_);
  std::lock_guard<std::mutex> lock(mutex_);
  TORCH_CHECK(!counts || counted_ < kLastStep, "a table counts at most 2^32 - 1 calls.");
  tick.released = released_;
  std::copy(released_generations_.begin(), released_generations_.end(), tick.generations);
  if (capturing) {
    // Released pins stay in the list: the graph may be replayed late or never.
    if (pin) pin_slots_[tick.pin].captured = true;
    return tick;
  }
  released_ = 0;
  counted_ += counts;
  return tick;
}

int64_t GroupClock::now() {
  return clock_.select(0, offsetof(Clock, now) / sizeof(int32_t)).item<int64_t>() & kLastStep;
}

int64_t GroupClock::first_open_step() {
  // Set before the device is read: a pin that ends meanwhile counts as waiting.
  bool waiting = false;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    for (const PinSlot& pin_index : pin_slots_)
      waiting = waiting || pin_index.in_use || pin_index.captured;
  }
  const at::Tensor copy = clock_.cpu();
  const auto* clock = static_cast<const Clock*>(copy.const_data_ptr());
  if (!waiting) return int64_t{clock->now} + 1;
  return std::min(clock->now, *std::min_element(clock->pins, clock->pins + kMaxPins));
}

void GroupClock::write(int64_t word, int64_t value) {
  const at::AutoDispatchBelowADInplaceOrView below;  // in case the clock is an inference tensor
  clock_.select(0, word).fill_(static_cast<int32_t>(static_cast<uint32_t>(value)));
}

void GroupClock::write_now(int64_t now) {
  write(offsetof(Clock, now) / sizeof(int32_t), now);
  std::lock_guard<std::mutex> lock(mutex_);
  counted_ = now;
}

void GroupClock::set(int64_t now) {
  TORCH_CHECK_VALUE(now >= 0 && now <= kLastStep, "the clock is ", now,
                    ", but must be from 0 to 2^32 - 1.");
  {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto waiting = std::count_if(pin_slots_.begin(), pin_slots_.end(),
                                       [](const PinSlot& pin_index) { return pin_index.in_use; });
    TORCH_CHECK_VALUE(waiting == 0, "a table can't be loaded while the backward of ", waiting,
                      " lookups has not run: run it, or delete the outputs, first.");
  }
  write_now(now);
}

void GroupClock::set_at_least(int64_t now) { write_now(std::max(now, this->now())); }

void GroupClock::set_epoch(int64_t epoch) {
  write(offsetof(Clock, epoch) / sizeof(int32_t), epoch);
}

CountedCall::CountedCall(GroupClock& clock, const std::optional<int64_t>& pin, bool counts)
    : clock_(clock.data()), tick_(clock.next(pin, counts)), on_cpu_(clock.device_.is_cpu()) {
  if (!on_cpu_) return;
  std::lock_guard<std::mutex> lock(clock.mutex_);
  hash_table::cpu::tick(*clock_, tick_);
  snapshot_ = *clock_;
}

}  // namespace torchrec_hkv::runtime
