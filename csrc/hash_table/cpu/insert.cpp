#include <algorithm>
#include <atomic>
#include <memory>
#include <thread>
#include <vector>

#include "common/parallel.h"
#include "hash_table/admission_kernels.h"
#include "hash_table/aging.h"
#include "hash_table/cpu/bucket.h"
#include "hash_table/cpu/find.h"
#include "hash_table/cpu/highest_given.h"
#include "hash_table/cpu/miniatures.h"
#include "hash_table/cpu/missing_ids.h"
#include "hash_table/cpu/new_rows.h"
#include "hash_table/cpu/place.h"
#include "hash_table/cpu/row_matrix.h"
#include "hash_table/cpu/victims.h"
#include "hash_table/kernels.h"

namespace torchrec_hkv::hash_table::cpu {
namespace {

struct SlotChoice {
  int64_t slot;  // kNoSlot: none
  bool evicts;
  bool outranked;  // the score is too low for any slot
};

// Writes all but the row and the state, which follow when all ids are placed.
void place_new(const TableView& table, int64_t id, const BucketChoice& choice, int64_t slot,
               uint32_t step, uint64_t score) {
  // Avoids a division, which takes as long as a cache miss.
  const int64_t in_first = slot - first_slot_of(table, choice.first);
  const bool is_first = in_first >= 0 && in_first < table.bucket_slots;
  const uint32_t bucket = is_first ? choice.first : choice.second;
  const int64_t position = slot - first_slot_of(table, bucket);
  table.digests[int64_t{bucket} * kBucketDigests + position] = choice.digest;
  table.ids[slot] = id;
  set_step_and_score(table, slot, step, keeps_scores(table.eviction) ? &score : nullptr);
}

// What a missing id evicted: the entry that it replaced, or the id itself.
struct EvictedEntry {
  int64_t id;
  uint64_t score;
  int32_t table;
  bool is_valid;      // false: nothing left
  const char* row;    // of an entry, in its table; null: the id itself was refused
  uint32_t position;  // of the missing id
};

// What the placement of an id reads of its two buckets.
enum class Reach { kFirst, kSecond, kRanks };

struct InsertCounts {
  uint64_t inserted = 0, evicted = 0, refused = 0, crowded = 0;
};

// Places missing ids as one thread would in the order of the batch. Threads take groups in that
// order, and an id waits for the last id of an earlier group that may look at its buckets. Ids of
// the first unfinished group wait for none, so there is always progress.
class MissingIdPlacer {
 public:
  MissingIdPlacer(const TableView* tables, const Batch& batch, const CallContext& context,
                  const Placement& placement, const MissingIds& missing, int64_t* slots,
                  EvictedEntry* evicted)
      : tables_(tables),
        batch_(batch),
        context_(context),
        placement_(placement),
        missing_(missing),
        slots_(slots),
        evicted_(evicted),
        highest_(batch, context, slots),
        victims_(tables, batch, missing.size(), context.pinned_from()),
        finished_(missing.groups()) {}

  void run(int threads) {
    const int64_t workers = std::min<int64_t>(threads, missing_.groups());
    parallel_for(workers, 1, threads, [this](int64_t, int64_t) { work(); });
  }

 private:
  void work() {
    const int64_t groups = missing_.groups();
    std::vector<InsertCounts> counts(1);
    int64_t finished = 0;  // finished groups from the first on
    Reach reach = Reach::kFirst;
    int64_t group = next_.fetch_add(1, std::memory_order_relaxed);
    if (group < groups) {
      for (const MissingId* it = missing_.begin(group); it != missing_.end(group); ++it) {
        prefetch_buckets(*it, reach);
      }
    }
    while (group < groups) {
      const int64_t following = next_.fetch_add(1, std::memory_order_relaxed);
      while (finished < group && finished_[finished].load(std::memory_order_acquire)) ++finished;
      const auto known = static_cast<uint32_t>(finished * MissingIds::kGroup);
      reach = insert_group(group, following, known, reach, counts);
      finished_[group].store(true, std::memory_order_release);
      group = following;
    }
    for (size_t t = 0; t < counts.size(); ++t) {
      count(tables_[t], kInserted, counts[t].inserted);
      count(tables_[t], kEvicted, counts[t].evicted);
      count(tables_[t], kRefused, counts[t].refused);
      count(tables_[t], kCrowded, counts[t].crowded);
    }
  }

  // known: the thread has seen that all ids before this one are placed.
  void wait_for(uint32_t earlier, uint32_t known) const {
    if (earlier == kNone || earlier < known) return;
    const std::atomic_ref<bool> done(missing_.begin()[earlier].done);
    for (int tries = 0; !done.load(std::memory_order_acquire); ++tries) {
      if (tries > 1000) std::this_thread::yield();
    }
  }

  // Places a group and prefetches the next group's buckets, one id at a time, because processors
  // drop prefetches that come in bursts. Returns the farthest reach of its ids.
  Reach insert_group(int64_t group, int64_t following, uint32_t known, Reach reach,
                     std::vector<InsertCounts>& counts) {
    constexpr int64_t kAhead = 6;
    MissingId* const first = missing_.begin(group);
    const int64_t n = missing_.end(group) - first;
    const bool more = following < missing_.groups();
    const int64_t next = more ? missing_.end(following) - missing_.begin(following) : 0;
    int64_t seen[MissingIds::kGroup];
    uint64_t ranks[MissingIds::kGroup];
    Reach farthest = Reach::kFirst;
    for (int64_t i = 0; i < n + kAhead; ++i) {
      if (i < next) prefetch_buckets(missing_.begin(following)[i], reach);
      if (i < n) {
        wait_for(first[i].after_first, known);
        wait_for(first[i].after_second, known);
        const Victim victim = prefetch_slot(first[i], farthest);
        seen[i] = victim.slot;
        ranks[i] = victim.rank.score;
      }
      if (i < kAhead) continue;
      MissingId& it = first[i - kAhead];
      insert_missing(it, seen[i - kAhead], ranks[i - kAhead], counts);
      std::atomic_ref<bool>(it.done).store(true, std::memory_order_release);
    }
    return farthest;
  }

  void prefetch_buckets(const MissingId& it, Reach reach) const {
    const TableView& table = tables_[it.table];
    prefetch_line(table, it.choice.first);
    if (reach == Reach::kFirst) return;
    prefetch_line(table, it.choice.second);
    if (reach == Reach::kSecond) return;
    victims_.prefetch(it.table, it.choice);
  }

  // Prefetches the slot that an id is likely to get. Returns it if another id has it; otherwise no
  // slot.
  Victim prefetch_slot(const MissingId& it, Reach& farthest) {
    const TableView& table = tables_[it.table];
    const uint64_t free_first = free_positions(table, it.choice.first);
    const int64_t free = free_slot(table, it.choice, free_first);
    if (!takes_first(table, free_first)) {
      farthest = std::max(farthest, free != kNoSlot ? Reach::kSecond : Reach::kRanks);
    }
    const Victim victim =
        free != kNoSlot ? Victim{kNoSlot, {}} : victims_.lowest(it.table, it.choice);
    const int64_t slot = free != kNoSlot ? free : victim.slot;
    if (slot != kNoSlot) {
      __builtin_prefetch(&table.ids[slot], 1);
      for_touched(table, slot, [](const void* choice) { __builtin_prefetch(choice, 1); });
    }
    return victim;
  }

  void insert_missing(MissingId& it, int64_t seen, uint64_t rank,
                      std::vector<InsertCounts>& counts) {
    const TableView& table = tables_[it.table];
    if (counts.size() <= static_cast<size_t>(it.table)) counts.resize(it.table + 1);
    InsertCounts& counted = counts[it.table];
    const int64_t id = batch_.ids[it.position];
    const uint64_t given = context_.given(it.position);
    // An earlier position of this batch may have placed the id.
    const uint64_t free_first = free_positions(table, it.choice.first);
    int64_t slot = takes_first(table, free_first)
                       ? find_in_bucket(table, id, it.choice.first, it.choice.digest)
                       : find_slot(table, id, it.choice);
    if (slot != kNoSlot) {
      touch(table, slot, context_, given);
    } else {
      const uint64_t score = first_score(table.eviction, context_.now(), context_.epoch(), given);
      SlotChoice choice = choose_place(it, score, free_first, seen, rank);
      if (choice.outranked && context_.scores != nullptr) {
        const uint64_t best = first_score(table.eviction, context_.now(), context_.epoch(),
                                          highest_.of(it.table, id));
        choice = choose_place(it, best, free_first, seen, rank);
      }
      if (choice.slot == kNoSlot) {
        ++counted.refused;
        counted.crowded += !choice.outranked;
        if (evicted_ != nullptr) record_evicted(it, id, score, nullptr);
        return;
      }
      slot = choice.slot;
      if (choice.evicts) {
        if (evicted_ != nullptr) {
          record_evicted(it, table.ids[slot], score_of(table, slot), table.row(slot));
        }
        victims_.remove(it.table, slot);
      }
      place_new(table, id, it.choice, slot, context_.now(), score);
      it.placed = true;
      ++counted.inserted;
      counted.evicted += choice.evicts;
    }
    slots_[it.position] = table.first_slot + slot;
  }

  // seen, rank: the victim that prefetch_slot found, or no slot. Entries touched since then are
  // pinned, so it is still the victim unless it is pinned.
  SlotChoice choose_place(const MissingId& it, uint64_t new_score, uint64_t free_first,
                          int64_t seen, uint64_t rank) {
    const TableView& table = tables_[it.table];
    const int64_t free = free_slot(table, it.choice, free_first);
    if (free != kNoSlot) return SlotChoice{free, false, false};
    if (seen == kNoSlot || step_of(table, seen) >= context_.pinned_from()) {
      const Victim victim = victims_.lowest(it.table, it.choice);
      seen = victim.slot;
      rank = victim.rank.score;
    }
    const bool outranked = seen != kNoSlot && is_outranked(table, placement_.refuse_lower,
                                                           new_score, context_.now(), rank);
    return SlotChoice{outranked ? kNoSlot : seen, true, outranked};
  }

  void record_evicted(const MissingId& it, int64_t id, uint64_t score, const char* row) const {
    evicted_[&it - missing_.begin()] = EvictedEntry{id, score, it.table, true, row, it.position};
  }

  const TableView* tables_;
  const Batch& batch_;
  const CallContext& context_;
  const Placement& placement_;
  const MissingIds& missing_;
  int64_t* slots_;
  EvictedEntry* evicted_;  // by missing id; null: not wanted
  HighestGiven highest_;
  Victims victims_;
  std::vector<std::atomic<bool>> finished_;  // by group
  std::atomic<int64_t> next_{0};
};

// If Placement::expected_present is given: touches ids that are there as expected, and skips ids
// for which that is wrong.
void find_expected(const TableView* tables, const Batch& batch, const CallContext& context,
                   const bool* expected_present, int64_t* slots, bool* found, int threads) {
  find(tables, batch, slots, threads);
  for (int64_t at = 0; at < batch.num_ids; ++at) {
    const TableView& table = tables[batch.feature_tables[batch.feature_of(at)]];
    const bool present = slots[at] != kNoSlot;
    if (found != nullptr) found[at] = present;
    if (present != expected_present[at]) {
      slots[at] = kSkipped;
      continue;
    }
    count(table, kLookups, 1);
    count(table, kMisses, !present);
    if (present) touch(table, slots[at] - table.first_slot, context, context.given(at));
  }
}

// Returns evicted and refused entries, in the order of the batch.
void write_evicted(const TableView* tables, const std::vector<EvictedEntry>& all,
                   const Placement& placement, int threads) {
  std::vector<EvictedEntry> entries;
  std::copy_if(all.begin(), all.end(), std::back_inserter(entries),
               [](const EvictedEntry& entry) { return entry.is_valid; });
  const EvictedEntries& out = placement.evicted_entries;
  const RowMatrix& given = placement.given_rows;
  const uint64_t first = *out.number;
  parallel_for(static_cast<int64_t>(entries.size()), 256, threads, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const EvictedEntry& entry = entries[i];
      const RowStore& rows = tables[entry.table].rows;
      out.ids[first + i] = entry.id;
      out.scores[first + i] = entry.score;
      if (out.tables != nullptr) out.tables[first + i] = entry.table;
      const char* const row = entry.row != nullptr ? entry.row : given.at(entry.position);
      const RowType type = entry.row != nullptr ? rows.type : given.type;
      copy_to_matrix(out.rows, static_cast<int64_t>(first) + i, type, row, rows.width);
    }
  });
  *out.number = first + entries.size();
}

// Counts the placed ids that their table remembers as evicted, and restores half of their counts if
// it remembers these. Then remembers the ids that this call has evicted. The order of the batch
// decides, not the number of threads.
void remember_evicted(const TableView* tables, const Batch& batch, const CallContext& context,
                      const MissingIds& missing, const int64_t* slots,
                      const std::vector<EvictedEntry>& replaced) {
  for (const MissingId* it = missing.begin(); it != missing.begin() + missing.size(); ++it) {
    const TableView& table = tables[it->table];
    const EvictedMemory& memory = table.evicted;
    if (!it->placed || memory.marks == nullptr) continue;
    const EvictedMemory::MarkPosition mark = memory.mark_position(batch.ids[it->position]);
    const bool returns = memory.marks[mark.entry] == mark.mark;
    count(table, kReturned, returns);
    if (!returns || memory.half_counts == nullptr) continue;
    const int64_t slot = slots[it->position] - table.first_slot;
    set_score(table, slot,
              next_score(table.eviction, score_of(table, slot), context.now(), context.epoch(),
                         memory.half_counts[mark.entry]));
  }
  for (int64_t i = 0; i < missing.size(); ++i) {
    const MissingId& it = missing.begin()[i];
    const EvictedMemory& memory = tables[it.table].evicted;
    if (!it.placed || !replaced[i].is_valid || memory.marks == nullptr) continue;
    const EvictedMemory::MarkPosition mark = memory.mark_position(replaced[i].id);
    memory.marks[mark.entry] = mark.mark;
    if (memory.half_counts == nullptr) continue;
    memory.half_counts[mark.entry] =
        EvictedMemory::half_count_of(tables[it.table].eviction, replaced[i].score);
  }
}

// Admits ids that a find missed, places them and gives them rows.
void insert_all_missing(const TableView* tables, const Batch& batch, const CallContext& context,
                        const Placement& placement, int64_t* slots, int threads) {
  if (placement.admissions != nullptr) {
    admit(tables, batch, context, *placement.admissions, slots, threads);
  }
  const MissingIds missing(tables, batch, slots, threads);
  const bool wanted = placement.evicted_entries.number != nullptr;
  const bool noted = wanted || placement.remembers;
  std::vector<EvictedEntry> evicted(noted ? missing.size() : 0, EvictedEntry{});
  MissingIdPlacer(tables, batch, context, placement, missing, slots,
                  noted ? evicted.data() : nullptr)
      .run(threads);
  if (placement.remembers) remember_evicted(tables, batch, context, missing, slots, evicted);
  // Before new rows overwrite those of evicted entries.
  if (wanted && missing.size() > 0) {
    write_evicted(tables, evicted, placement, threads);
  }
  initialize_rows(tables, batch, missing, slots, placement.rows != NewRows::kUntouched, threads);
  if (placement.admissions != nullptr) {
    finish_admission(tables, batch, context, placement, slots, threads);
  }
}

}  // namespace

void find_or_insert(const TableView* tables, const Batch& batch, const CallContext& context,
                    const Aging& aging, const Placement& placement, int64_t* slots, bool* found,
                    int threads) {
  age(tables, aging, context, threads);
  if (aging.ages_counts && batch.num_ids > 0) begin_aged_call(tables, aging.num_tables, context);
  bool all_found = false;
  if (placement.expected_present == nullptr) {
    all_found = find_and_touch(tables, batch, context, slots, found, threads) == 0;
  } else {
    find_expected(tables, batch, context, placement.expected_present, slots, found, threads);
  }
  if (!all_found) insert_all_missing(tables, batch, context, placement, slots, threads);
  if (placement.simulates) simulate(tables, batch, context, threads);
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
