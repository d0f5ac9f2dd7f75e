// The clock of a group: the step of the present call, the pins and the epoch. It is in the memory
// of the device that runs the kernels, and only the device knows the step. So a call needs nothing
// from the host and can be captured in a CUDA graph.
//
// A pin keeps the rows of a step whose backward has not run. A pin_index among kMaxPins and a
// generation identify it; the generation is incremented each time the pin_index is taken. A release
// gives both. It does nothing if the pin_index has been taken again, so it may be repeated, as a
// replayed graph does. It also ends earlier pins of its pin_index: the host reports only the last
// one, and the device may not have seen the others.
#pragma once

#include <cstdint>

#include "common/macros.h"

namespace torchrec_hkv::hash_table {

constexpr int kMaxPins = 64;

// The last step of free slots, and the step of free pins. It is higher than any other step, so that
// no thread mistakes a slot that is being filled for the oldest of its bucket. On a CPU one thread
// fills a table, and a free slot's last step may have any value: its memory has not been touched.
constexpr uint32_t kFreeStep = 0xFFFFFFFFu;

struct Clock {
  uint32_t now;          // the step of the last counted call
  uint32_t epoch;        // for the epoch policies
  uint32_t pinned_from;  // the lower of `now` and the oldest pinned step
  uint32_t generations[kMaxPins];
  uint32_t pins[kMaxPins];  // steps; kFreeStep: none
};

// The effect of a call on the clock.
struct Tick {
  bool counts;                     // the step advances
  uint64_t released;               // bit i: the pin in pin_index i ends
  uint32_t generations[kMaxPins];  // of the last pins that ended
  int32_t pin;                     // pin_index of the call's own pin, or -1
  uint32_t generation;             // of that pin
};

// Returns the step of the call. It stays at its maximum instead of wrapping: the host counts too
// and refuses the call; graphs that are replayed that often no longer evict.
HKV_HOST_DEVICE uint32_t next_step(uint32_t now, const Tick& tick) {
  return tick.counts && now < kFreeStep ? now + 1 : now;
}

HKV_HOST_DEVICE void release_pin(Clock& clock, int32_t pin_index, uint32_t generation) {
  if (clock.generations[pin_index] <= generation) clock.pins[pin_index] = kFreeStep;
}

// Updates one pin and returns its step.
HKV_HOST_DEVICE uint32_t tick_pin(Clock& clock, const Tick& tick, int32_t pin_index, uint32_t now) {
  if (tick.released >> pin_index & 1) release_pin(clock, pin_index, tick.generations[pin_index]);
  if (tick.pin == pin_index) {
    clock.generations[pin_index] = tick.generation;
    clock.pins[pin_index] = now;
  }
  return clock.pins[pin_index];
}

// Context of a call that touches ids. Rows touched at or after pinned_from() belong to batches
// whose backward has not run. They are never evicted.
struct CallContext {
  const Clock* clock;      // constant during the call
  const uint64_t* scores;  // by position, see takes_scores; null: none

  HKV_HOST_DEVICE uint32_t now() const { return clock->now; }
  HKV_HOST_DEVICE uint32_t pinned_from() const { return clock->pinned_from; }
  HKV_HOST_DEVICE uint32_t epoch() const { return clock->epoch; }
  HKV_HOST_DEVICE uint64_t given(int64_t position) const {
    return scores != nullptr ? scores[position] : 1;
  }
};

namespace cpu {

inline void tick(Clock& clock, const Tick& tick) {
  clock.now = clock.pinned_from = next_step(clock.now, tick);
  for (int32_t pin_index = 0; pin_index < kMaxPins; ++pin_index) {
    const uint32_t pinned = tick_pin(clock, tick, pin_index, clock.now);
    if (pinned < clock.pinned_from) clock.pinned_from = pinned;
  }
}

}  // namespace cpu
}  // namespace torchrec_hkv::hash_table
