// Admission decides which missing ids get a slot. This file has what both devices must agree on.
//
// An insertion first finds its ids. Then admission marks the positions whose ids are not admitted;
// placement skips them, and they end without a slot. All positions of an id in one call are decided
// alike: the call's occurrences are counted before any id is decided.
#pragma once

#include <cstdint>
#include <limits>

#include "common/hashing.h"
#include "common/macros.h"

namespace torchrec_hkv::hash_table {

// The slot of a position whose id was not admitted, until the ids of the call have been placed.
constexpr int64_t kNotAdmitted = std::numeric_limits<int64_t>::min();

enum class AdmissionKind : int32_t {
  kEvery = 0,        // every id
  kCounted = 1,      // ids that occurred often enough, counted in cells
  kSketched = 2,     // ids that occurred often enough, counted in a count-min sketch
  kProbability = 3,  // each missing id with a probability, drawn in each call
};

// The count of one id. The cells of one set, which is one line of memory, may hold an id.
struct CountCell {
  int64_t id;
  // The number of occurrences in the low 32 bits and the step of the last one in the high 32 bits;
  // 0 if the cell is free. So every int64 is a legal id, and one compare-and-swap claims a cell.
  uint64_t meta;
};
constexpr int kCellsOfSet = 8;

HKV_HOST_DEVICE uint64_t cell_meta(uint64_t count, uint32_t step) {
  return static_cast<uint64_t>(step) << 32 | (count > 0xffffffffull ? 0xffffffffull : count);
}
HKV_HOST_DEVICE uint32_t cell_count(uint64_t meta) { return static_cast<uint32_t>(meta); }
HKV_HOST_DEVICE uint32_t cell_step(uint64_t meta) { return static_cast<uint32_t>(meta >> 32); }

// Whether a cell with the meta `a` is replaced before one with `b`: the lower count, then the older
// last occurrence.
HKV_HOST_DEVICE bool replaced_before(uint64_t a, uint64_t b) {
  return cell_count(a) != cell_count(b) ? cell_count(a) < cell_count(b)
                                        : cell_step(a) < cell_step(b);
}

// A count-min sketch (Cormode, Muthukrishnan 2005). An id is counted in one cell of each row, and
// its count is the lowest of these cells. With four rows the count is too high by more than e times
// an average cell with a probability of e^-4, 1.8 %. Each further row costs one random read.
constexpr int kSketchRows = 4;

struct Admission {
  AdmissionKind kind;
  uint32_t count;  // occurrences that an id needs
  CountCell* cells;
  uint64_t num_sets;
  uint32_t* sketch;       // [kSketchRows][sketch_width] cells, several in one word
  uint64_t sketch_width;  // cells of a row
  int32_t sketch_bits;    // of a cell, 8 or 16; a full cell stays full
  uint32_t halve_every;   // calls; 0: never
  double probability;
  uint64_t seed;  // of the table
};

// The admission of each table of a group.
struct Admissions {
  const Admission* of_tables;  // on the tables' device; null: every table admits every id
  bool counted;                // whether a table uses kCounted
  bool sketched;
  bool halved;
  int32_t num_tables;
};

HKV_HOST_DEVICE uint64_t set_of(const Admission& admission, int64_t id) {
  const uint64_t hash = mix64(static_cast<uint64_t>(id) ^ 0xbb67ae8584caa73bull);
  return (hash >> 32) * admission.num_sets >> 32;
}

// Number of the id's cell in one row, counted over all rows of the sketch.
HKV_HOST_DEVICE uint64_t sketch_cell(const Admission& admission, int64_t id, int row) {
  const uint64_t hash =
      mix64(mix64(static_cast<uint64_t>(id) ^ 0x3c6ef372fe94f82bull) + static_cast<uint64_t>(row));
  return static_cast<uint64_t>(row) * admission.sketch_width +
         ((hash >> 32) * admission.sketch_width >> 32);
}

HKV_HOST_DEVICE uint32_t sketch_limit(const Admission& admission) {
  return (1u << admission.sketch_bits) - 1;
}
// Word and shift of a cell.
HKV_HOST_DEVICE uint64_t sketch_word(const Admission& admission, uint64_t cell) {
  return cell * static_cast<uint64_t>(admission.sketch_bits) / 32;
}
HKV_HOST_DEVICE int sketch_shift(const Admission& admission, uint64_t cell) {
  return static_cast<int>(cell * static_cast<uint64_t>(admission.sketch_bits) % 32);
}
// A word after `by` was added to one of its cells.
HKV_HOST_DEVICE uint32_t sketch_sum(const Admission& admission, uint32_t word, int shift,
                                    uint32_t by) {
  const uint32_t limit = sketch_limit(admission);
  const uint32_t old = word >> shift & limit;
  const uint32_t sum = by > limit - old ? limit : old + by;
  return (word & ~(limit << shift)) | sum << shift;
}

// Units for halving the counts: a cell, or a word of a sketch.
HKV_HOST_DEVICE int64_t halved_parts(const Admission& admission) {
  if (admission.kind == AdmissionKind::kCounted) {
    return static_cast<int64_t>(admission.num_sets) * kCellsOfSet;
  }
  return static_cast<int64_t>(
      sketch_word(admission, static_cast<uint64_t>(kSketchRows) * admission.sketch_width));
}
HKV_HOST_DEVICE void halve_part(const Admission& admission, int64_t part) {
  if (admission.kind == AdmissionKind::kCounted) {
    uint64_t& meta = admission.cells[part].meta;
    const uint32_t count = cell_count(meta) / 2;
    meta = count == 0 ? 0 : cell_meta(count, cell_step(meta));
    return;
  }
  uint32_t& word = admission.sketch[part];
  word = word >> 1 & (admission.sketch_bits == 8 ? 0x7f7f7f7fu : 0x7fff7fffu);
}

// Whether a call admits an id by chance: a function of table, id and call only.
HKV_HOST_DEVICE bool drawn(const Admission& admission, int64_t id, uint32_t step) {
  const uint64_t key =
      mix64(admission.seed ^ mix64(static_cast<uint64_t>(id) + 0xa54ff53a5f1d36f1ull));
  const uint64_t draw = mix64(key ^ mix64(static_cast<uint64_t>(step) + 0x510e527fade682d1ull));
  return static_cast<double>(draw >> 11) * (1.0 / 9007199254740992.0) < admission.probability;
}

// Whether the sketch has counted an id often enough.
HKV_HOST_DEVICE bool sketch_admits(const Admission& admission, int64_t id) {
  for (int row = 0; row < kSketchRows; ++row) {
    const uint64_t cell = sketch_cell(admission, id, row);
    const uint32_t word = admission.sketch[sketch_word(admission, cell)];
    if ((word >> sketch_shift(admission, cell) & sketch_limit(admission)) < admission.count) {
      return false;
    }
  }
  return true;
}

}  // namespace torchrec_hkv::hash_table
