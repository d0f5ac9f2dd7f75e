// How an insertion places missing ids, and what it returns of entries that it evicts or refuses.
#pragma once

#include <cstdint>

#include "common/scores.h"
#include "hash_table/row_matrix.h"

namespace torchrec_hkv::hash_table {

// The slot of a position that an insertion skips (Placement::expected_present).
constexpr int64_t kSkipped = INT64_MAX;

// Entries that an insertion evicts or refuses. Null pointers: not wanted.
struct EvictedEntries {
  int64_t* ids;
  RowMatrix rows;
  uint64_t* scores;
  uint64_t* number;  // device counter
  int32_t* tables;   // table index of each entry; null: not wanted
};

// What an insertion writes to the rows of new ids.
enum class NewRows : int32_t {
  kUntouched = 0,   // nothing; the caller writes them
  kUniform = 1,     // the initial row, in tables whose initial rows are all uniform
  kInitial = 2,     // the initial row of any distribution
  kInitialAny = 3,  // the same, if some tables have rows of 8 bits
};

struct Admissions;  // admission.h

// For groups with frames: what is needed to move rows into them. CUDA only.
struct FrameMoves {
  int64_t group_slots = 0;  // 0: no table has frames
  int32_t num_tables = 0;
  // Bytes of the widest row if bulk copies can move all rows; otherwise 0.
  int32_t bulk_bytes = 0;
  // begin(begin_context) is called after the index is written and before rows move; may be null.
  // Not a std::function, because every file with kernels would include its header.
  void (*begin)(const void*) = nullptr;
  const void* begin_context = nullptr;

  bool any() const { return group_slots > 0; }
  // Lanes of warps copy shorter rows, because they have more copies in flight.
  static bool move_in_bulk(int64_t row_bytes) {
    return row_bytes % 16 == 0 && row_bytes >= 256 && row_bytes <= 2048;
  }
};

// When a new id is refused because all entries that it could replace rank above it.
enum class RefuseLower : uint8_t {
  kAged,  // in tables that rank by decayed counts, with kGraceHalfLives
  kAll,
};

// How an insertion places missing ids.
struct Placement {
  NewRows rows;
  RefuseLower refuse_lower;
  RowMatrix given_rows;  // rows of the call, by position; read if evicted entries are wanted
  EvictedEntries evicted_entries;
  // [positions]: whether the caller expects the id in the table before the call, or expects it to
  // be missing. Ids for which that is wrong are skipped: their slot is kSkipped. Null: no id is
  // skipped.
  const bool* expected_present = nullptr;
  // In host memory; its pointers are to the tables' device. Null: all ids are admitted.
  const Admissions* admissions = nullptr;
  FrameMoves moving{};
  // Whether most ids are expected at one position only. Only speed depends on it.
  bool mostly_unique = false;
  // The scores that tables of the group store.
  StoredScores scores = StoredScores::kSums;
  // Whether a table of the group has miniatures.
  bool simulates = false;
  // Whether a table of the group remembers what it evicts.
  bool remembers = false;
  // Whether a table restores counts of ids that return; only if ids are placed in order.
  bool restores = false;
  // Whether ids are placed in the order of the batch, so that the result depends on the table and
  // the batch only. CUDA only: a CPU always does so.
  bool ordered = false;
};

}  // namespace torchrec_hkv::hash_table
