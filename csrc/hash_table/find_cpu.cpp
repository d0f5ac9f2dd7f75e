#include "hash_table/find_cpu.h"

#include <algorithm>

#include "common/parallel.h"
#include "hash_table/bucket_cpu.h"
#include "hash_table/kernels.h"

namespace torchrec_hkv::hash_table::cpu {
namespace {

// An id goes through four steps, each kAhead ids behind the one before, so that what a step reads
// has arrived in the cache when it is the id's turn.
constexpr int kAhead = 8;
constexpr int kInFlight = 32;  // a power of two, at least 3 * kAhead + 1

struct InFlight {
  BucketChoice choice;
  uint64_t mask;  // the digest's matches in the bucket that is looked at
  bool in_second;
};

// Where a table's match is likely to be: nearly always the first that the digest gives.
template <bool kTouch>
void prefetch_match(const TableView& table, uint32_t bucket, uint64_t mask) {
  const int64_t slot = first_slot_of(table, bucket) + __builtin_ctzll(mask);
  __builtin_prefetch(&table.ids[slot]);
  if (kTouch) {
    __builtin_prefetch(&table.last_steps[slot], 1);
    if (table.scores != nullptr) __builtin_prefetch(&table.scores[slot], 1);
  }
}

int64_t check_matches(const TableView& table, int64_t id, uint32_t bucket, uint64_t mask) {
  const int64_t base = first_slot_of(table, bucket);
  for (; mask != 0; mask &= mask - 1) {
    const int64_t slot = base + __builtin_ctzll(mask);
    if (table.ids[slot] == id) return slot;
  }
  return kNoSlot;
}

// Finds the ids at positions [begin, end), all of one table; touches what it finds. Returns the
// number found.
template <bool kTouch>
int64_t find_range(const TableView& table, const int64_t* ids, int64_t begin, int64_t end,
                   const Visit& visit, int64_t* slots, bool* found_at) {
  int64_t found = 0;
  InFlight flying[kInFlight];
  for (int64_t at = begin; at < end + 3 * kAhead; ++at) {
    if (at < end) {  // the first bucket's line
      InFlight& it = flying[at % kInFlight];
      it.choice = choose_buckets(ids[at], table.num_buckets);
      prefetch_line(table, it.choice.first);
    }
    if (const int64_t then = at - kAhead; then >= begin && then < end) {  // its match
      InFlight& it = flying[then % kInFlight];
      it.mask = match_digests(digest_line(table, it.choice.first), it.choice.digest);
      it.in_second = it.mask == 0;
      if (it.in_second) {
        prefetch_line(table, it.choice.second);
      } else {
        prefetch_match<kTouch>(table, it.choice.first, it.mask);
      }
    }
    if (const int64_t then = at - 2 * kAhead; then >= begin && then < end) {  // the second's match
      InFlight& it = flying[then % kInFlight];
      if (it.in_second) {
        it.mask = match_digests(digest_line(table, it.choice.second), it.choice.digest);
        if (it.mask != 0) prefetch_match<kTouch>(table, it.choice.second, it.mask);
      }
    }
    if (const int64_t then = at - 3 * kAhead; then >= begin && then < end) {  // the id
      const InFlight& it = flying[then % kInFlight];
      const int64_t id = ids[then];
      const uint32_t bucket = it.in_second ? it.choice.second : it.choice.first;
      int64_t slot = check_matches(table, id, bucket, it.mask);
      if (slot == kNoSlot && !it.in_second) {
        slot = find_in_bucket(table, id, it.choice.second, it.choice.digest);
      }
      slots[then] = slot == kNoSlot ? kNoSlot : table.first_slot + slot;
      if (kTouch && slot != kNoSlot) touch(table, slot, visit, visit.given(then));
      if (kTouch && found_at != nullptr) found_at[then] = slot != kNoSlot;
      found += slot != kNoSlot;
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
