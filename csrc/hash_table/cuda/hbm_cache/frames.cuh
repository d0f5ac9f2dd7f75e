// Finds, takes and marks frames on the GPU.
#pragma once

#include <cstdint>

#include "hash_table/cuda/bucket.cuh"
#include "hash_table/cuda/entry.cuh"
#include "hash_table/table_view.h"

namespace torchrec_hkv::hash_table::cuda {

// Sets a bit of a tag. Testing first avoids thousands of atomics for a hot row.
__device__ __forceinline__ void mark(const Frames& frames, int64_t set, int way, uint64_t tags,
                                     uint32_t bit) {
  const unsigned long long bits = static_cast<unsigned long long>(bit) << way * frames.bits;
  if (!(tags & bits)) atomicOr(&frames.tags[set], bits);
}

// The frame of a slot whose row or state will be written, or kNoFrame. One of the writing threads
// must be `marking`.
__device__ __forceinline__ int64_t frame_to_write(const Frames& frames, int64_t slot,
                                                  bool marking) {
  if (frames.tags == nullptr) return kNoFrame;
  const Frames::SetPosition in_set = frames.set_position(slot);
  const uint64_t tags = frames.load_tags(in_set.set);
  const int way = frames.way_of(tags, in_set.number);
  if (way < 0) return kNoFrame;
  if (marking) mark(frames, in_set.set, way, tags, kTagDirty);
  return frames.frame_at(in_set.set, way);
}
__device__ __forceinline__ char* row_to_write(const TableView& table, int64_t slot,
                                              bool marking = true) {
  return table.rows.at(slot, frame_to_write(table.frames, slot, marking));
}

// The result of a request for a frame.
struct FrameClaim {
  int64_t frame = kNoFrame;  // kNoFrame: the row stays in host memory
  int64_t victim = kNoSlot;  // slot whose row must be written back first
  bool taken = false;        // the frame is new to the slot
};

// Gives a frame to a slot that the present call has touched, if it has none. No slot may be touched
// or filled meanwhile. kNew: the slot's id is new, its row in host memory is not valid, and its
// frame becomes dirty. The caller must move the rows.
//
// Under LRU, rows that were touched again after they got their frame leave last: most incoming ids
// of a skewed distribution are rare, and would evict rows that are touched every few calls.
template <bool kNew>
__device__ __forceinline__ FrameClaim claim_frame(const TableView& table, int64_t slot,
                                                  const CallContext& context) {
  const Frames& frames = table.frames;
  const Frames::SetPosition in_set = frames.set_position(slot);
  const int64_t set = in_set.set;
  const uint32_t pinned_from = context.pinned_from();
  unsigned long long tags = load_l2(&frames.tags[set]);
  for (;;) {
    FrameClaim claim;
    int way = frames.way_of(tags, in_set.number);
    if (way >= 0) {
      if (kNew) mark(frames, set, way, tags, kTagDirty);
      if (!kNew && table.scores == nullptr) mark(frames, set, way, tags, kTagReused);
      claim.frame = frames.frame_at(set, way);
      return claim;
    }
    // Loads all steps at once. kFreeStep: the frame is free, or its entry has left the table.
    uint32_t steps[kMaxFramesPerSet];
#pragma unroll
    for (int p = 0; p < kMaxFramesPerSet; ++p) {
      const uint32_t tag = p < frames.frames_of_set ? frames.tag_at(tags, p) : 0;
      steps[p] =
          Frames::is_taken(tag) ? load_l2(step_of(table, frames.slot_of(in_set, tag))) : kFreeStep;
    }
    Rank lowest{~0ull, kFreeStep};
    const bool blocked = !kNew && load_l2(&frames.crowded[set]) >= pinned_from;
#pragma unroll
    for (int p = 0; p < kMaxFramesPerSet; ++p) {
      if (blocked || p >= frames.frames_of_set) break;
      Rank rank{0, 0};
      int64_t victim = kNoSlot;
      if (steps[p] != kFreeStep) {
        if (steps[p] >= pinned_from) continue;
        const uint32_t tag = frames.tag_at(tags, p);
        const int64_t other = frames.slot_of(in_set, tag);
        rank.score = table.scores == nullptr
                         ? tag & kTagReused
                         : table.ranking().of(load_score(table, other), steps[p]);
        rank.last_step = steps[p];
        if (tag & kTagDirty) victim = other;
      }
      if (way >= 0 && !(rank < lowest)) continue;
      way = p;
      lowest = rank;
      claim.victim = victim;
    }
    if (way < 0 || (table.scores != nullptr && rank_of(table, slot) < lowest)) {
      store_l2(&frames.crowded[set], context.now());
      return FrameClaim{};
    }
    const unsigned long long mask = ((1ull << frames.bits) - 1) << way * frames.bits;
    const unsigned long long tag = Frames::tag_of(in_set.number) | (kNew ? kTagDirty : 0u);
    const unsigned long long seen =
        atomicCAS(&frames.tags[set], tags, (tags & ~mask) | tag << way * frames.bits);
    if (seen == tags) {
      claim.frame = frames.frame_at(set, way);
      claim.taken = true;
      return claim;
    }
    tags = seen;
  }
}

}  // namespace torchrec_hkv::hash_table::cuda
