// The clock of a group: the step of the present call, the pins, and the epoch. It lies in the
// memory of the device that runs the kernels, which alone knows the step: so a call needs nothing
// of the host's, and can be captured in a CUDA graph.
//
// A pin holds a step whose backward is still to come. It is named by a place among kMaxPins and a
// generation, counted up each time the place is taken. A release names both, and does nothing where
// the place has been taken again: so a release may be repeated, as a replayed graph does. It ends
// the earlier pins of its place, too: the host tells of the last one only, which the device may not
// have seen.
#pragma once

#include <cstdint>

#include "common/macros.h"

namespace torchrec_hkv::hash_table {

constexpr int kMaxPins = 64;

// The last step of free slots, and the step of free pins. It is later than any other, so that
// nobody takes a slot that is just being filled for the oldest of its bucket. On a CPU, where one
// thread fills a table, a free slot's last step may be anything: its memory has not been touched.
constexpr uint32_t kFreeStep = 0xFFFFFFFFu;

struct Clock {
  uint32_t now;          // the step of the last call that counted
  uint32_t epoch;        // for the epoch policies
  uint32_t pinned_from;  // the lower of `now` and the oldest pinned step
  uint32_t generations[kMaxPins];
  uint32_t pins[kMaxPins];  // steps; kFreeStep: none
};

// What a call does to the clock.
struct Tick {
  bool counts;                     // the step goes on
  uint64_t released;               // bit i: the pin in place i ends
  uint32_t generations[kMaxPins];  // of the last pins that ended
  int32_t pin;                     // place that the call's own step takes, or -1
  uint32_t generation;             // of that pin
};

// The step of the call, after the one before. It stays at the highest rather than begin again: a
// host counts with, and refuses the call; graphs that are replayed so often evict nothing any more.
HKV_HOST_DEVICE uint32_t next_step(uint32_t now, const Tick& tick) {
  return tick.counts && now < kFreeStep ? now + 1 : now;
}

HKV_HOST_DEVICE void release_pin(Clock& clock, int32_t place, uint32_t generation) {
  if (clock.generations[place] <= generation) clock.pins[place] = kFreeStep;
}

// Brings one pin up to date and returns its step.
HKV_HOST_DEVICE uint32_t tick_pin(Clock& clock, const Tick& tick, int32_t place, uint32_t now) {
  if (tick.released >> place & 1) release_pin(clock, place, tick.generations[place]);
  if (tick.pin == place) {
    clock.generations[place] = tick.generation;
    clock.pins[place] = now;
  }
  return clock.pins[place];
}

// What a call that touches ids knows besides them. Rows touched at or after pinned_from() belong to
// batches whose backward is still to come: they are never evicted.
struct Visit {
  const Clock* clock;      // nothing changes it during the call
  const uint64_t* scores;  // by position, see takes_scores; null: none given

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
  for (int32_t place = 0; place < kMaxPins; ++place) {
    const uint32_t pinned = tick_pin(clock, tick, place, clock.now);
    if (pinned < clock.pinned_from) clock.pinned_from = pinned;
  }
}

}  // namespace cpu
}  // namespace torchrec_hkv::hash_table
