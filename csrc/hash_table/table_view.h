// A hash table as kernels see it: raw pointers, owned by someone else.
//
// Layout. A table is an array of buckets. A bucket has up to 64 slots; its 64 digests of 16 bits
// fill one 128-byte line, so that one line tells which slots may hold an id. A slot's id, step,
// score, row and optimizer state lie in arrays of their own at the slot's number,
// bucket * bucket_slots + position; on a GPU ids and steps are packed (packed_entries.h). Every id
// has two candidate buckets; nothing moves once placed, so a slot number stays valid until its id
// is evicted. Emptiness is told by the digest, never by an id: every 64-bit id is legal.
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
#include "hash_table/evicted_memory.h"
#include "hash_table/frames.h"
#include "hash_table/miniatures.h"
#include "hash_table/packed_entries.h"
#include "hash_table/row_matrix.h"

namespace torchrec_hkv::hash_table {

constexpr int64_t kNoSlot = -1;
constexpr int64_t kPassedOver = INT64_MAX;  // see Placement

// Device counters of a table, counted since it was made.
enum Counter : int32_t {
  kLookups = 0,      // ids of training lookups
  kMisses = 1,       // of these, not found at once
  kInserted = 2,     // ids placed
  kEvicted = 3,      // of these, in the place of another id
  kRefused = 4,      // ids of training lookups that found no place
  kUnadmitted = 5,   // ids of training lookups that were not admitted (admission.h)
  kExpired = 6,      // entries that left for their age (expiry.h)
  kFetched = 7,      // rows that came from host memory into a frame (frames.h)
  kWrittenHome = 8,  // rows that were written to host memory because others took their frames
  // Of kRefused, those whose buckets are full of pinned entries. Copies within a call count or not.
  kCrowded = 9,
  // Ids of training lookups whose row was read in host memory, where the table has frames.
  kHostHits = 10,
  kReturned = 11,  // of kInserted, ids that the table remembers as evicted (evicted_memory.h)
  kNumCounters = 12,
};

// Vectors of one kind, by slot, and, where the table has frames, by frame.
struct RowStore {
  char* homes;   // [num_slots][width], in host memory where there are frames for them
  char* frames;  // [num frames][width]; null: all are at home, whether their slots have frames
  int32_t width;
  RowType type;

  HKV_HOST_DEVICE int64_t bytes() const { return row_size(type, width); }
  // Elements of a tensor that holds such a vector as it is stored.
  int64_t stored_width() const { return bytes() / element_size(type); }
  // frame: of the slot, or kNoFrame.
  HKV_HOST_DEVICE char* at(int64_t slot, int64_t frame) const {
    return frame == kNoFrame || frames == nullptr ? homes + slot * bytes()
                                                  : frames + frame * bytes();
  }
  // Whether they come into frames and leave them.
  HKV_HOST_DEVICE bool moves() const { return width > 0 && frames != nullptr; }
};

struct TableView {
  uint16_t* digests;     // [num_buckets][64]
  int64_t* ids;          // [num_slots]; null: packed
  uint32_t* last_steps;  // [num_slots] step of the last training lookup; null: packed
  // Both, of a GPU's table whose entries are packed: only the only one of its group, under LRU.
  PackedEntries entries;
  uint32_t*
      oldest;  // [num_buckets][kGroups] no entry of the group has an earlier last step; packed
  uint64_t* scores;       // [num_slots]; null under LRU, whose scores are the last steps
  AgedLfu* aged;          // on the table's device; null but under kAgedLfu
  Miniatures miniatures;  // under kAgedLfu, where they choose AgedLfu::c
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
  int32_t column_offset;  // of the table's first column, where columns are sharded
  bool homes_on_host;  // of a GPU's table: whether rows are at home in host memory, which it never
                       // caches; states too, but where they are in HBM for all slots
  Eviction eviction;
  InitialRows initial_rows;

  HKV_HOST_DEVICE int32_t dim() const { return rows.width; }
  // Under kAgedLfu, at the start of a call with this step, before its lookups are counted.
  HKV_HOST_DEVICE void begin_aged_call(uint32_t now) const {
    const uint64_t counted = counters[kLookups];
    if (miniatures.entries != nullptr) miniatures.choose(counted, num_slots, &aged->c);
    aged->begin_call(now, counted, num_slots);
  }
  // How the table's entries rank in the present call.
  HKV_HOST_DEVICE Ranking ranking() const {
    return aged == nullptr ? Ranking{false, 0} : aged->ranking();
  }
  // Whether a slot, numbered through the group, is one of this table's; kNoSlot is none.
  HKV_HOST_DEVICE bool has(int64_t slot) const {
    return static_cast<uint64_t>(slot - first_slot) < static_cast<uint64_t>(num_slots);
  }
  // Whether what is in the frame, or, for kNoFrame, at home, is worth bringing into a GPU's cache.
  HKV_HOST_DEVICE bool in_hbm(int64_t frame) const { return frame != kNoFrame || !homes_on_host; }
  // Where they are now, to be read. What is written must be marked: cuda/frames.cuh.
  HKV_HOST_DEVICE char* row(int64_t slot) const { return rows.at(slot, frames.frame_of(slot)); }
  HKV_HOST_DEVICE float* state(int64_t slot) const {
    return reinterpret_cast<float*>(states.at(slot, frames.frame_of(slot)));
  }
};

// Which of a group's tables has a slot that is numbered through the group.
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

// How wide the rows of a table are, as far as kernels differ by it.
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

// Tables whose rows the same kernel serves: of one width class, and of the same number of bytes a
// column. Their numbers are bits of GroupShape::row_classes.
constexpr int32_t kRowClasses = 2 * kWidthClasses;
constexpr int32_t kAllRowClasses = -1;

// Rows of 8 bits are of the class of the widest of 16: what serves that reads rows of any type.
HKV_HOST_DEVICE constexpr int32_t row_class_of(int32_t dim, RowType type) {
  const WidthClass width = type == RowType::kInt8 ? WidthClass::kWider : width_class_of(dim);
  return static_cast<int32_t>(width) + (type == RowType::kFloat32 ? 0 : kWidthClasses);
}

// What kernels are chosen by.
struct GroupShape {
  int32_t widest;  // columns of the widest table
  bool four_wide;  // dims and state widths are multiples of four, or states have one value or none
  bool float32_rows;           // of all tables
  bool int8_rows = false;      // of some table
  int32_t features_apart = 0;  // features, where each has a table of its own; 0: some share one
  int64_t most_slots = 0;      // of one table, at its full capacity
  bool keeps_scores = false;   // of some table; the others evict by LRU
  uint32_t row_classes = 0;    // of its tables, a bit each: row_class_of

  bool rows_of_16_bits() const {  // of all tables
    return !int8_rows && row_classes != 0 && (row_classes & ((1u << kWidthClasses) - 1)) == 0;
  }
};

// How low an entry ranks: the lowest leaves a full bucket.
struct Rank {
  uint64_t score;  // what Ranking makes of the entry's score
  uint32_t last_step;

  HKV_HOST_DEVICE bool operator<(const Rank& other) const {
    return score != other.score ? score < other.score : last_step < other.last_step;
  }
};

// Where one feature's bags are, in a batch whose features differ in their numbers of bags.
struct FeatureBags {
  int64_t first;   // number of its first bag
  int64_t output;  // place of the first bag's outputs
  int64_t stride;  // from one bag's outputs to the next one's
};

// What a GPU says of offsets that it could not follow, in host memory that it can write.
struct BadOffsets {
  int64_t bag;
  int64_t from;  // where it begins
  int64_t to;    // where it ends
  int64_t num_ids;
  uint32_t found;  // the group's number, once the others are written
};

// The ids of one call: feature-major bags of the features of a group, in CSR form.
struct Batch {
  const int64_t* ids;              // [num_ids]
  const int64_t* offsets;          // [num_bags + 1], nondecreasing, from 0 to num_ids; null: one
                                   // feature, one bag
  const int32_t* feature_tables;   // [num_features] table of each feature
  const int32_t* feature_columns;  // [num_features] first column of each feature in the output
  int32_t num_features;
  int64_t batch_size;  // bags of each feature, unless they differ
  int64_t num_ids;
  int64_t num_bags;  // of all features
  // [num_features + 1], where features differ in their numbers of bags; the last has the totals.
  const FeatureBags* ragged = nullptr;
  // A GPU's: set, and the other written, once a kernel has seen offsets that are not as above.
  // Until the host has read them no rows are updated.
  uint32_t* refused = nullptr;
  BadOffsets* bad_offsets = nullptr;
  uint32_t group_number = 0;

  // Number of a feature's first bag; of num_features, that of all bags.
  HKV_HOST_DEVICE int64_t first_bag(int32_t feature) const {
    return ragged == nullptr ? feature * batch_size : ragged[feature].first;
  }
  HKV_HOST_DEVICE int32_t feature_of_bag(int64_t bag) const {
    // Numbers of bags fit 32 bits, whose division is much quicker.
    if (ragged == nullptr) return static_cast<uint32_t>(bag) / static_cast<uint32_t>(batch_size);
    int32_t low = 0, high = num_features;
    while (high - low > 1) {
      const int32_t middle = (low + high) >> 1;
      (ragged[middle].first <= bag ? low : high) = middle;
    }
    return low;
  }
  // Place of the outputs of a feature's bag in an output of this stride; where features differ in
  // their numbers of bags, each feature's are together.
  HKV_HOST_DEVICE int64_t output_of(int32_t feature, int64_t bag_of_feature, int64_t stride) const {
    if (ragged == nullptr) return bag_of_feature * stride + feature_columns[feature];
    return ragged[feature].output + bag_of_feature * ragged[feature].stride;
  }
  // From there to those of the feature's next bag.
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

// What leaves a table, or is refused, while others are inserted. Null pointers: not wanted.
struct Leavers {
  int64_t* ids;
  RowMatrix rows;
  uint64_t* scores;
  uint64_t* number;  // device counter
  int32_t* tables;   // of each leaver, its table's index; null: not wanted
};

// What becomes of the rows of new ids.
enum class NewRows : int32_t {
  kUntouched = 0,   // left for the caller to write
  kUniform = 1,     // the initial row, in tables whose initial rows are all uniform
  kInitial = 2,     // the initial row of any distribution
  kInitialAny = 3,  // the same, in tables some of which have rows of 8 bits
};

struct Admissions;  // admission.h

// Of a group one of whose tables has frames, what it takes to move rows into them. CUDA only.
struct MovingRows {
  int64_t group_slots = 0;  // 0: no table has frames
  int32_t num_tables = 0;
  // Bytes of the widest row, where bulk copies can move all of them; otherwise 0.
  int32_t bulk_bytes = 0;
  // begin(begin_of) is called when the index is written, before rows move. Null: nothing is. No
  // std::function, whose header each file with kernels would read.
  void (*begin)(const void*) = nullptr;
  const void* begin_of = nullptr;

  bool any() const { return group_slots > 0; }
  // Shorter rows are left to the lanes of warps, which have more of them under way.
  static bool move_in_bulk(int64_t row_bytes) {
    return row_bytes % 16 == 0 && row_bytes >= 256 && row_bytes <= 2048;
  }
};

// Which new ids are refused if all entries that they could replace rank above them.
enum class RefuseLower : uint8_t {
  kAged,  // those of tables that rank by decayed counts, with kGraceHalfLives
  kAll,
};

// Whether a new id of this score is refused rather than replace an entry of rank `lowest`.
HKV_HOST_DEVICE bool is_outranked(const TableView& table, RefuseLower refuse, uint64_t score,
                                  uint32_t now, uint64_t lowest) {
  const Ranking ranking = table.ranking();
  if (refuse == RefuseLower::kAll) return ranking.of(score, now) < lowest;
  return ranking.aged && ranking.replaced_by_new(score, now) < lowest;
}

// How ids that are missing are placed.
struct Placement {
  NewRows rows;
  RefuseLower refuse_lower;
  RowMatrix given_rows;  // by position, what ids came with; read where leavers are wanted
  Leavers leavers;
  // [positions], what the caller believes of each id: that it is in the table before the call, or
  // that it is not. Ids of which that is wrong are skipped: their slot is kPassedOver. Null:
  // all ids are taken.
  const bool* believed = nullptr;
  // In host memory, what it points to on the tables' device. Null: all ids are admitted.
  const Admissions* admissions = nullptr;
  MovingRows moving{};
  // Whether most ids are expected to stand at one position of the batch. Only speed depends on it.
  bool spread = false;
  // Whether a table of the group keeps scores.
  bool keeps_scores = true;
  // Whether a table of the group has miniatures.
  bool simulates = false;
  // Whether a table of the group remembers what it evicts.
  bool remembers = false;
  // Whether one gives counts back to ids that return; only where ids are placed in order.
  bool restores = false;
  // Whether ids are placed in the order of the batch, so that a call's result follows from the
  // table and the batch alone. CUDA only: on a CPU it always does.
  bool ordered = false;
};

// How the ids of a bag are reduced.
struct Pooling {
  bool mean;             // divide by the bag's length
  const float* weights;  // [num_ids] or null
};

// The outputs of a batch, or their gradients. A matrix with a row a sample, the features' columns
// side by side; where features differ in their numbers of bags, a matrix for each, one after the
// other. Char: char, or const char where it is read.
template <typename Char>
struct Output {
  Char* data;
  int64_t stride;  // columns of all features; 0 where features differ in their numbers of bags
  RowType type;

  HKV_HOST_DEVICE Char* at(int64_t place) const { return data + place * element_size(type); }
};

// Entries with all that a table keeps of them, as a file holds them.
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

// Which entries of a group's tables are meant: those that meet every condition.
struct Selection {
  // [num_tables] where the table's slots begin in the answer; -1: none of it is meant.
  const int64_t* starts;
  uint64_t score_at_least;
  uint64_t score_at_most;
  int64_t touched_before;  // the step of an entry's last touch is lower than this

  HKV_HOST_DEVICE bool meets(uint16_t digest, uint64_t score, uint32_t last_step) const {
    return digest != kEmptyDigest && digest != kClosedDigest && score >= score_at_least &&
           score <= score_at_most && static_cast<int64_t>(last_step) < touched_before;
  }
};

// Entries as they are given back, [n] each.
struct Exported {
  int64_t* ids;
  RowMatrix rows;
  uint64_t* scores;
  RowMatrix states;  // float32
};

// Room for entries that others took the place of.
struct Displaced {
  int64_t* ids;
  char* rows;
  uint32_t* last_steps;
  uint64_t* scores;  // null under LRU
  float* states;
  uint64_t* counts;  // [2], zeros before the call: the displaced, and those that found no place
};

}  // namespace torchrec_hkv::hash_table
