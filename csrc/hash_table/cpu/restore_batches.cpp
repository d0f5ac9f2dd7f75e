// Restores entries of several files to a table at once, on the CPU, and looks for ids that the
// table then has twice.
#include <algorithm>
#include <array>
#include <atomic>

#include "common/parallel_beside.h"
#include "hash_table/cpu/bucket.h"
#include "hash_table/cpu/restored_entry.h"
#include "hash_table/saved_kernels.h"

namespace torchrec_hkv::hash_table::cpu {
namespace {

// Bytes of the entries of a region, which take half of a small L2 cache.
constexpr int64_t kRegionBytes = 256 << 10;

int64_t region_slots(const TableView& table, const Widths& widths) {
  // Besides row and state: an id, a last step, a score and a digest.
  const int64_t slot_bytes = widths.row + widths.state + 24;
  const int64_t buckets = kRegionBytes / (slot_bytes * table.bucket_slots);
  return std::max<int64_t>(1, buckets) * table.bucket_slots;
}

// Puts the entries [begin, end) of a batch into their slots; returns how many were not placed.
// kStreams: see write_entry.
template <bool kStreams>
int64_t place_entries(const TableView& table, const Widths& widths, const SlotPrefetch& prefetch,
                      const RestoreBatch& batch, int64_t begin, int64_t end) {
  int64_t not_placed = 0;
  for (int64_t i = begin; i < std::min(end, begin + kAhead); ++i) prefetch(batch.slots[i]);
  for (int64_t i = begin; i < end; ++i) {
    if (i + kAhead < end) prefetch(batch.slots[i + kAhead]);
    const int64_t slot = batch.slots[i];
    const BucketChoice choice = buckets_of(table, batch.entries.ids[i]);
    const int64_t bucket = bucket_of_slot(slot, table.bucket_slots);
    uint16_t& digest = table.digests[bucket * kBucketDigests + slot - bucket * table.bucket_slots];
    if ((bucket != choice.first && bucket != choice.second) || digest != kEmptyDigest) {
      ++not_placed;
      continue;
    }
    digest = choice.digest;
    write_entry<kStreams>(table, widths, slot, batch.entries, i);
  }
  return not_placed;
}

}  // namespace

int64_t restore_batches(const TableView& table, const std::vector<RestoreBatch>& batches,
                        int threads) {
  const Widths widths = widths_of(table);
  // A row is written once and whole, so that nothing of it needs to be read.
  const bool streams = whole_lines(table.rows.backing, widths.row) && table.rows.frames == nullptr;
  const SlotPrefetch prefetch(table, !streams);
  const auto put = streams ? place_entries<true> : place_entries<false>;
  int64_t first = table.num_slots, last = -1;
  for (const RestoreBatch& batch : batches) {
    if (batch.entries.n == 0) continue;
    first = std::min(first, batch.slots[0]);
    last = std::max(last, batch.slots[batch.entries.n - 1]);
  }
  if (last < first) return 0;
  const int64_t region = region_slots(table, widths);
  first = first / region * region;  // regions begin with a bucket
  std::atomic<int64_t> not_placed{0};
  const int64_t regions = (last - first) / region + 1;
  parallel_for_beside(regions, 4, threads, [&](int64_t begin, int64_t end) {
    std::vector<int64_t> next;
    for (const RestoreBatch& batch : batches) {
      const int64_t* const slots_end = batch.slots + batch.entries.n;
      next.push_back(std::lower_bound(batch.slots, slots_end, first + begin * region) -
                     batch.slots);
    }
    int64_t not_placed_here = 0;
    for (int64_t r = begin; r < end; ++r) {
      const int64_t region_end = first + (r + 1) * region;
      for (size_t b = 0; b < batches.size(); ++b) {
        const RestoreBatch& batch = batches[b];
        const int64_t from = next[b];
        while (next[b] < batch.entries.n && batch.slots[next[b]] < region_end) ++next[b];
        not_placed_here += put(table, widths, prefetch, batch, from, next[b]);
      }
    }
    finish_streams();
    not_placed += not_placed_here;
  });
  return not_placed;
}

int64_t find_repeated(const TableView& table, int threads) {
  std::atomic<int64_t> found{kNoSlot};
  const auto find_in_buckets = [&](int64_t first, int64_t last) {
    struct IdInSecondBucket {  // an id that is in its second bucket
      int64_t slot;
      BucketChoice choice;
    };
    // The ids of a bucket wait for the lines of their other buckets while the next one is read.
    std::array<IdInSecondBucket, 2 * kBucketDigests> waiting;
    int waits[2] = {0, 0};
    const auto finish = [&](int turn) {
      for (int k = 0; k < waits[turn]; ++k) {
        const auto& [slot, choice] = waiting[turn * kBucketDigests + k];
        if (find_in_bucket(table, table.ids[slot], choice.first, choice.digest) != kNoSlot) {
          found.store(slot, std::memory_order_relaxed);
        }
      }
      waits[turn] = 0;
    };
    for (int64_t b = first; b < last; ++b) {
      const int turn = static_cast<int>(b & 1);
      const auto bucket = static_cast<uint32_t>(b);
      const uint16_t* const line = digest_line(table, bucket);
      for (int p = 0; p < table.bucket_slots; ++p) {
        if (line[p] == kEmptyDigest) continue;
        const int64_t slot = first_slot_of(table, bucket) + p;
        const int64_t id = table.ids[slot];
        for (uint64_t same = match_digests(line, line[p]) >> p >> 1; same; same &= same - 1) {
          if (table.ids[slot + 1 + __builtin_ctzll(same)] == id) found.store(slot);
        }
        const BucketChoice choice = buckets_of(table, id);
        if (choice.first == bucket) continue;
        prefetch_line(table, choice.first);
        waiting[turn * kBucketDigests + waits[turn]++] = {slot, choice};
      }
      finish(turn ^ 1);
    }
    finish(0);
    finish(1);
  };
  parallel_for_beside(table.num_buckets, 256, threads, find_in_buckets);
  return found;
}

}  // namespace torchrec_hkv::hash_table::cpu
