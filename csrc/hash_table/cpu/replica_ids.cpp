// Merges the ids that replicas exchange in a sync, on the CPU.
#include "hash_table/replica_ids.h"

#include <algorithm>
#include <vector>

#include "hash_table/cpu/bucket.h"
#include "hash_table/kernels.h"

namespace torchrec_hkv::hash_table::cpu {
namespace {

constexpr int64_t kNotFound = -1;

// The slots of ids, counted from the table's first.
void find_ids(const TableView& table, const int64_t* ids, int64_t n, int64_t* slots, int threads) {
  const int32_t zero = 0;
  Batch batch{};
  batch.ids = ids;
  batch.feature_tables = batch.feature_columns = &zero;
  batch.num_features = 1;
  batch.batch_size = batch.num_bags = 1;
  batch.num_ids = n;
  find(&table, batch, slots, threads);
  for (int64_t i = 0; i < n; ++i) {
    if (slots[i] != kNoSlot) slots[i] -= table.first_slot;
  }
}

// Finds the ids that this replica touched by their slots. Its new ids are in the order of their
// slots, and so are its others.
class TouchedSlots {
 public:
  TouchedSlots(const TableView& table, const int64_t* slots, int64_t num_new, int64_t n)
      : slots_(slots), num_new_(num_new), n_(n), is_touched_((table.num_slots + 63) / 64) {
    for (int64_t i = 0; i < n; ++i) is_touched_[slots[i] / 64] |= uint64_t{1} << (slots[i] % 64);
  }

  static bool ascend(const int64_t* slots, int64_t num_new, int64_t n) {
    return std::is_sorted(slots, slots + num_new) && std::is_sorted(slots + num_new, slots + n);
  }

  // The index of the id in this slot, or kNotFound.
  int64_t find(int64_t slot) const {
    if (slot == kNoSlot || (is_touched_[slot / 64] >> (slot % 64) & 1) == 0) return kNotFound;
    const int64_t* const middle = slots_ + num_new_;
    const int64_t* at = std::lower_bound(slots_, middle, slot);
    if (at == middle || *at != slot) at = std::lower_bound(middle, slots_ + n_, slot);
    return at - slots_;
  }

 private:
  const int64_t* const slots_;
  const int64_t num_new_, n_;
  std::vector<uint64_t> is_touched_;
};

// merge_ids for two replicas from which no id has left. A lookup in the table tells which of the
// other replica's ids this one touched, too.
MergedCounts match_two(const TableView& table, const ReplicaIds& this_replica,
                       const ReplicaIds& other_replica, bool first, const int64_t* slots,
                       const MergedIds& out, int threads) {
  const int64_t n = this_replica.touched(), m = other_replica.touched();
  const TouchedSlots touched_slots(table, slots, this_replica.num_new, n);
  // This replica's ids come first if it is the first one, else the other's.
  std::vector<int64_t> at(m);  // of the other's ids, the index among this one's
  std::vector<int64_t> found(m);
  find_ids(table, other_replica.ids, m, found.data(), threads);
  for (int64_t j = 0; j < m; ++j) at[j] = touched_slots.find(found[j]);
  int64_t all = 0, absent = 0;
  std::fill_n(out.touched_indices, n, kNotFound);
  const auto append_mine = [&](int64_t i) {
    out.ids[all] = this_replica.ids[i];
    out.known[all] = i >= this_replica.num_new;
    out.touched[all] = true;
    out.is_new[all] = i < this_replica.num_new;
    out.slots[all] = slots[i];
    out.touched_indices[i] = all++;
  };
  const auto append_theirs = [&](int64_t j) {
    const bool is_mine = at[j] != kNotFound;
    out.ids[all] = other_replica.ids[j];
    out.known[all] = j >= other_replica.num_new || (is_mine && at[j] >= this_replica.num_new);
    out.touched[all] = is_mine;
    out.is_new[all] = is_mine && at[j] < this_replica.num_new;
    out.slots[all] = found[j];
    if (found[j] == kNoSlot) out.absent[absent++] = all;
    if (is_mine) out.touched_indices[at[j]] = all;
    ++all;
  };
  if (first) {
    for (int64_t i = 0; i < n; ++i) append_mine(i);
    for (int64_t j = 0; j < m; ++j) {
      if (at[j] == kNotFound) {
        append_theirs(j);
      } else {
        out.known[at[j]] |= j >= other_replica.num_new;
      }
    }
  } else {
    for (int64_t j = 0; j < m; ++j) append_theirs(j);
    for (int64_t i = 0; i < n; ++i) {
      if (out.touched_indices[i] == kNotFound) append_mine(i);
    }
  }
  return {all, 0, absent};
}

// Lists the distinct ids in the order of their first occurrence, and the index of each of `ids` in
// this list. n must be below 2^32 - 1. Returns the number of distinct ids.
int64_t distinct_ids(const int64_t* ids, int64_t n, int64_t* distinct, int64_t* touched_indices) {
  constexpr uint32_t kFree = UINT32_MAX;
  constexpr int64_t kIdsAhead = 8;
  uint64_t size = 16;
  while (size < 2 * static_cast<uint64_t>(n)) size *= 2;
  std::vector<uint32_t> table(size, kFree);  // the index of each id, near its hash
  const int shift = __builtin_clzll(size) + 1;
  const auto hash_index = [&](int64_t id) { return mix64(static_cast<uint64_t>(id)) >> shift; };
  uint64_t hash_indices[kIdsAhead];
  for (int64_t i = 0; i < std::min(n, kIdsAhead); ++i) hash_indices[i] = hash_index(ids[i]);
  uint32_t number = 0;
  for (int64_t i = 0; i < n; ++i) {
    uint64_t at = hash_indices[i % kIdsAhead];
    if (i + kIdsAhead < n) {
      const uint64_t ahead = hash_indices[i % kIdsAhead] = hash_index(ids[i + kIdsAhead]);
      prefetch_lines(&table[ahead], 1);
    }
    while (table[at] != kFree && distinct[table[at]] != ids[i]) at = (at + 1) & (size - 1);
    if (table[at] == kFree) {
      distinct[number] = ids[i];
      table[at] = number++;
    }
    touched_indices[i] = table[at];
  }
  return number;
}

// merge_ids for any number of replicas.
MergedCounts match_all(const TableView& table, const ReplicaIds* replicas, int64_t number,
                       int64_t own_index, const int64_t* slots, const MergedIds& out, int threads) {
  std::vector<int64_t> concatenated;
  for (int64_t r = 0; r < number; ++r) {
    concatenated.insert(concatenated.end(), replicas[r].ids, replicas[r].ids + replicas[r].all());
  }
  std::vector<int64_t> distinct(concatenated.size()), touched_indices(concatenated.size());
  const int64_t all = distinct_ids(concatenated.data(), static_cast<int64_t>(concatenated.size()),
                                   distinct.data(), touched_indices.data());
  std::vector<uint8_t> touched(all), known(all);
  const int64_t *at = touched_indices.data(), *this_replica = nullptr;
  for (int64_t r = 0; r < number; ++r) {
    const ReplicaIds& replica = replicas[r];
    if (r == own_index) this_replica = at;
    for (int64_t i = 0; i < replica.touched(); ++i) touched[at[i]] = 1;
    for (int64_t i = replica.num_new; i < replica.all(); ++i) known[at[i]] = 1;
    at += replica.all();
  }
  // Touched ids keep their order.
  std::vector<int64_t> moved(all);
  int64_t num_kept = 0, num_removed = 0;
  for (int64_t i = 0; i < all; ++i) {
    if (touched[i] == 0) {
      out.removed[num_removed++] = distinct[i];
      continue;
    }
    out.ids[num_kept] = distinct[i];
    out.known[num_kept] = known[i] != 0;
    moved[i] = num_kept++;
  }
  std::fill_n(out.touched, num_kept, false);
  std::fill_n(out.is_new, num_kept, false);
  for (int64_t i = 0; i < replicas[own_index].touched(); ++i) {
    const int64_t place = out.touched_indices[i] = moved[this_replica[i]];
    out.touched[place] = true;
    out.is_new[place] = i < replicas[own_index].num_new;
    out.slots[place] = slots[i];
  }
  // The slots of ids that this replica did not touch.
  std::vector<int64_t> others, ids;
  for (int64_t i = 0; i < num_kept; ++i) {
    if (!out.touched[i]) others.push_back(i), ids.push_back(out.ids[i]);
  }
  std::vector<int64_t> found(ids.size());
  find_ids(table, ids.data(), static_cast<int64_t>(ids.size()), found.data(), threads);
  int64_t absent = 0;
  for (size_t i = 0; i < others.size(); ++i) {
    out.slots[others[i]] = found[i];
    if (found[i] == kNoSlot) out.absent[absent++] = others[i];
  }
  return {num_kept, num_removed, absent};
}

}  // namespace

MergedCounts merge_ids(const TableView& table, const ReplicaIds* replicas, int64_t number,
                       int64_t own_index, const int64_t* slots, const MergedIds& out, int threads) {
  const ReplicaIds& this_replica = replicas[own_index];
  const bool none_removed = std::all_of(replicas, replicas + number,
                                        [](const ReplicaIds& of) { return of.num_removed == 0; });
  if (number == 2 && none_removed &&
      TouchedSlots::ascend(slots, this_replica.num_new, this_replica.touched())) {
    return match_two(table, this_replica, replicas[1 - own_index], own_index == 0, slots, out,
                     threads);
  }
  return match_all(table, replicas, number, own_index, slots, out, threads);
}

}  // namespace torchrec_hkv::hash_table::cpu
