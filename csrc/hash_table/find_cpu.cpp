#include "hash_table/find_cpu.h"

#include <algorithm>

#include "common/parallel.h"
#include "hash_table/bucket_cpu.h"
#include "hash_table/kernels.h"

namespace torchrec_hkv::hash_table::cpu {
namespace {

// Ids whose cache misses overlap.
constexpr int kInFlight = 16;

// Finds the ids at positions [begin, end), all of one table; touches what it finds. Returns the
// number found.
template <bool kTouch>
int64_t find_range(const TableView& table, const int64_t* ids, int64_t begin, int64_t end,
                   const Visit& visit, int64_t* slots, bool* found_at) {
  int64_t found = 0;
  BucketChoice choices[kInFlight];
  uint64_t masks[kInFlight];
  for (int64_t at = begin; at < end; at += kInFlight) {
    const int n = static_cast<int>(std::min<int64_t>(kInFlight, end - at));
    for (int k = 0; k < n; ++k) {
      choices[k] = choose_buckets(ids[at + k], table.num_buckets);
      const uint16_t* line = digest_line(table, choices[k].first);
      __builtin_prefetch(line);
      __builtin_prefetch(line + 32);
    }
    for (int k = 0; k < n; ++k) {
      masks[k] = match_digests(digest_line(table, choices[k].first), choices[k].digest);
      if (masks[k] != 0) {
        const int64_t slot = first_slot_of(table, choices[k].first) + __builtin_ctzll(masks[k]);
        __builtin_prefetch(&table.ids[slot]);
        if (kTouch) __builtin_prefetch(&table.last_steps[slot], 1);
      } else {
        const uint16_t* line = digest_line(table, choices[k].second);
        __builtin_prefetch(line);
        __builtin_prefetch(line + 32);
      }
    }
    for (int k = 0; k < n; ++k) {
      const int64_t id = ids[at + k];
      int64_t slot = kNoSlot;
      const int64_t base = first_slot_of(table, choices[k].first);
      for (uint64_t mask = masks[k]; mask != 0 && slot == kNoSlot; mask &= mask - 1) {
        const int64_t candidate = base + __builtin_ctzll(mask);
        if (table.ids[candidate] == id) slot = candidate;
      }
      if (slot == kNoSlot) {
        slot = find_in_bucket(table, id, choices[k].second, choices[k].digest);
      }
      if (slot != kNoSlot) {
        ++found;
        if (kTouch) touch(table, slot, visit, visit.given(at + k));
        slots[at + k] = table.first_slot + slot;
      } else {
        slots[at + k] = kNoSlot;
      }
      if (kTouch && found_at != nullptr) found_at[at + k] = slot != kNoSlot;
    }
  }
  return found;
}

template <bool kTouch>
void find_all(const TableView* tables, const Batch& batch, const Visit& visit, int64_t* slots,
              bool* found_at, int threads) {
  parallel_for(batch.num_ids, 1024, threads, [&](int64_t begin, int64_t end) {
    for (int32_t feature = batch.feature_of(begin); begin < end; ++feature) {
      const int64_t stop = std::min(end, batch.feature_start(feature + 1));
      if (stop <= begin) continue;
      const TableView& table = tables[batch.feature_tables[feature]];
      const int64_t found =
          find_range<kTouch>(table, batch.ids, begin, stop, visit, slots, found_at);
      if (kTouch) {
        count(table, kLookups, stop - begin);
        count(table, kMisses, stop - begin - found);
      }
      begin = stop;
    }
  });
}

}  // namespace

void find(const TableView* tables, const Batch& batch, int64_t* slots, int threads) {
  find_all<false>(tables, batch, Visit{}, slots, nullptr, threads);
}

void find_and_touch(const TableView* tables, const Batch& batch, const Visit& visit, int64_t* slots,
                    bool* found, int threads) {
  find_all<true>(tables, batch, visit, slots, found, threads);
}

}  // namespace torchrec_hkv::hash_table::cpu
