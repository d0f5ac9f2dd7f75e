// HBM as a cache of rows that lie in host memory: where a table's rows don't all fit, every slot
// has its row and its state in host memory, and some have them in a *frame* of HBM. Only the frame
// is then up to date, until it is written home.
//
// Narrow states, of a few bytes a row, stay in HBM for all slots and never move: the link takes as
// long for four bytes at a place of their own as for a piece of a row. See kNarrowState.
//
// Frames come in sets of four to eight. So many sets, kSetsOfRegion, serve a *region* of slots that
// are neighbours, and a set those that leave its number as their place in the region is divided by
// that; the number of sets has no divisor in common with the slots of a bucket, so that a set's
// slots stand at all positions of buckets, whose first ones are full earlier. What comes into a set
// and what leaves it are neighbours in host memory, which moves faster in the order of addresses.
// A word of 64 bits a set holds a *tag*
// for each of its frames, which says which of the set's slots it is of, whether it differs from
// what is at home (is *dirty*), and whether its row was touched again since it came. So one
// compare-and-swap finds out that a slot has no frame and gives it one: there are no locks, and no
// slot gets two. The more frames a set has, the shorter are its tags, and the fewer slots they can
// tell apart: so a set has as many as its slots allow. Large sets are used more evenly, and miss
// less.
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
constexpr int kFewestOfSet = 4, kMostOfSet = 8;
// A prime, and so without a divisor in common with any bucket's slots. In buckets of 64 a set's
// slots are then 39 positions apart, so that even few of them are spread evenly. Where a table has
// fewer than twice as many sets, all are of one region.
constexpr int64_t kSetsOfRegion = 103;
// Of a tag: what is above is 0 for a free frame, otherwise 1 + the slot's number in the set.
constexpr uint32_t kTagDirty = 1, kTagAgain = 2;
constexpr int kTagFlags = 2;
// Of a set, beside its frames: the tags and the step.
constexpr int64_t kSetBytes = sizeof(uint64_t) + sizeof(uint32_t);

constexpr int tag_bits(int frames_of_set) { return 64 / frames_of_set; }
constexpr int64_t most_slots_of_set(int frames_of_set) {
  return (int64_t{1} << (tag_bits(frames_of_set) - kTagFlags)) - 1;
}

// How a table's slots are dealt out to regions.
struct Regions {
  int64_t number;
  int64_t slots;  // of each; the last ones may have fewer
  uint32_t sets;  // of each

  static Regions of(int64_t num_slots, int64_t num_sets) {
    const int64_t number = num_sets < 2 * kSetsOfRegion ? 1 : num_sets / kSetsOfRegion;
    return {number, (num_slots + number - 1) / number,
            static_cast<uint32_t>(number == 1 ? num_sets : kSetsOfRegion)};
  }
};

struct Frames {
  unsigned long long* tags;  // [num_sets]; null: the table has its rows in one memory
  uint32_t* crowded;         // [num_sets]
  int64_t num_slots;
  int64_t num_sets;  // of all regions, at least 2
  int64_t region_slots;
  uint64_t reciprocal;  // 2^64 / region_slots, rounded down
  uint32_t region_sets;
  uint32_t set_reciprocal;  // 2^32 / region_sets, rounded down
  int32_t frames_of_set;    // kFewestOfSet to kMostOfSet
  int32_t bits;             // of a tag
  uint64_t ones;            // the lowest bit of each tag

  static Frames make(unsigned long long* tags, uint32_t* crowded, int64_t num_slots,
                     int64_t num_sets, int frames_of_set) {
    const Regions regions = Regions::of(num_slots, num_sets);
    Frames frames{};
    frames.tags = tags;
    frames.crowded = crowded;
    frames.num_slots = num_slots;
    frames.num_sets = regions.number * regions.sets;
    frames.region_slots = regions.slots;
    frames.reciprocal = static_cast<uint64_t>((static_cast<unsigned __int128>(1) << 64) /
                                              static_cast<uint64_t>(regions.slots));
    frames.region_sets = regions.sets;
    frames.set_reciprocal = static_cast<uint32_t>((uint64_t{1} << 32) / regions.sets);
    frames.frames_of_set = frames_of_set;
    frames.bits = tag_bits(frames_of_set);
    for (int p = 0; p < frames_of_set; ++p) frames.ones |= uint64_t{1} << p * frames.bits;
    return frames;
  }

  // Where a slot has its frame, if it has one.
  struct Home {
    int64_t set;
    int64_t first;    // slot of the set
    uint32_t number;  // of the slot, in the set
  };
  HKV_HOST_DEVICE Home home_of(int64_t slot) const {
#ifdef __CUDA_ARCH__
    int64_t region = static_cast<int64_t>(__umul64hi(static_cast<uint64_t>(slot), reciprocal));
#else
    auto region = static_cast<int64_t>(
        static_cast<unsigned __int128>(static_cast<uint64_t>(slot)) * reciprocal >> 64);
#endif
    int64_t first = region * region_slots;
    if (slot - first >= region_slots) {  // the reciprocal was rounded
      ++region;
      first += region_slots;
    }
    const auto place = static_cast<uint32_t>(slot - first);
    auto number = static_cast<uint32_t>(static_cast<uint64_t>(place) * set_reciprocal >> 32);
    uint32_t set = place - number * region_sets;
    if (set >= region_sets) {
      set -= region_sets;
      ++number;
    }
    return Home{region * region_sets + set, first + set, number};
  }
  // The same of a set's slot with number 0, which the table may not have.
  HKV_HOST_DEVICE Home home_of_set(int64_t set) const {
    const int64_t region = set / region_sets;
    return Home{set, region * region_slots + (set - region * region_sets), 0};
  }
  // Where the slots of a set's region end.
  HKV_HOST_DEVICE int64_t end_of(const Home& home) const {
    const int64_t end = (home.set / region_sets + 1) * region_slots;
    return end < num_slots ? end : num_slots;
  }
  HKV_HOST_DEVICE static bool is_taken(uint32_t tag) { return tag >> kTagFlags != 0; }
  // home: of any slot of the set.
  HKV_HOST_DEVICE int64_t slot_with(const Home& home, uint32_t number) const {
    return home.first + static_cast<int64_t>(number) * region_sets;
  }
  HKV_HOST_DEVICE int64_t slot_of(const Home& home, uint32_t tag) const {
    return slot_with(home, (tag >> kTagFlags) - 1);
  }
  // The tag of the slot with this number in its set.
  HKV_HOST_DEVICE static uint64_t tag_of(uint32_t number) {
    return static_cast<uint64_t>(number + 1) << kTagFlags;
  }
  HKV_HOST_DEVICE uint32_t tag_at(uint64_t tags, int place) const {
    return static_cast<uint32_t>(tags >> place * bits) & ((1u << bits) - 1);
  }
  // Which frame of its set the slot with this number there has, or -1.
  HKV_HOST_DEVICE int place_of(uint64_t tags, uint32_t number) const {
    // All tags at once: where one is the number's, `other` has zeros, of which the lowest is exact.
    constexpr uint64_t kFlags = (1 << kTagFlags) - 1;
    const uint64_t other = (tags & ~(ones * kFlags)) ^ ones * tag_of(number);
    const uint64_t found = (other - ones) & ~other & ones << (bits - 1);
    if (found == 0) return -1;
    const uint64_t begun = ones & ~found & (found - 1);  // of the tags up to that one
#ifdef __CUDA_ARCH__
    return __popcll(begun) - 1;
#else
    return __builtin_popcountll(begun) - 1;
#endif
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
    return place < 0 ? kNoFrame : frame_at(home.set, place);
  }
  HKV_HOST_DEVICE int64_t frame_at(int64_t set, int place) const {
    return set * frames_of_set + place;
  }
};

// Whether so many sets can be, and their tags tell all slots apart.
inline bool sets_serve(int64_t num_slots, int64_t bucket_slots, int64_t sets, int frames_of_set) {
  if (sets < 2 || std::gcd(sets, bucket_slots) > 1) return false;
  const Regions regions = Regions::of(num_slots, sets);
  return regions.sets * most_slots_of_set(frames_of_set) >= regions.slots;
}

// Frames of one set, of a table with so many slots, in buckets of bucket_slots, and frames: the
// most that can be; 0 where that many frames can't be.
inline int frames_of_set(int64_t num_slots, int64_t bucket_slots, int64_t frames) {
  for (int of_set = kMostOfSet; of_set >= kFewestOfSet; --of_set) {
    if (frames % of_set == 0 && sets_serve(num_slots, bucket_slots, frames / of_set, of_set)) {
      return of_set;
    }
  }
  return 0;
}

// Frames that fit in so many bytes of HBM, where one takes frame_bytes, in the largest sets that
// can be; none where they would be too few to serve all slots.
inline int64_t frames_that_fit(int64_t num_slots, int64_t bucket_slots, int64_t frame_bytes,
                               int64_t bytes) {
  for (int of_set = kMostOfSet; of_set >= kFewestOfSet; --of_set) {
    int64_t sets = bytes <= 0 ? 0 : bytes / (of_set * frame_bytes + kSetBytes);
    while (std::gcd(sets, bucket_slots) > 1) --sets;
    if (sets_serve(num_slots, bucket_slots, sets, of_set)) return sets * of_set;
  }
  return 0;
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
