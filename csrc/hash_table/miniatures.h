// Miniatures estimate, while a table runs, how LFU with aging would perform with several
// half-lives. A miniature is a small table without rows. It sees a sample of the ids, selected by
// hash, and its size relative to the table equals the sample's share of all ids. So its hit rate is
// close to that of the whole table with the miniature's half-life (SHARDS samples this way). The
// table takes the longest half-life whose miniature performs about as well as the best.
//
// A miniature has sets of up to 64 entries; an id belongs to one set. The effect of a call on a set
// does not depend on the order of its ids. All hits count and store the step. Then each missing id
// takes a free entry or the entry of the lowest rank that the call has not touched, if a training
// lookup would replace that rank by a new id. If there are too few of these entries, the missing
// ids with the lowest tags stay.
#pragma once

#include <cstdint>

#include "common/global_pointer.h"
#include "common/hashing.h"
#include "common/macros.h"
#include "hash_table/aged_lfu.h"

namespace torchrec_hkv::hash_table {

constexpr int kMiniatures = 5;
constexpr int kMaxMiniatureSets = 64;
constexpr int kMiniatureWays = 64;

// AgedLfu::c of each miniature: LRU, and half-lives up to one that is close to LFU.
HKV_HOST_DEVICE double c_of_miniature(int k) { return k == 0 ? 0. : k < 4 ? 1 << (k - 1) : 16.; }
// Hit rate that the longest half-life may lose against the best, in hundredths of the best.
constexpr uint64_t kToleratedPercent = 2;

// Words of a miniature's set: tags, counts and last steps. A tag of 0 marks a free entry.
constexpr int64_t kMiniatureSetWords = 3 * kMiniatureWays;

// Counters of a table's miniatures.
struct MiniatureCounters {
  uint64_t hits[kMiniatures];         // of each, since the last choice of c
  uint64_t lookups;                   // seen by each since the last choice
  uint64_t recent_hits[kMiniatures];  // before the last choice; each choice removes a third
  uint64_t recent_lookups;            // before the last choice; each choice removes a third
  uint64_t evicted;                   // by the first miniature since it was last empty
  uint64_t chosen_at;                 // lookups of the table at the last choice
};
constexpr int kMiniatureCounterWords = sizeof(MiniatureCounters) / sizeof(uint64_t);

// A position of a batch whose id is in the sample.
struct SampledId {
  uint32_t where;  // its table's index times kMaxMiniatureSets, plus its set
  uint32_t tag;
  uint32_t given;
};

// Miniatures sample ids by the upper half of this hash.
constexpr uint64_t kMiniatureSeed = 0xbb67ae8584caa73bull;

HKV_HOST_DEVICE uint64_t miniature_hash(int64_t id) {
  return mix64(static_cast<uint64_t>(id) ^ kMiniatureSeed);
}

struct MiniatureSize {
  uint32_t sets;  // of each miniature
  uint32_t ways;  // entries of a set

  // A thirty-second of the slots, at most 4,096 entries. At least 4 sets if these are at most a
  // quarter of the slots.
  static MiniatureSize of(int64_t slots) {
    const int64_t sets = slots / (32 * kMiniatureWays);
    const int64_t least = slots < 16 * kMiniatureWays ? 1 : 4;
    const int64_t bounded = sets < least ? least : sets;
    return {static_cast<uint32_t>(bounded < kMaxMiniatureSets ? bounded : kMaxMiniatureSets),
            static_cast<uint32_t>(slots < kMiniatureWays ? slots : kMiniatureWays)};
  }
  int64_t words() const { return kMiniatures * sets * kMiniatureSetWords; }
  int64_t bytes() const {
    return words() * static_cast<int64_t>(sizeof(uint32_t)) +
           static_cast<int64_t>(sizeof(MiniatureCounters));
  }
};

// The miniatures of a table, in the memory of the device that runs the kernels.
struct Miniatures {
  GlobalPointer<uint32_t>
      entries;  // [kMiniatures][sets][3][kMiniatureWays]; null: the table has none
  GlobalPointer<MiniatureCounters> counters;
  MiniatureSize size;
  uint64_t sampled;  // of 2^32 ids

  static Miniatures make(uint32_t* entries, MiniatureCounters* counters, int64_t slots) {
    const MiniatureSize size = MiniatureSize::of(slots);
    const int64_t small = int64_t{size.sets} * size.ways;
    const uint64_t sampled = small >= slots
                                 ? uint64_t{1} << 32
                                 : static_cast<uint64_t>((small << 20) / slots) << (32 - 20);
    return Miniatures{entries, counters, size, sampled};
  }

  HKV_HOST_DEVICE uint32_t* set_of(int k, uint32_t set) const {
    return entries + (static_cast<int64_t>(k) * size.sets + set) * kMiniatureSetWords;
  }

  HKV_HOST_DEVICE bool is_sampled(uint64_t hash) const { return hash >> 32 < sampled; }
  // Whether an id is in the sample, and its place there.
  HKV_HOST_DEVICE bool sample(int64_t id, uint64_t given, int32_t table, SampledId* to) const {
    const uint64_t hash = miniature_hash(id);
    if (!is_sampled(hash)) return false;
    const auto low = static_cast<uint32_t>(hash);
    to->where = static_cast<uint32_t>(table) * kMaxMiniatureSets +
                static_cast<uint32_t>((low * static_cast<uint64_t>(size.sets)) >> 32);
    to->tag = low == 0 ? 1 : low;
    to->given = given > 0xffffffffull ? 0xffffffffu : static_cast<uint32_t>(given);
    return true;
  }

  // Called at the start of a call. counted: the table's lookups before it. Chooses c again after as
  // many lookups as the table has slots, once the miniatures have been full for a while.
  HKV_HOST_DEVICE void choose(uint64_t counted, int64_t slots, double* c) const {
    if (counted - counters->chosen_at < static_cast<uint64_t>(slots)) return;
    counters->chosen_at = counted;
    counters->recent_lookups += counters->lookups - counters->recent_lookups / 3;
    counters->lookups = 0;
    uint64_t best = 0;
    for (int k = 0; k < kMiniatures; ++k) {
      counters->recent_hits[k] += counters->hits[k] - counters->recent_hits[k] / 3;
      counters->hits[k] = 0;
      if (counters->recent_hits[k] > best) best = counters->recent_hits[k];
    }
    if (counters->evicted < static_cast<uint64_t>(size.sets) * size.ways) return;
    for (int k = 0; k < kMiniatures; ++k) {
      if (counters->recent_hits[k] * 100 >= best * (100 - kToleratedPercent))
        *c = c_of_miniature(k);
    }
  }
};

}  // namespace torchrec_hkv::hash_table
