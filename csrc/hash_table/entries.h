// Entries outside a table: read from a file, exported, selected, or replaced by others.
#pragma once

#include <cstdint>

#include "common/hashing.h"
#include "common/macros.h"
#include "hash_table/aged_lfu.h"
#include "hash_table/row_matrix.h"

namespace torchrec_hkv::hash_table {

// The rank of an entry. The lowest leaves a full bucket.
struct Rank {
  uint64_t score;  // Ranking::of the entry
  uint32_t last_step;

  HKV_HOST_DEVICE bool operator<(const Rank& other) const {
    return score != other.score ? score < other.score : last_step < other.last_step;
  }
};

// Complete entries, as a file holds them.
struct Entries {
  const int64_t* ids;
  const char* rows;            // [n], as the table stores them
  const uint32_t* last_steps;  // [n]
  const uint64_t* scores;      // [n]; null under LRU
  const float* states;         // [n][state width]
  int64_t n;

  HKV_HOST_DEVICE Rank rank(const Ranking& ranking, int64_t i) const {
    const uint64_t score = scores != nullptr ? scores[i] : last_steps[i];
    return Rank{ranking.of(score, last_steps[i]), last_steps[i]};
  }
};

// Selects the entries of a group's tables that meet every condition.
struct Selection {
  // [num_tables] begin of the table's slots in the result; -1: no entry of this table.
  const int64_t* starts;
  uint64_t score_at_least;
  uint64_t score_at_most;
  int64_t touched_before;  // the last step of an entry is lower than this

  HKV_HOST_DEVICE bool meets(uint16_t digest, uint64_t score, uint32_t last_step) const {
    return digest != kEmptyDigest && digest != kClosedDigest && score >= score_at_least &&
           score <= score_at_most && static_cast<int64_t>(last_step) < touched_before;
  }
};

// Exported entries, [n] each.
struct ExportedEntries {
  int64_t* ids;
  RowMatrix rows;
  uint64_t* scores;
  RowMatrix states;  // float32
};

// Memory for entries that others replaced.
struct DisplacedEntries {
  int64_t* ids;
  char* rows;
  uint32_t* last_steps;
  uint64_t* scores;  // null under LRU
  float* states;
  uint64_t* counts;  // [2], zeros before the call: number of displaced entries, and of entries
                     // without a slot
};

}  // namespace torchrec_hkv::hash_table
