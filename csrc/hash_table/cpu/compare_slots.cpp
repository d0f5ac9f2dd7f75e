// Compares slots with their previous contents, on the CPU.
#include <algorithm>
#include <vector>

#include "common/parallel.h"
#include "hash_table/cpu/bucket.h"
#include "hash_table/sync_kernels.h"

namespace torchrec_hkv::hash_table::cpu {
namespace {

constexpr int64_t kBlock = 1 << 13;  // buckets at a time: their masks stay in a core's cache
constexpr int64_t kAhead = 16;
constexpr int64_t kBucketsAhead = 12;
constexpr int64_t kWord = 64;          // slots of a mask
constexpr int64_t kWords = kBlock;     // masks at a time
constexpr int64_t kStepsAhead = 1024;  // slots

uint64_t low_bits(int64_t n) { return n >= 64 ? ~uint64_t{0} : (uint64_t{1} << n) - 1; }

// Bit i: last_steps[i] is not before `since`.
uint64_t steps_since(const uint32_t* last_steps, int64_t n, uint32_t since) {
  uint64_t mask = 0;
  int64_t i = 0;
#ifdef __AVX2__
  const __m256i bound = _mm256_set1_epi32(static_cast<int32_t>(since));
  for (; i + 8 <= n; i += 8) {
    const __m256i steps = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(last_steps + i));
    const __m256i occupied_now = _mm256_cmpeq_epi32(_mm256_max_epu32(steps, bound), steps);
    const int bits = _mm256_movemask_ps(_mm256_castsi256_ps(occupied_now));
    mask |= static_cast<uint64_t>(static_cast<uint32_t>(bits)) << i;
  }
#endif
  for (; i < n; ++i) mask |= static_cast<uint64_t>(last_steps[i] >= since) << i;
  return mask;
}

// Bit i: marks[i].
uint64_t mask_of(const bool* marks, int64_t n) {
  uint64_t mask = 0;
  int64_t i = 0;
#ifdef __AVX2__
  for (; i + 32 <= n; i += 32) {
    const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(marks + i));
    const int bits = _mm256_movemask_epi8(_mm256_slli_epi16(bytes, 7));  // of 0 or 1 each
    mask |= static_cast<uint64_t>(static_cast<uint32_t>(bits)) << i;
  }
#endif
  for (; i < n; ++i) mask |= static_cast<uint64_t>(marks[i]) << i;
  return mask;
}

// State of the slots of a bucket; bit i of each mask stands for slot i.
struct Masks {
  uint64_t differs;  // may have changed
  uint64_t is_occupied;
  uint64_t touched;
};

// The slots of a bucket that are compared.
struct SlotRange {
  int64_t from, to;  // slots
  int64_t at;        // position of the first in the comparison

  SlotRange(const TableView& table, const SlotComparison& comparison, int64_t bucket)
      : from(std::max(comparison.first, bucket * table.bucket_slots)),
        to(std::min(comparison.first + comparison.n, (bucket + 1) * table.bucket_slots)),
        at(from - comparison.first) {}
};

// The array that holds last steps.
const uint32_t* words_of_steps(const TableView& table) {
  return table.counted.enabled() ? table.counted.words : table.last_steps.get();
}

Masks compare_bucket(const TableView& table, const SlotComparison& comparison, int64_t bucket) {
  const SlotRange range(table, comparison, bucket);
  const int64_t n = range.to - range.from;
  // Arrays are read in order, but processors prefetch within a page only.
  const int64_t ahead = kBucketsAhead * table.bucket_slots;
  if (range.to + ahead <= comparison.first + comparison.n) {
    prefetch_lines(table.digests + (bucket + kBucketsAhead) * kBucketDigests, 2);
    prefetch_bytes(words_of_steps(table) + range.from + ahead, n * sizeof(uint32_t));
    prefetch_lines(comparison.occupied + range.at + ahead, 1);
  }
  const uint16_t* const line = digest_line(table, static_cast<uint32_t>(bucket));
  const uint64_t free = match_digests(line, kEmptyDigest);
  const uint64_t occupied_now = ~free >> (range.from - bucket * table.bucket_slots) & low_bits(n);
  const uint64_t occupied_before = mask_of(comparison.occupied + range.at, n);
  uint32_t buffer[kBucketDigests];
  uint64_t touched = steps_since(steps_of(table, range.from, n, buffer), n, comparison.since);
  if (comparison.marked != nullptr) touched |= mask_of(comparison.marked + range.at, n);
  touched &= occupied_now;
  return Masks{(occupied_now ^ occupied_before) | touched | (comparison.moved ? occupied_now : 0),
               occupied_now, touched};
}

struct ChangedSlot {
  int64_t slot;
  bool is_occupied;
  bool touched;
};

bool has_entry(const TableView& table, int64_t slot) {
  const int64_t bucket = bucket_of_slot(slot, table.bucket_slots);
  const uint16_t* const line = digest_line(table, static_cast<uint32_t>(bucket));
  return line[slot - bucket * table.bucket_slots] != kEmptyDigest;
}

// Calls body(places) with the slots that may have changed, one block of slots after the other.
template <typename Body>
void for_changed_slots(const TableView& table, const SlotComparison& comparison, int threads,
                       const Body& body) {
  const int64_t first_bucket = comparison.first / table.bucket_slots;
  const int64_t end_bucket = (comparison.first + comparison.n - 1) / table.bucket_slots + 1;
  std::vector<Masks> masks(std::min(kBlock, end_bucket - first_bucket));
  std::vector<ChangedSlot> changed;
  changed.reserve(comparison.n / 64);
  for (int64_t block = first_bucket; block < end_bucket; block += kBlock) {
    const int64_t buckets = std::min(kBlock, end_bucket - block);
    parallel_for(buckets, 256, threads, [&](int64_t begin, int64_t end) {
      for (int64_t b = begin; b < end; ++b) masks[b] = compare_bucket(table, comparison, block + b);
    });
    changed.clear();
    for (int64_t b = 0; b < buckets; ++b) {
      const int64_t from = SlotRange(table, comparison, block + b).from;
      for (uint64_t rest = masks[b].differs; rest != 0; rest &= rest - 1) {
        const int bit = __builtin_ctzll(rest);
        changed.push_back({from + bit, (masks[b].is_occupied >> bit & 1) != 0,
                           (masks[b].touched >> bit & 1) != 0});
      }
    }
    body(changed);
  }
}

// As for_changed_slots, if entries have not moved and no slot was freed. A new entry counts as
// looked up, so last steps show all changes but whether a slot that was free has an entry.
template <typename Body>
void for_looked_up(const TableView& table, const SlotComparison& comparison, int threads,
                   const Body& body) {
  const int64_t words = (comparison.n + kWord - 1) / kWord;
  std::vector<uint64_t> masks(std::min(kWords, words));
  std::vector<ChangedSlot> changed;
  for (int64_t block = 0; block < words; block += kWords) {
    const int64_t number = std::min(kWords, words - block);
    parallel_for(number, 256, threads, [&](int64_t begin, int64_t end) {
      for (int64_t w = begin; w < end; ++w) {
        const int64_t at = (block + w) * kWord, n = std::min(kWord, comparison.n - at);
        // Processors prefetch within a page only.
        if (at + kStepsAhead + kWord <= comparison.n) {
          prefetch_bytes(words_of_steps(table) + comparison.first + at + kStepsAhead,
                         kWord * sizeof(uint32_t));
        }
        uint32_t buffer[kWord];
        masks[w] =
            steps_since(steps_of(table, comparison.first + at, n, buffer), n, comparison.since);
        if (comparison.marked != nullptr) masks[w] |= mask_of(comparison.marked + at, n);
      }
    });
    changed.clear();
    for (int64_t w = 0; w < number; ++w) {
      const int64_t from = comparison.first + (block + w) * kWord;
      for (uint64_t rest = masks[w]; rest != 0; rest &= rest - 1) {
        const int64_t slot = from + __builtin_ctzll(rest);
        changed.push_back({slot, true, true});
      }
    }
    body(changed);
  }
}

}  // namespace

void compare_slots(const TableView& table, const SlotComparison& comparison, SlotDifferences& found,
                   int threads) {
  if (comparison.n == 0) return;
  const bool steps_only = !comparison.moved && !comparison.freed;
  const auto compare = [&](const std::vector<ChangedSlot>& changed) {
    const auto n = static_cast<int64_t>(changed.size());
    const size_t most = found.slots.size() + changed.size();
    found.slots.reserve(most);
    found.ids.reserve(most);
    found.touched.reserve(most);
    found.unchanged.reserve(most);
    for (int64_t i = 0; i < n; ++i) {
      if (i + kAhead < n) {
        const int64_t ahead = changed[i + kAhead].slot;
        prefetch_lines(&table.ids[ahead], 1);
        prefetch_lines(&comparison.ids[ahead - comparison.first], 1);
        prefetch_lines(&comparison.occupied[ahead - comparison.first], 1);
      }
      ChangedSlot slot_change = changed[i];
      int64_t& before = comparison.ids[slot_change.slot - comparison.first];
      bool& was_occupied = comparison.occupied[slot_change.slot - comparison.first];
      if (steps_only && !was_occupied) slot_change.is_occupied = has_entry(table, slot_change.slot);
      const int64_t id = slot_change.is_occupied ? table.ids[slot_change.slot] : 0;
      const bool unchanged = slot_change.is_occupied && was_occupied && id == before;
      if (was_occupied && !unchanged) {
        found.removed_slots.push_back(slot_change.slot);
        found.removed_ids.push_back(before);
      }
      if (slot_change.is_occupied && (slot_change.touched || !unchanged)) {
        found.slots.push_back(slot_change.slot);
        found.ids.push_back(id);
        found.touched.push_back(slot_change.touched);
        found.unchanged.push_back(unchanged);
      }
      if (unchanged) continue;
      if (slot_change.is_occupied) before = id;
      was_occupied = slot_change.is_occupied;
    }
  };
  if (steps_only) {
    for_looked_up(table, comparison, threads, compare);
  } else {
    for_changed_slots(table, comparison, threads, compare);
  }
}

}  // namespace torchrec_hkv::hash_table::cpu
