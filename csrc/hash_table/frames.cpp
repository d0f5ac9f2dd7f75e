#include "hash_table/frames.h"

#include <numeric>

namespace torchrec_hkv::hash_table {
namespace {

// States of at most this many bytes are narrow.
constexpr int64_t kNarrowState = 16;

// Whether this number of sets is possible and their tags distinguish all slots.
bool sets_serve(int64_t num_slots, int64_t bucket_slots, int64_t sets, int frames_of_set) {
  if (sets < 2 || std::gcd(sets, bucket_slots) > 1) return false;
  const Regions regions = Regions::of(num_slots, sets);
  return regions.sets * max_slots_per_set(frames_of_set) >= regions.slots;
}

// Number of frames in this many bytes of HBM at frame_bytes each, in the largest possible sets; 0
// if they are too few to serve all slots.
int64_t frames_that_fit(int64_t num_slots, int64_t bucket_slots, int64_t frame_bytes,
                        int64_t bytes) {
  for (int frames_per_set = kMaxFramesPerSet; frames_per_set >= kMinFramesPerSet;
       --frames_per_set) {
    int64_t sets = bytes <= 0 ? 0 : bytes / (frames_per_set * frame_bytes + kSetBytes);
    while (std::gcd(sets, bucket_slots) > 1) --sets;
    if (sets_serve(num_slots, bucket_slots, sets, frames_per_set)) return sets * frames_per_set;
  }
  return 0;
}

}  // namespace

int frames_of_set(int64_t num_slots, int64_t bucket_slots, int64_t frames) {
  for (int frames_per_set = kMaxFramesPerSet; frames_per_set >= kMinFramesPerSet;
       --frames_per_set) {
    if (frames % frames_per_set == 0 &&
        sets_serve(num_slots, bucket_slots, frames / frames_per_set, frames_per_set)) {
      return frames_per_set;
    }
  }
  return 0;
}

HbmCapacity hbm_capacity(int64_t num_slots, int64_t bucket_slots, int64_t row_bytes,
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
