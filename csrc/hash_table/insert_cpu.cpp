#include <algorithm>
#include <cstring>
#include <vector>

#include "common/parallel.h"
#include "hash_table/admission_kernels.h"
#include "hash_table/aging.h"
#include "hash_table/bucket_cpu.h"
#include "hash_table/find_cpu.h"
#include "hash_table/highest_given_cpu.h"
#include "hash_table/kernels.h"
#include "hash_table/place_cpu.h"

namespace torchrec_hkv::hash_table::cpu {
namespace {

struct Place {
  int64_t slot;  // kNoSlot: none
  bool evicts;
  bool outranked;  // there is none for so low a score
};

Place choose_place(const TableView& table, const BucketChoice& choice, const Visit& visit,
                   bool refuse_lower, uint64_t own_score) {
  const int64_t free = free_slot(table, choice);
  if (free != kNoSlot) return Place{free, false, false};
  const Victim victim = lowest_rank(table, choice, visit.pinned_from());
  const bool outranked = refuse_lower && victim.slot != kNoSlot && own_score < victim.rank.score;
  return Place{outranked ? kNoSlot : victim.slot, true, outranked};
}

void write_initial_row(const TableView& table, int64_t id, char* row) {
  for_each_initial_value(
      table.initial_rows, id, static_cast<uint32_t>(table.column_offset), table.dim(),
      [&](int32_t c, float value) { store_element(table.rows.type, row, c, value); });
}

void place_new(const TableView& table, int64_t id, const BucketChoice& choice, int64_t slot,
               uint32_t step, uint64_t score, bool initialize) {
  const int64_t bucket = slot / table.bucket_slots;
  table.digests[bucket * kBucketDigests + slot % table.bucket_slots] = choice.digest;
  table.ids[slot] = id;
  table.last_steps[slot] = step;
  if (table.scores != nullptr) table.scores[slot] = score;
  if (initialize) write_initial_row(table, id, table.rows.row(slot));
  std::fill_n(table.state(slot), table.states.width, 0.0f);
}

void note_leaver(const TableView& table, const Leavers& leavers, int64_t id, uint64_t score,
                 const char* row) {
  if (leavers.number == nullptr) return;
  const uint64_t at = (*leavers.number)++;
  const int64_t bytes = static_cast<int64_t>(table.dim()) * element_size(table.rows.type);
  leavers.ids[at] = id;
  leavers.scores[at] = score;
  std::memcpy(leavers.rows + at * bytes, row, bytes);
}

// Places the ids of one table that the find phase missed, in the order of the batch.
void insert_missing(const TableView* tables, int32_t table_index, const Batch& batch,
                    const Visit& visit, const Placement& placement, int64_t* slots) {
  const TableView& table = tables[table_index];
  const int64_t row_bytes = static_cast<int64_t>(table.dim()) * element_size(table.rows.type);
  const bool initialize = placement.rows != NewRows::kUntouched;
  uint64_t inserted = 0, evicted = 0, refused = 0, crowded = 0;
  HighestGiven highest(batch, visit, slots);
  for (int32_t feature = 0; feature < batch.num_features; ++feature) {
    if (batch.feature_tables[feature] != table_index) continue;
    const int64_t end = batch.feature_start(feature + 1);
    for (int64_t at = batch.feature_start(feature); at < end; ++at) {
      if (slots[at] != kNoSlot) continue;
      const int64_t id = batch.ids[at];
      const uint64_t given = visit.given(at);
      const BucketChoice choice = choose_buckets(id, table.num_buckets);
      int64_t slot = find_slot(table, id, choice);
      if (slot != kNoSlot) {  // placed earlier in this batch
        touch(table, slot, visit, given);
      } else {
        const uint64_t score = first_score(table.eviction, visit.now(), visit.epoch(), given);
        Place place = choose_place(table, choice, visit, placement.refuse_lower, score);
        if (place.outranked && visit.scores != nullptr) {
          const uint64_t best =
              first_score(table.eviction, visit.now(), visit.epoch(), highest.of(id));
          place = choose_place(table, choice, visit, placement.refuse_lower, best);
        }
        if (place.slot == kNoSlot) {
          ++refused;
          crowded += !place.outranked;
          note_leaver(table, placement.leavers, id, score, placement.given_rows + at * row_bytes);
          continue;
        }
        slot = place.slot;
        if (place.evicts) {
          note_leaver(table, placement.leavers, table.ids[slot], rank_of(table, slot).score,
                      table.rows.row(slot));
        }
        place_new(table, id, choice, slot, visit.now(), score, initialize);
        ++inserted;
        evicted += place.evicts;
      }
      slots[at] = table.first_slot + slot;
    }
  }
  count(table, kInserted, inserted);
  count(table, kEvicted, evicted);
  count(table, kRefused, refused);
  count(table, kCrowded, crowded);
}

// Where Placement::believed is given: touches what is there and should be, and passes over ids that
// are not as believed.
void find_and_choose(const TableView* tables, const Batch& batch, const Visit& visit,
                     const bool* believed, int64_t* slots, bool* found, int threads) {
  find(tables, batch, slots, threads);
  for (int64_t at = 0; at < batch.num_ids; ++at) {
    const TableView& table = tables[batch.feature_tables[batch.feature_of(at)]];
    const bool there = slots[at] != kNoSlot;
    if (found != nullptr) found[at] = there;
    if (there != believed[at]) {
      slots[at] = kPassedOver;
      continue;
    }
    count(table, kLookups, 1);
    count(table, kMisses, !there);
    if (there) touch(table, slots[at] - table.first_slot, visit, visit.given(at));
  }
}

}  // namespace

void find_or_insert(const TableView* tables, const Batch& batch, const Visit& visit,
                    const Aging& aging, const Placement& placement, int64_t* slots, bool* found,
                    int threads) {
  age(tables, aging, visit, threads);
  if (placement.believed == nullptr) {
    find_and_touch(tables, batch, visit, slots, found, threads);
  } else {
    find_and_choose(tables, batch, visit, placement.believed, slots, found, threads);
  }
  if (placement.admissions != nullptr) {
    admit(tables, batch, visit, *placement.admissions, slots, threads);
  }
  std::vector<int32_t> used(batch.feature_tables, batch.feature_tables + batch.num_features);
  std::sort(used.begin(), used.end());
  used.erase(std::unique(used.begin(), used.end()), used.end());
  // One thread a table: placing depends on the order.
  parallel_for(static_cast<int64_t>(used.size()), 1, threads, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      insert_missing(tables, used[t], batch, visit, placement, slots);
    }
  });
  if (placement.admissions != nullptr) {
    finish_admission(tables, batch, visit, placement, slots, threads);
  }
}

int64_t rebuild_digests(const int64_t* ids, const uint8_t* occupied, uint32_t num_buckets,
                        int32_t bucket_slots, uint16_t* digests) {
  TableView table{};
  table.digests = digests;
  table.ids = const_cast<int64_t*>(ids);
  table.num_buckets = num_buckets;
  table.bucket_slots = bucket_slots;
  table.num_slots = static_cast<int64_t>(num_buckets) * bucket_slots;
  const auto digest_at = [&](int64_t slot) -> uint16_t& {
    return digests[slot / bucket_slots * kBucketDigests + slot % bucket_slots];
  };
  for (uint32_t bucket = 0; bucket < num_buckets; ++bucket) {
    uint16_t* line = digests + static_cast<int64_t>(bucket) * kBucketDigests;
    std::fill_n(line, bucket_slots, kEmptyDigest);
    std::fill(line + bucket_slots, line + kBucketDigests, kClosedDigest);
  }
  for (int64_t slot = 0; slot < table.num_slots; ++slot) {
    if (occupied[slot]) digest_at(slot) = choose_buckets(ids[slot], num_buckets).digest;
  }
  int64_t lost = 0;
  for (int64_t slot = 0; slot < table.num_slots; ++slot) {
    if (!occupied[slot]) continue;
    lost += find_slot(table, ids[slot], choose_buckets(ids[slot], num_buckets)) != slot;
  }
  return lost;
}

}  // namespace torchrec_hkv::hash_table::cpu
