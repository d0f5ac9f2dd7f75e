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

// Buckets whose entries astray are listed together.
constexpr int64_t kListedBuckets = 1 << 14;

uint16_t* line_of(const TableView& table, int64_t bucket) {
  return table.digests + bucket * kBucketDigests;
}

// All but the digests.
void move_entry(const TableView& table, int64_t from, int64_t to) {
  if (from == to) return;
  table.ids[to] = table.ids[from];
  table.last_steps[to] = table.last_steps[from];
  if (table.scores != nullptr) table.scores[to] = table.scores[from];
  std::memcpy(table.row(to), table.row(from), table.rows.bytes());
  if (table.states.width == 0) return;
  std::memcpy(table.state(to), table.state(from), table.states.width * sizeof(float));
}

void split_bucket(const TableView& table, uint32_t bucket) {
  uint16_t old[kBucketDigests];
  std::memcpy(old, line_of(table, bucket), sizeof(old));
  uint16_t* const lines[2] = {line_of(table, int64_t{2} * bucket),
                              line_of(table, int64_t{2} * bucket + 1)};
  const int64_t base = static_cast<int64_t>(bucket) * table.bucket_slots;
  for (int p = 0; p < kBucketDigests; ++p) {
    const uint16_t fill = p < table.bucket_slots ? kEmptyDigest : kClosedDigest;
    lines[0][p] = lines[1][p] = fill;
    if (p >= table.bucket_slots || old[p] == kEmptyDigest) continue;
    const BucketChoice choice = choose_buckets(table.ids[base + p], table.num_buckets * 2);
    const uint32_t target = split_target(choice, bucket);
    lines[target & 1][p] = old[p];
    move_entry(table, base + p, static_cast<int64_t>(target) * table.bucket_slots + p);
  }
}

// Slots of buckets [begin, end) whose entries are astray, ascending.
std::vector<int64_t> find_astray(const TableView& table, int64_t begin, int64_t end, int threads) {
  std::vector<int64_t> astray;
  std::mutex mutex;
  parallel_for(end - begin, 256, threads, [&](int64_t first, int64_t last) {
    std::vector<int64_t> mine;
    for (int64_t bucket = begin + first; bucket < begin + last; ++bucket) {
      const int64_t base = bucket * table.bucket_slots;
      const uint16_t* line = line_of(table, bucket);
      for (int p = 0; p < table.bucket_slots; ++p) {
        if (line[p] != kEmptyDigest &&
            is_astray(table.ids[base + p], static_cast<uint32_t>(bucket), table.num_buckets)) {
          mine.push_back(base + p);
        }
      }
    }
    const std::lock_guard<std::mutex> lock(mutex);
    astray.insert(astray.end(), mine.begin(), mine.end());
  });
  std::sort(astray.begin(), astray.end());
  return astray;
}

void settle(const TableView& table, int64_t slot) {
  const BucketChoice choice = choose_buckets(table.ids[slot], table.num_buckets);
  const int64_t to = free_slot(table, choice);
  move_entry(table, slot, to);
  line_of(table, to / table.bucket_slots)[to % table.bucket_slots] = choice.digest;
  line_of(table, slot / table.bucket_slots)[slot % table.bucket_slots] = kEmptyDigest;
}

}  // namespace

void split_buckets(const TableView& table, int threads) {
  for (SplitRange range = SplitRange::first(table.num_buckets);; range = range.next()) {
    parallel_for(range.end - range.begin, 64, threads, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        split_bucket(table, range.begin + static_cast<uint32_t>(i));
      }
    });
    if (range.is_last()) break;
  }
  TableView doubled = table;
  doubled.num_buckets *= 2;
  doubled.num_slots *= 2;
  for (int64_t begin = 0; begin < doubled.num_buckets; begin += kListedBuckets) {
    const int64_t end = std::min<int64_t>(doubled.num_buckets, begin + kListedBuckets);
    for (const int64_t slot : find_astray(doubled, begin, end, threads)) settle(doubled, slot);
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
