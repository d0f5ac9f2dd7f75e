// HBM as a cache of rows in host memory. If a table's rows do not all fit in HBM, every slot has
// its row and state in host memory (the *backing* store), and some slots also have a copy in a
// *frame* of HBM. Then only the frame is up to date, until it is written back.
//
// Narrow states, of a few bytes a row, stay in HBM for all slots and never move: the link takes as
// long for four separate bytes as for a piece of a row. See hbm_capacity.
//
// Frames form sets of four to eight. kSetsPerRegion sets serve a *region* of neighbouring slots. A
// set serves the slots whose position in the region, modulo the number of sets, is the set's
// number. The number of sets has no common divisor with the slots of a bucket, so that a set's
// slots are at all positions of buckets; the first positions fill earlier. Rows that enter a set
// and leave it are neighbours in host memory, and moves in address order are faster.
//
// A word of 64 bits holds a *tag* for each frame of a set: the slot of the set that it belongs to,
// whether it differs from host memory (is *dirty*), and whether its row was touched again since it
// came. So one compare-and-swap checks that a slot has no frame and gives it one, without locks and
// without giving a slot two frames. More frames in a set mean shorter tags, which distinguish fewer
// slots; so a set has as many frames as its number of slots allows. Large sets are used more evenly
// and miss less.
//
// A frame is never taken from a row that is pinned or that the present call has touched. So a
// backward finds the rows of its batch in place, even while another call moves rows. If a row found
// no frame, its set records the step (`crowded`): a pending backward may write the row in host
// memory; until then no row of the set is fetched from there.
#pragma once

#include <cstdint>

#include "common/global_pointer.h"
#include "common/macros.h"

namespace torchrec_hkv::hash_table {

constexpr int64_t kNoFrame = -1;
constexpr int kMinFramesPerSet = 4, kMaxFramesPerSet = 8;
// A prime, so it has no common divisor with any bucket's number of slots. In buckets of 64, a set's
// slots are 39 positions apart, so that even a few of them are spread evenly. If a table has fewer
// than twice as many sets, all are in one region.
constexpr int64_t kSetsPerRegion = 103;
// Bits of a tag. The bits above are 0 for a free frame, otherwise 1 + the slot's number in the set.
constexpr uint32_t kTagDirty = 1, kTagReused = 2;
constexpr int kTagFlags = 2;
// Bytes of a set besides its frames: the tags and the step.
constexpr int64_t kSetBytes = sizeof(uint64_t) + sizeof(uint32_t);

constexpr int tag_bits(int frames_of_set) { return 64 / frames_of_set; }
constexpr int64_t max_slots_per_set(int frames_of_set) {
  return (int64_t{1} << (tag_bits(frames_of_set) - kTagFlags)) - 1;
}

// How a table's slots are divided into regions.
struct Regions {
  int64_t number;
  int64_t slots;  // of each; the last region may have fewer
  uint32_t sets;  // of each

  static Regions of(int64_t num_slots, int64_t num_sets) {
    const int64_t number = num_sets < 2 * kSetsPerRegion ? 1 : num_sets / kSetsPerRegion;
    return {number, (num_slots + number - 1) / number,
            static_cast<uint32_t>(number == 1 ? num_sets : kSetsPerRegion)};
  }
};

struct Frames {
  GlobalPointer<unsigned long long> tags;  // [num_sets]; null: all rows are in one memory
  GlobalPointer<uint32_t> crowded;         // [num_sets]
  int64_t num_slots;
  int64_t num_sets;  // of all regions, at least 2
  int64_t region_slots;
  uint64_t reciprocal;  // 2^64 / region_slots, rounded down
  uint32_t region_sets;
  uint32_t set_reciprocal;  // 2^32 / region_sets, rounded down
  int32_t frames_of_set;    // kMinFramesPerSet to kMaxFramesPerSet
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

  // The set of a slot, and the slot's number in it.
  struct SetPosition {
    int64_t set;
    int64_t first;    // first slot of the set
    uint32_t number;  // of the slot, in the set
  };
  HKV_HOST_DEVICE SetPosition set_position(int64_t slot) const {
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
    const auto way = static_cast<uint32_t>(slot - first);
    auto number = static_cast<uint32_t>(static_cast<uint64_t>(way) * set_reciprocal >> 32);
    uint32_t set = way - number * region_sets;
    if (set >= region_sets) {
      set -= region_sets;
      ++number;
    }
    return SetPosition{region * region_sets + set, first + set, number};
  }
  // As set_position, for the set's slot number 0, which the table may not have.
  HKV_HOST_DEVICE SetPosition first_of_set(int64_t set) const {
    const int64_t region = set / region_sets;
    return SetPosition{set, region * region_slots + (set - region * region_sets), 0};
  }
  // End of the slots of a set's region.
  HKV_HOST_DEVICE int64_t end_of(const SetPosition& in_set) const {
    const int64_t end = (in_set.set / region_sets + 1) * region_slots;
    return end < num_slots ? end : num_slots;
  }
  HKV_HOST_DEVICE static bool is_taken(uint32_t tag) { return tag >> kTagFlags != 0; }
  // in_set: of any slot of the set.
  HKV_HOST_DEVICE int64_t slot_with(const SetPosition& in_set, uint32_t number) const {
    return in_set.first + static_cast<int64_t>(number) * region_sets;
  }
  HKV_HOST_DEVICE int64_t slot_of(const SetPosition& in_set, uint32_t tag) const {
    return slot_with(in_set, (tag >> kTagFlags) - 1);
  }
  // The tag of the slot with this number in its set.
  HKV_HOST_DEVICE static uint64_t tag_of(uint32_t number) {
    return static_cast<uint64_t>(number + 1) << kTagFlags;
  }
  HKV_HOST_DEVICE uint32_t tag_at(uint64_t tags, int way) const {
    return static_cast<uint32_t>(tags >> way * bits) & ((1u << bits) - 1);
  }
  // The frame, in its set, of the slot with this number, or -1.
  HKV_HOST_DEVICE int way_of(uint64_t tags, uint32_t number) const {
    // Compares all tags at once: a matching tag is zero in `other`. Only the lowest result is
    // exact.
    constexpr uint64_t kFlags = (1 << kTagFlags) - 1;
    const uint64_t other = (tags & ~(ones * kFlags)) ^ ones * tag_of(number);
    const uint64_t found = (other - ones) & ~other & ones << (bits - 1);
    if (found == 0) return -1;
    const uint64_t begun = ones & ~found & (found - 1);  // lowest bits of the tags up to the match
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
    const SetPosition in_set = set_position(slot);
    const int way = way_of(load_tags(in_set.set), in_set.number);
    return way < 0 ? kNoFrame : frame_at(in_set.set, way);
  }
  HKV_HOST_DEVICE int64_t frame_at(int64_t set, int way) const { return set * frames_of_set + way; }
};

// Frames of one set: the largest number that is possible for this number of slots, bucket_slots and
// frames; 0 if so many frames are impossible.
int frames_of_set(int64_t num_slots, int64_t bucket_slots, int64_t frames);

// The rows and states of a table that are in HBM.
struct HbmCapacity {
  int64_t slots;    // all slots of the table if they fit; else frames, or 0
  bool all_states;  // whether all slots have their states in HBM, but not all their rows
};

// Divides this many bytes of HBM, without the index. Narrow states of all slots take at most half:
// if they needed more, rows would be so short or frames so few that states had better move with
// rows.
HbmCapacity hbm_capacity(int64_t num_slots, int64_t bucket_slots, int64_t row_bytes,
                         int64_t state_bytes, int64_t bytes);

}  // namespace torchrec_hkv::hash_table
