// A hash table as kernels see it: raw pointers, owned by someone else.
//
// Layout. A table is an array of buckets. A bucket has up to 64 slots; its 64 digests of 16 bits
// fill one 128-byte line, so that one line tells which slots may hold an id. A slot's id, step,
// score, row and optimizer state lie in arrays of their own at the slot's number, bucket *
// bucket_slots + position; on a GPU ids and steps are packed (packed_entries.h). Every id has two
// candidate buckets; nothing moves once placed, so a slot number stays valid until its id is
// evicted. The digest marks a free slot, because every 64-bit id is legal.
//
// Slots of a group's tables are numbered through: slot + first_slot is unique in the group.
#pragma once

#include <cstdint>

#include "common/dtypes.h"
#include "common/hashing.h"
#include "common/initial_rows.h"
#include "common/macros.h"
#include "common/scores.h"
#include "hash_table/aged_lfu.h"
#include "hash_table/clock.h"
#include "hash_table/counts.h"
#include "hash_table/evicted_memory.h"
#include "hash_table/frames.h"
#include "hash_table/miniatures.h"
#include "hash_table/packed_entries.h"
#include "hash_table/row_matrix.h"

namespace torchrec_hkv::hash_table {

constexpr int64_t kNoSlot = -1;
constexpr int64_t kSkipped = INT64_MAX;  // see Placement

// Device counters of a table, counted since it was created.
enum Counter : int32_t {
  kLookups = 0,      // ids of training lookups
  kMisses = 1,       // of these, missing
  kInserted = 2,     // ids placed
  kEvicted = 3,      // of these, those that replaced another id
  kRefused = 4,      // ids of training lookups without a slot
  kUnadmitted = 5,   // ids of training lookups that were not admitted (admission.h)
  kExpired = 6,      // entries that expired (expiry.h)
  kFetched = 7,      // rows that came from host memory into a frame (frames.h)
  kWrittenBack = 8,  // rows that were written to host memory because others took their frames
  // Of kRefused, those whose buckets are full of pinned entries. Repeated ids of a call may count
  // once or several times.
  kCrowded = 9,
  // In tables with frames: ids of training lookups whose row was read in host memory.
  kHostHits = 10,
  kReturned = 11,  // of kInserted, ids that the table remembers as evicted (evicted_memory.h)
  kNumCounters = 12,
};

// Rows or states: a vector for each slot and, if the table has frames, for each frame.
struct RowStore {
  char* backing;  // [num_slots][width]; in host memory if there are frames
  char* frames;   // [num frames][width]; null: no vector has a frame
  int32_t width;
  RowType type;

  HKV_HOST_DEVICE int64_t bytes() const { return row_size(type, width); }
  // Number of elements of a tensor that holds a stored vector.
  int64_t stored_width() const { return bytes() / element_size(type); }
  // frame: that of the slot, or kNoFrame.
  HKV_HOST_DEVICE char* at(int64_t slot, int64_t frame) const {
    return frame == kNoFrame || frames == nullptr ? backing + slot * bytes()
                                                  : frames + frame * bytes();
  }
  // Whether vectors move between host memory and frames.
  HKV_HOST_DEVICE bool moves() const { return width > 0 && frames != nullptr; }
};

struct TableView {
  uint16_t* digests;     // [num_buckets][64]
  int64_t* ids;          // [num_slots]; null: packed
  uint32_t* last_steps;  // [num_slots] step of the last training lookup; null: packed
  // Ids and last steps of a packed table: on a GPU, under LRU, the only table of its group.
  PackedEntries entries;
  uint32_t* oldest;  // [num_buckets][kGroups] lower bound of the last steps of the group's entries;
                     // packed tables only
  uint64_t* scores;  // [num_slots]; null under LRU, whose scores are the last steps, and if there
                     // are counts
  CountArrays counts;     // under kLfu and kAgedLfu on a CPU
  AgedLfu* aged;          // on the table's device; null unless the policy is kAgedLfu
  Miniatures miniatures;  // under kAgedLfu, if they choose AgedLfu::c
  RowStore rows;
  RowStore states;  // optimizer state, float32
  Frames frames;
  EvictedMemory evicted;
  uint64_t* counters;       // [kNumCounters]
  int64_t* optimizer_step;  // updates of the table so far
  int64_t first_slot;       // of this table among the slots of its group
  int64_t num_slots;
  uint32_t num_buckets;
  // Of half as many buckets, how many are yet to be split (grow.h); 0: none. CPU only.
  uint32_t unsplit;
  int32_t bucket_slots;
  int32_t column_offset;  // of the table's first column, if columns are sharded
  bool backing_on_host;   // on a GPU: whether the rows of slots are in host memory, which the GPU
                          // never caches; states too, unless all states are in HBM
  Eviction eviction;
  InitialRows initial_rows;

  HKV_HOST_DEVICE int32_t dim() const { return rows.width; }
  // Under kAgedLfu, at the start of a call with this step, before its lookups are counted.
  HKV_HOST_DEVICE void begin_aged_call(uint32_t now) const {
    const uint64_t counted = counters[kLookups];
    if (miniatures.entries != nullptr) miniatures.choose(counted, num_slots, &aged->c);
    aged->begin_call(now, counted, num_slots);
  }
  // The ranking of the table's entries in the present call.
  HKV_HOST_DEVICE Ranking ranking() const {
    return aged == nullptr ? Ranking{false, 0} : aged->ranking();
  }
  // Whether a slot, numbered through the group, belongs to this table; false for kNoSlot.
  HKV_HOST_DEVICE bool has(int64_t slot) const {
    return static_cast<uint64_t>(slot - first_slot) < static_cast<uint64_t>(num_slots);
  }
  // Whether the vectors of a slot with this frame (kNoFrame: without a frame) are in HBM, so that a
  // GPU may prefetch them.
  HKV_HOST_DEVICE bool in_hbm(int64_t frame) const { return frame != kNoFrame || !backing_on_host; }
  // The present address, for reading. A writer must mark the frame (cuda/hbm_cache/frames.cuh).
  HKV_HOST_DEVICE char* row(int64_t slot) const { return rows.at(slot, frames.frame_of(slot)); }
  HKV_HOST_DEVICE float* state(int64_t slot) const {
    return reinterpret_cast<float*>(states.at(slot, frames.frame_of(slot)));
  }
};

// The table of a slot that is numbered through the group.
HKV_HOST_DEVICE int32_t table_of_slot(const TableView* tables, int32_t num_tables, int64_t slot) {
  int32_t low = 0;
  int32_t high = num_tables;
  while (high - low > 1) {
    const int32_t middle = (low + high) >> 1;
    if (tables[middle].first_slot <= slot) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

// Classes of row widths that have kernels of their own.
enum class WidthClass : int32_t { k32, k64, k128, k256, k512, k1024, kWider };
constexpr int32_t kWidthClasses = 7;

// Columns of the widest row of a class.
HKV_HOST_DEVICE constexpr int32_t most_columns(WidthClass width) {
  return width == WidthClass::kWider ? INT32_MAX : 32 << static_cast<int32_t>(width);
}
HKV_HOST_DEVICE constexpr WidthClass width_class_of(int32_t dim) {
  int32_t width = 0;
  while (width + 1 < kWidthClasses && (32 << width) < dim) ++width;
  return static_cast<WidthClass>(width);
}

// Tables of one width class with the same number of bytes a column are updated by the same kernel.
// Their number is a bit of GroupShape::row_classes.
constexpr int32_t kRowClasses = 2 * kWidthClasses;
constexpr int32_t kAllRowClasses = -1;

// Rows of 8 bits belong to the class of the widest 16-bit rows, whose kernel reads rows of any
// type.
HKV_HOST_DEVICE constexpr int32_t row_class_of(int32_t dim, RowType type) {
  const WidthClass width = type == RowType::kInt8 ? WidthClass::kWider : width_class_of(dim);
  return static_cast<int32_t>(width) + (type == RowType::kFloat32 ? 0 : kWidthClasses);
}

// Properties of a group that select kernels.
struct GroupShape {
  int32_t widest;  // columns of the widest table
  bool four_wide;  // dims and state widths are multiples of four, or states have one value or none
  bool float32_rows;       // of all tables
  bool int8_rows = false;  // of some table
  // Number of features if each has a table of its own; 0: some features share a table.
  int32_t features_apart = 0;
  int64_t most_slots = 0;     // of one table, at its full capacity
  bool keeps_scores = false;  // whether some table has scores; the others evict by LRU
  uint32_t row_classes = 0;   // of its tables, one bit for each row_class_of

  bool rows_of_16_bits() const {  // of all tables
    return !int8_rows && row_classes != 0 && (row_classes & ((1u << kWidthClasses) - 1)) == 0;
  }
  // Whether all tables have rows of many columns.
  bool all_wide() const {
    constexpr int32_t kWide = 384;
    constexpr auto kClass = static_cast<uint32_t>(WidthClass::k512);
    constexpr uint32_t kNarrow = (1u << kClass) - 1;
    return widest > kWide && (row_classes & (kNarrow | kNarrow << kWidthClasses)) == 0;
  }
};

// The rank of an entry. The lowest leaves a full bucket.
struct Rank {
  uint64_t score;  // Ranking::of the entry
  uint32_t last_step;

  HKV_HOST_DEVICE bool operator<(const Rank& other) const {
    return score != other.score ? score < other.score : last_step < other.last_step;
  }
};

// The bags of one feature, in a batch whose features have different numbers of bags.
struct FeatureBags {
  int64_t first;   // number of its first bag
  int64_t output;  // position of the first bag's outputs
  int64_t stride;  // distance between the outputs of two bags
};

// A GPU's report of invalid offsets, in host memory that it can write.
struct BadOffsets {
  int64_t bag;
  int64_t from;  // offset of its begin
  int64_t to;    // offset of its end
  int64_t num_ids;
  uint32_t found;  // the group's number; written last
};

// The ids of one call: feature-major bags of the features of a group, in CSR form.
struct Batch {
  const int64_t* ids;              // [num_ids]
  const int64_t* offsets;          // [num_bags + 1], nondecreasing, from 0 to num_ids; null: one
                                   // feature, one bag
  const int32_t* feature_tables;   // [num_features] table of each feature
  const int32_t* feature_columns;  // [num_features] first column of each feature in the output
  int32_t num_features;
  int64_t batch_size;  // number of bags of each feature, unless features differ
  int64_t num_ids;
  int64_t num_bags;  // of all features
  // [num_features + 1] if features have different numbers of bags; the last has the totals.
  const FeatureBags* ragged = nullptr;
  // On a GPU: a kernel that finds invalid offsets writes the report and sets the flag. No rows are
  // updated until the host has read the report.
  uint32_t* refused = nullptr;
  BadOffsets* bad_offsets = nullptr;
  uint32_t group_number = 0;

  // Number of a feature's first bag; for num_features the number of all bags.
  HKV_HOST_DEVICE int64_t first_bag(int32_t feature) const {
    return ragged == nullptr ? feature * batch_size : ragged[feature].first;
  }
  HKV_HOST_DEVICE int32_t feature_of_bag(int64_t bag) const {
    // Numbers of bags fit 32 bits, and 32-bit division is much faster.
    if (ragged == nullptr) return static_cast<uint32_t>(bag) / static_cast<uint32_t>(batch_size);
    int32_t low = 0, high = num_features;
    while (high - low > 1) {
      const int32_t middle = (low + high) >> 1;
      (ragged[middle].first <= bag ? low : high) = middle;
    }
    return low;
  }
  // Position of the outputs of a feature's bag in an output of this stride. If features have
  // different numbers of bags, the outputs of each feature are contiguous.
  HKV_HOST_DEVICE int64_t output_of(int32_t feature, int64_t bag_of_feature, int64_t stride) const {
    if (ragged == nullptr) return bag_of_feature * stride + feature_columns[feature];
    return ragged[feature].output + bag_of_feature * ragged[feature].stride;
  }
  // Distance to the outputs of the feature's next bag.
  HKV_HOST_DEVICE int64_t output_stride(int32_t feature, int64_t stride) const {
    return ragged == nullptr ? stride : ragged[feature].stride;
  }

  // Position of the feature's first id.
  HKV_HOST_DEVICE int64_t feature_start(int32_t feature) const {
    if (offsets == nullptr) return feature == 0 ? 0 : num_ids;
    return offsets[first_bag(feature)];
  }
  // Feature of the id at a position.
  HKV_HOST_DEVICE int32_t feature_of(int64_t position) const {
    int32_t low = 0;
    int32_t high = num_features;
    while (high - low > 1) {
      const int32_t middle = (low + high) >> 1;
      if (feature_start(middle) <= position) {
        low = middle;
      } else {
        high = middle;
      }
    }
    return low;
  }
};

// Entries that an insertion evicts or refuses. Null pointers: not wanted.
struct Leavers {
  int64_t* ids;
  RowMatrix rows;
  uint64_t* scores;
  uint64_t* number;  // device counter
  int32_t* tables;   // table index of each leaver; null: not wanted
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
struct MovingRows {
  int64_t group_slots = 0;  // 0: no table has frames
  int32_t num_tables = 0;
  // Bytes of the widest row if bulk copies can move all rows; otherwise 0.
  int32_t bulk_bytes = 0;
  // begin(begin_of) is called after the index is written and before rows move; may be null. Not a
  // std::function, because every file with kernels would include its header.
  void (*begin)(const void*) = nullptr;
  const void* begin_of = nullptr;

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

// Whether a new id with this score is refused if the lowest rank is `lowest`.
HKV_HOST_DEVICE bool is_outranked(const TableView& table, RefuseLower refuse, uint64_t score,
                                  uint32_t now, uint64_t lowest) {
  const Ranking ranking = table.ranking();
  if (refuse == RefuseLower::kAll) return ranking.of(score, now) < lowest;
  return ranking.aged && ranking.replaced_by_new(score, now) < lowest;
}

// How an insertion places missing ids.
struct Placement {
  NewRows rows;
  RefuseLower refuse_lower;
  RowMatrix given_rows;  // rows of the call, by position; read if leavers are wanted
  Leavers leavers;
  // [positions]: whether the caller expects the id in the table before the call, or expects it to
  // be missing. Ids for which that is wrong are skipped: their slot is kSkipped. Null: no id is
  // skipped.
  const bool* believed = nullptr;
  // In host memory; its pointers are to the tables' device. Null: all ids are admitted.
  const Admissions* admissions = nullptr;
  MovingRows moving{};
  // Whether most ids are expected at one position only. Only speed depends on it.
  bool spread = false;
  // Whether a table of the group keeps scores.
  bool keeps_scores = true;
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

// How the ids of a bag are reduced.
struct Pooling {
  bool mean;             // divide by the bag's length
  const float* weights;  // [num_ids] or null
};

// The outputs of a batch, or their gradients: a matrix with one row for each sample and the columns
// of all features. If features have different numbers of bags, one matrix for each feature, one
// after the other. Char: char, or const char for reading.
template <typename Char>
struct Output {
  Char* data;
  int64_t stride;  // columns of all features; 0 if features have different numbers of bags
  RowType type;

  HKV_HOST_DEVICE Char* at(int64_t place) const { return data + place * element_size(type); }
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
struct Exported {
  int64_t* ids;
  RowMatrix rows;
  uint64_t* scores;
  RowMatrix states;  // float32
};

// Memory for entries that others replaced.
struct Displaced {
  int64_t* ids;
  char* rows;
  uint32_t* last_steps;
  uint64_t* scores;  // null under LRU
  float* states;
  uint64_t* counts;  // [2], zeros before the call: number of displaced entries, and of entries
                     // without a slot
};

}  // namespace torchrec_hkv::hash_table
