// HBM as a cache of rows that lie in host memory: where a table's rows don't all fit, every slot
// has its row and its state in host memory, and some have them in a *frame* of HBM. Only the frame
// is then up to date, until it is written home.
//
// Frames come in sets of four. A set serves a run of neighbouring slots: slot s belongs to set
// s * num_sets / num_slots, rounded down. A word of 64 bits a set holds four *tags*, each of which
// says whether its frame is taken, whether it differs from what is at home (is *dirty*), and the
// low bits of its slot. So one compare-and-swap finds out that a slot has no frame and gives it
// one: there are no locks, and no slot gets two.
//
// A frame is never taken from a row that is pinned or that the present call has touched. So a
// backward finds the rows of its batch where they are, even beside a call that moves others. Of a
// row that found no frame, its set keeps the step (`crowded`): it may be written at home by a
// backward that is still to come, and until then no row of the set comes from there.
#pragma once

#include <cstdint>

#include "common/macros.h"

namespace torchrec_hkv::hash_table {

constexpr int64_t kNoFrame = -1;
constexpr int kFramesOfSet = 4;
constexpr int kTagBits = 16;
constexpr uint32_t kTagTaken = 0x8000, kTagDirty = 0x4000, kTagSlot = 0x3fff;
// Fewer than the low bits of a slot tell apart, with room for rounding.
constexpr int64_t kMostSlotsOfSet = 16000;
// Of a set, beside its frames: the tags and the step.
constexpr int64_t kSetBytes = sizeof(uint64_t) + sizeof(uint32_t);

struct Frames {
  unsigned long long* tags;  // [num_sets]; null: the table has its rows in one memory
  uint32_t* crowded;         // [num_sets]
  uint64_t sets_of_slots;    // num_sets / num_slots, times 2^64
  int64_t num_slots;
  int64_t num_sets;

  HKV_HOST_DEVICE int64_t set_of(int64_t slot) const {
#ifdef __CUDA_ARCH__
    return static_cast<int64_t>(__umul64hi(static_cast<uint64_t>(slot), sets_of_slots));
#else
    return static_cast<int64_t>(
        static_cast<unsigned __int128>(static_cast<uint64_t>(slot)) * sets_of_slots >> 64);
#endif
  }
  // The first slot of a set; num_slots for num_sets.
  HKV_HOST_DEVICE int64_t first_slot(int64_t set) const {
    // Off by one at most, as a double holds 53 bits and slots are below 2^38.
    int64_t slot = static_cast<int64_t>(static_cast<double>(set) *
                                        (static_cast<double>(num_slots) / num_sets));
    if (slot > num_slots) slot = num_slots;
    while (slot > 0 && set_of(slot - 1) >= set) --slot;
    while (slot < num_slots && set_of(slot) < set) ++slot;
    return slot;
  }
  HKV_HOST_DEVICE static uint32_t tag_of(int64_t slot) {
    return kTagTaken | (static_cast<uint32_t>(slot) & kTagSlot);
  }
  // The slot of a tag in a set that begins with the slot `first`.
  HKV_HOST_DEVICE static int64_t slot_of(int64_t first, uint32_t tag) {
    return first + ((tag - static_cast<uint32_t>(first)) & kTagSlot);
  }
  HKV_HOST_DEVICE static uint32_t tag_at(uint64_t tags, int place) {
    return static_cast<uint32_t>(tags >> place * kTagBits) & 0xffff;
  }
  // Which frame of its set a slot has, or -1.
  HKV_HOST_DEVICE static int place_of(uint64_t tags, int64_t slot) {
    const uint32_t wanted = tag_of(slot);
    for (int place = 0; place < kFramesOfSet; ++place) {
      if ((tag_at(tags, place) & ~kTagDirty) == wanted) return place;
    }
    return -1;
  }
  HKV_HOST_DEVICE uint64_t load_tags(int64_t set) const {
#ifdef __CUDA_ARCH__
    return __ldcg(&tags[set]);  // other multiprocessors may change other tags of the word
#else
    return tags[set];
#endif
  }
  // The frame of a slot, or kNoFrame.
  HKV_HOST_DEVICE int64_t frame_of(int64_t slot) const {
    if (tags == nullptr) return kNoFrame;
    const int64_t set = set_of(slot);
    const int place = place_of(load_tags(set), slot);
    return place < 0 ? kNoFrame : set * kFramesOfSet + place;
  }
};

// Frames of a table of so many slots whose rows, with state, take row_bytes each, in so many bytes
// of HBM: num_slots where they all fit, otherwise a multiple of kFramesOfSet; none where they would
// be too few for a set to serve its slots.
inline int64_t frames_that_fit(int64_t num_slots, int64_t row_bytes, int64_t bytes) {
  if (bytes >= num_slots * row_bytes) return num_slots;
  const int64_t sets = bytes <= 0 ? 0 : bytes / (kFramesOfSet * row_bytes + kSetBytes);
  return sets * kMostSlotsOfSet < num_slots ? 0 : sets * kFramesOfSet;
}

}  // namespace torchrec_hkv::hash_table
