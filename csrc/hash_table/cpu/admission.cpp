#include <algorithm>
#include <cstring>
#include <vector>

#include "common/dtypes.h"
#include "common/parallel.h"
#include "hash_table/admission_kernels.h"
#include "hash_table/cpu/bucket.h"
#include "hash_table/cpu/row_matrix.h"

namespace torchrec_hkv::hash_table::cpu {
namespace {

// Calls visit_position for the positions of one table, in the order of the batch.
template <typename Function>
void for_each_position(const Batch& batch, int32_t table, const Function& visit_position) {
  for (int32_t feature = 0; feature < batch.num_features; ++feature) {
    if (batch.feature_tables[feature] != table) continue;
    const int64_t end = batch.feature_start(feature + 1);
    for (int64_t at = batch.feature_start(feature); at < end; ++at) visit_position(at);
  }
}

// The number of occurrences of each missing id of a call, in the order of first occurrence.
class OccurrenceCounts {
 public:
  struct CountedId {
    int64_t id;
    uint64_t times;
    bool admitted;
  };

  // Counts an id; returns its index.
  int64_t add(int64_t id) {
    if (2 * ids.size() >= index_.size()) grow();
    const size_t entry = find_index(id);
    if (index_[entry] == 0) {
      ids.push_back(CountedId{id, 0, false});
      index_[entry] = ids.size();
    }
    ++ids[index_[entry] - 1].times;
    return static_cast<int64_t>(index_[entry]) - 1;
  }

  std::vector<CountedId> ids;

 private:
  size_t find_index(int64_t id) const {
    const size_t mask = index_.size() - 1;
    size_t entry = mix64(static_cast<uint64_t>(id)) & mask;
    while (index_[entry] != 0 && ids[index_[entry] - 1].id != id) entry = (entry + 1) & mask;
    return entry;
  }
  void grow() {
    index_.assign(std::max<size_t>(1024, 2 * index_.size()), 0);
    for (size_t i = 0; i < ids.size(); ++i) index_[find_index(ids[i].id)] = i + 1;
  }

  std::vector<size_t> index_;  // 1 + index, 0: free; at most half of them taken
};

// Adds to an id's count. Returns whether the id is admitted; if so, its cell is freed.
bool count_in_cell(const Admission& admission, int64_t id, uint64_t times, uint32_t now) {
  CountCell* cells = admission.cells + set_of(admission, id) * kCellsOfSet;
  CountCell* chosen = nullptr;
  for (CountCell* cell = cells; cell < cells + kCellsOfSet; ++cell) {
    if (cell->meta != 0 && cell->id == id) {
      const uint64_t sum = cell_count(cell->meta) + times;
      const bool admitted = sum >= admission.count;
      cell->meta = admitted ? 0 : cell_meta(sum, now);
      return admitted;
    }
    // Cells that this call has counted are not replaced. A free cell is lower than all others.
    if (cell_step(cell->meta) == now) continue;
    if (chosen == nullptr || replaced_before(cell->meta, chosen->meta)) chosen = cell;
  }
  if (times >= admission.count) return true;
  if (chosen != nullptr) *chosen = CountCell{id, cell_meta(times, now)};
  return false;
}

void count_in_sketch(const Admission& admission, int64_t id) {
  for (int row = 0; row < kSketchRows; ++row) {
    const uint64_t cell = sketch_cell(admission, id, row);
    uint32_t& word = admission.sketch[sketch_word(admission, cell)];
    word = sketch_sum(admission, word, sketch_shift(admission, cell), 1);
  }
}

void admit_table(const TableView& table, const Admission& admission, int32_t table_index,
                 const Batch& batch, const CallContext& context, int64_t* slots) {
  OccurrenceCounts occurrences;
  if (admission.kind == AdmissionKind::kCounted) {
    for_each_position(batch, table_index, [&](int64_t at) {
      if (slots[at] == kNoSlot) slots[at] = kNoSlot - 1 - occurrences.add(batch.ids[at]);
    });
    for (OccurrenceCounts::CountedId& counted : occurrences.ids) {
      counted.admitted = count_in_cell(admission, counted.id, counted.times, context.now());
    }
  } else if (admission.kind == AdmissionKind::kSketched) {
    for_each_position(batch, table_index, [&](int64_t at) {
      if (slots[at] == kNoSlot) count_in_sketch(admission, batch.ids[at]);
    });
  }
  uint64_t unadmitted = 0;
  for_each_position(batch, table_index, [&](int64_t at) {
    if (slots[at] > kNoSlot) return;
    const int64_t id = batch.ids[at];
    const bool admitted = admission.kind == AdmissionKind::kCounted
                              ? occurrences.ids[kNoSlot - 1 - slots[at]].admitted
                          : admission.kind == AdmissionKind::kSketched
                              ? sketch_admits(admission, id)
                              : drawn(admission, id, context.now());
    slots[at] = admitted ? kNoSlot : kNotAdmitted;
    unadmitted += !admitted;
  });
  count(table, kUnadmitted, unadmitted);
}

}  // namespace

void admit(const TableView* tables, const Batch& batch, const CallContext& context,
           const Admissions& admissions, int64_t* slots, int threads) {
  // One thread for each table, because the assignment of cells depends on the order.
  parallel_for(admissions.num_tables, 1, threads, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const Admission& admission = admissions.of_tables[t];
      if (admission.kind == AdmissionKind::kEvery) continue;
      admit_table(tables[t], admission, static_cast<int32_t>(t), batch, context, slots);
    }
  });
}

void finish_admission(const TableView* tables, const Batch& batch, const CallContext& context,
                      const Placement& placement, int64_t* slots, int threads) {
  const EvictedEntries& evicted = placement.evicted_entries;
  if (evicted.number == nullptr) {
    parallel_for(batch.num_ids, 1 << 16, threads, [&](int64_t begin, int64_t end) {
      std::replace(slots + begin, slots + end, kNotAdmitted, kNoSlot);
    });
    return;
  }
  const RowMatrix& given = placement.given_rows;
  for (int64_t at = 0; at < batch.num_ids; ++at) {
    if (slots[at] != kNotAdmitted) continue;
    const int32_t index = batch.feature_tables[batch.feature_of(at)];
    const TableView& table = tables[index];
    slots[at] = kNoSlot;
    const uint64_t to = (*evicted.number)++;
    evicted.ids[to] = batch.ids[at];
    evicted.scores[to] =
        first_score(table.eviction, context.now(), context.epoch(), context.given(at));
    if (evicted.tables != nullptr) evicted.tables[to] = index;
    copy_to_matrix(evicted.rows, static_cast<int64_t>(to), given.type, given.at(at), table.dim());
  }
}

void halve_counts(const Admissions& admissions, const CallContext& context, int threads) {
  for (int32_t t = 0; t < admissions.num_tables; ++t) {
    const Admission& admission = admissions.of_tables[t];
    if (admission.halve_every == 0 || context.now() % admission.halve_every != 0) continue;
    parallel_for(halved_parts(admission), 1 << 16, threads, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) halve_part(admission, i);
    });
  }
}

}  // namespace torchrec_hkv::hash_table::cpu
