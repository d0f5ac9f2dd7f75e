#include "hash_table/grow.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <mutex>
#include <vector>

#include "common/parallel.h"
#include "hash_table/cpu/bucket.h"
#include "hash_table/cpu/place.h"

namespace torchrec_hkv::hash_table::cpu {
namespace {

// Buckets whose misplaced entries are listed together.
constexpr int64_t kListedBuckets = 1 << 14;

uint16_t* line_of(const TableView& table, int64_t bucket) {
  return table.digests + bucket * kBucketDigests;
}

void empty_bucket(const TableView& table, int64_t bucket) {
  uint16_t* const line = line_of(table, bucket);
  std::fill_n(line, table.bucket_slots, kEmptyDigest);
  std::fill(line + table.bucket_slots, line + kBucketDigests, kClosedDigest);
}

// Moves all but the digest.
void move_entry(const TableView& table, int64_t from, int64_t to) {
  if (from == to) return;
  table.ids[to] = table.ids[from];
  if (table.counted.enabled()) {
    table.counted.copy(from, to);
  } else {
    table.last_steps[to] = table.last_steps[from];
    if (table.scores != nullptr) table.scores[to] = table.scores[from];
  }
  std::memcpy(table.row(to), table.row(from), table.rows.bytes());
  if (table.states.width == 0) return;
  std::memcpy(table.state(to), table.state(from), table.states.width * sizeof(float));
}

// after: the table after this bucket, among others, has been split.
void split_bucket(const TableView& after, uint32_t bucket) {
  uint16_t old[kBucketDigests];
  std::memcpy(old, line_of(after, bucket), sizeof(old));
  empty_bucket(after, bucket);
  empty_bucket(after, int64_t{2} * bucket);
  empty_bucket(after, int64_t{2} * bucket + 1);
  const int64_t base = static_cast<int64_t>(bucket) * after.bucket_slots;
  for (int p = 0; p < after.bucket_slots; ++p) {
    if (old[p] == kEmptyDigest) continue;
    const uint32_t target = split_target(buckets_of(after, after.ids[base + p]), bucket);
    line_of(after, target)[p] = old[p];
    move_entry(after, base + p, static_cast<int64_t>(target) * after.bucket_slots + p);
  }
}

// Slots of buckets [begin, end) whose entries are misplaced, ascending.
std::vector<int64_t> find_misplaced_slots(const TableView& table, int64_t begin, int64_t end,
                                          int threads) {
  std::vector<int64_t> misplaced;
  std::mutex mutex;
  parallel_for(end - begin, 256, threads, [&](int64_t first, int64_t last) {
    std::vector<int64_t> found;
    for (int64_t bucket = begin + first; bucket < begin + last; ++bucket) {
      const int64_t base = bucket * table.bucket_slots;
      const uint16_t* line = line_of(table, bucket);
      for (int p = 0; p < table.bucket_slots; ++p) {
        if (line[p] == kEmptyDigest) continue;
        const BucketChoice choice = buckets_of(table, table.ids[base + p]);
        if (choice.first != bucket && choice.second != bucket) found.push_back(base + p);
      }
    }
    const std::lock_guard<std::mutex> lock(mutex);
    misplaced.insert(misplaced.end(), found.begin(), found.end());
  });
  std::sort(misplaced.begin(), misplaced.end());
  return misplaced;
}

void move_misplaced(const TableView& table, int64_t begin, int64_t end, int threads) {
  for (int64_t chunk_begin = begin; chunk_begin < end; chunk_begin += kListedBuckets) {
    const int64_t chunk_end = std::min(end, chunk_begin + kListedBuckets);
    for (const int64_t slot : find_misplaced_slots(table, chunk_begin, chunk_end, threads)) {
      const BucketChoice choice = buckets_of(table, table.ids[slot]);
      const int64_t to = free_slot(table, choice);
      move_entry(table, slot, to);
      line_of(table, to / table.bucket_slots)[to % table.bucket_slots] = choice.digest;
      line_of(table, slot / table.bucket_slots)[slot % table.bucket_slots] = kEmptyDigest;
    }
  }
}

}  // namespace

void empty_buckets(const TableView& table, int64_t begin, int64_t end, int threads) {
  parallel_for(end - begin, 1024, threads, [&](int64_t first, int64_t last) {
    for (int64_t bucket = begin + first; bucket < begin + last; ++bucket) {
      empty_bucket(table, bucket);
    }
  });
}

void split_buckets(const TableView& table, uint32_t unsplit, int threads) {
  TableView after = table;
  for (SplitRange range = SplitRange::first(table.unsplit);; range = range.next()) {
    range.begin = std::max(range.begin, unsplit);
    after.unsplit = range.begin;
    parallel_for(range.end - range.begin, 64, threads, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        split_bucket(after, range.begin + static_cast<uint32_t>(i));
      }
    });
    // Ids of the last bucket may be misplaced in the bucket after it.
    const int64_t split = int64_t{2} * range.end;
    move_misplaced(after, int64_t{2} * range.begin, split, threads);
    if (split < table.num_buckets) move_misplaced(after, split, split + 1, threads);
    if (split == table.num_buckets && range.begin > 0) move_misplaced(after, 0, 1, threads);
    if (range.begin == unsplit) break;
  }
}

int64_t count_entries(const TableView& table, int threads) {
  std::atomic<int64_t> number = 0;
  parallel_for(table.num_buckets, 1024, threads, [&](int64_t begin, int64_t end) {
    int64_t free = 0;
    for (int64_t bucket = begin; bucket < end; ++bucket) {
      free += __builtin_popcountll(match_digests(line_of(table, bucket), kEmptyDigest));
    }
    number.fetch_add((end - begin) * table.bucket_slots - free, std::memory_order_relaxed);
  });
  return number.load();
}

}  // namespace torchrec_hkv::hash_table::cpu
