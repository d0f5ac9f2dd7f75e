// HBM as a cache of rows that lie in host memory: where a table's rows don't all fit, every slot
// has its row and its state in host memory, and some have them in a *frame* of HBM. Only the frame
// is then up to date, until it is written home.
//
// Narrow states, of a few bytes a row, stay in HBM for all slots and never move: the link takes as
// long for four bytes at a place of their own as for a piece of a row. See kNarrowState.
//
// Frames come in sets of four. A set serves the slots s with s mod num_sets = its number; num_sets
// has no divisor in common with the slots of a bucket, so that a set's slots stand at all positions
// of buckets, whose first ones are full earlier. A word of 64 bits a set holds four *tags*, each of
// which says whether its frame is taken, whether it differs from what is at home (is *dirty*),
// whether its row was touched again since it came, and which of the set's slots it is. So one
// compare-and-swap finds out that a slot has no frame and gives it one: there are no locks, and no
// slot gets two.
//
// A frame is never taken from a row that is pinned or that the present call has touched. So a
// backward finds the rows of its batch where they are, even beside a call that moves others. Of a
// row that found no frame, its set keeps the step (`crowded`): it may be written at home by a
// backward that is still to come, and until then no row of the set comes from there.
#pragma once

#include <cstdint>
#include <numeric>

#include "common/macros.h"

namespace torchrec_hkv::hash_table {

constexpr int64_t kNoFrame = -1;
constexpr int kFramesOfSet = 4;
constexpr int kTagBits = 16;
constexpr uint32_t kTagTaken = 0x8000, kTagDirty = 0x4000, kTagAgain = 0x2000, kTagSlot = 0x1fff;
constexpr int64_t kMostSlotsOfSet = kTagSlot;
// Of a set, beside its frames: the tags and the step.
constexpr int64_t kSetBytes = sizeof(uint64_t) + sizeof(uint32_t);

struct Frames {
  unsigned long long* tags;  // [num_sets]; null: the table has its rows in one memory
  uint32_t* crowded;         // [num_sets]
  uint64_t reciprocal;       // 2^64 / num_sets, rounded down
  int64_t num_slots;
  int64_t num_sets;  // at least 2

  // Where a slot has its frame, if it has one.
  struct Home {
    int64_t set;
    uint32_t number;  // of the slot, in the set
  };
  HKV_HOST_DEVICE Home home_of(int64_t slot) const {
#ifdef __CUDA_ARCH__
    uint64_t number = __umul64hi(static_cast<uint64_t>(slot), reciprocal);
#else
    uint64_t number = static_cast<uint64_t>(
        static_cast<unsigned __int128>(static_cast<uint64_t>(slot)) * reciprocal >> 64);
#endif
    int64_t set = slot - static_cast<int64_t>(number) * num_sets;
    if (set >= num_sets) {  // the reciprocal was rounded
      set -= num_sets;
      ++number;
    }
    return Home{set, static_cast<uint32_t>(number)};
  }
  HKV_HOST_DEVICE int64_t slot_of(int64_t set, uint32_t tag) const {
    return static_cast<int64_t>(tag & kTagSlot) * num_sets + set;
  }
  HKV_HOST_DEVICE static uint32_t tag_at(uint64_t tags, int place) {
    return static_cast<uint32_t>(tags >> place * kTagBits) & 0xffff;
  }
  // Which frame of its set the slot with this number there has, or -1.
  HKV_HOST_DEVICE static int place_of(uint64_t tags, uint32_t number) {
    for (int place = 0; place < kFramesOfSet; ++place) {
      if ((tag_at(tags, place) & (kTagTaken | kTagSlot)) == (kTagTaken | number)) return place;
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
    const Home home = home_of(slot);
    const int place = place_of(load_tags(home.set), home.number);
    return place < 0 ? kNoFrame : home.set * kFramesOfSet + place;
  }
};

// Frames of a table of so many slots, in buckets of bucket_slots, where a frame takes frame_bytes,
// in so many bytes of HBM: a multiple of kFramesOfSet, none where they would be too few for a set
// to serve its slots.
inline int64_t frames_that_fit(int64_t num_slots, int64_t bucket_slots, int64_t frame_bytes,
                               int64_t bytes) {
  int64_t sets = bytes <= 0 ? 0 : bytes / (kFramesOfSet * frame_bytes + kSetBytes);
  while (std::gcd(sets, bucket_slots) > 1) --sets;
  return sets < 2 || sets * kMostSlotsOfSet < num_slots ? 0 : sets * kFramesOfSet;
}

// What of a table's rows and states is in HBM.
struct HbmShare {
  int64_t slots;    // the table's, where all fit; otherwise frames, or none
  bool all_states;  // the states of all slots are, though not all rows
};

// States of at most so many bytes are narrow.
constexpr int64_t kNarrowState = 16;

// In so many bytes of HBM, beside the index. Narrow states of all slots have at most half of them:
// where they take more, rows are as short, or frames as few, that states had better move with rows.
inline HbmShare share_that_fits(int64_t num_slots, int64_t bucket_slots, int64_t row_bytes,
                                int64_t state_bytes, int64_t bytes) {
  if (bytes >= num_slots * (row_bytes + state_bytes)) return {num_slots, false};
  const int64_t states = num_slots * state_bytes;
  if (state_bytes > 0 && state_bytes <= kNarrowState && states <= bytes / 2) {
    const int64_t frames = frames_that_fit(num_slots, bucket_slots, row_bytes, bytes - states);
    if (frames > 0) return {frames, true};
  }
  return {frames_that_fit(num_slots, bucket_slots, row_bytes + state_bytes, bytes), false};
}

}  // namespace torchrec_hkv::hash_table
