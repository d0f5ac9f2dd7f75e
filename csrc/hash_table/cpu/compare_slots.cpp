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
    const __m256i is = _mm256_cmpeq_epi32(_mm256_max_epu32(steps, bound), steps);
    const int bits = _mm256_movemask_ps(_mm256_castsi256_ps(is));
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
  uint64_t is_there;
  uint64_t touched;
};

// The slots of a bucket that are compared.
struct Range {
  int64_t from, to;  // slots
  int64_t at;        // position of the first in the comparison

  Range(const TableView& table, const SlotComparison& of, int64_t bucket)
      : from(std::max(of.first, bucket * table.bucket_slots)),
        to(std::min(of.first + of.n, (bucket + 1) * table.bucket_slots)),
        at(from - of.first) {}
};

// The array that holds last steps.
const uint32_t* words_of_steps(const TableView& table) {
  return table.counted.kept() ? table.counted.words : table.last_steps.get();
}

Masks look_at(const TableView& table, const SlotComparison& of, int64_t bucket) {
  const Range range(table, of, bucket);
  const int64_t n = range.to - range.from;
  // Arrays are read in order, but processors prefetch within a page only.
  const int64_t ahead = kBucketsAhead * table.bucket_slots;
  if (range.to + ahead <= of.first + of.n) {
    prefetch_lines(table.digests + (bucket + kBucketsAhead) * kBucketDigests, 2);
    prefetch_bytes(words_of_steps(table) + range.from + ahead, n * sizeof(uint32_t));
    prefetch_lines(of.occupied + range.at + ahead, 1);
  }
  const uint16_t* const line = digest_line(table, static_cast<uint32_t>(bucket));
  const uint64_t free = match_digests(line, kEmptyDigest);
  const uint64_t is = ~free >> (range.from - bucket * table.bucket_slots) & low_bits(n);
  const uint64_t was = mask_of(of.occupied + range.at, n);
  uint32_t room[kBucketDigests];
  uint64_t touched = steps_since(steps_of(table, range.from, n, room), n, of.since);
  if (of.marked != nullptr) touched |= mask_of(of.marked + range.at, n);
  touched &= is;
  return Masks{(is ^ was) | touched | (of.moved ? is : 0), is, touched};
}

struct Place {
  int64_t slot;
  bool is_there;
  bool touched;
};

bool has_entry(const TableView& table, int64_t slot) {
  const int64_t bucket = bucket_of_slot(slot, table.bucket_slots);
  const uint16_t* const line = digest_line(table, static_cast<uint32_t>(bucket));
  return line[slot - bucket * table.bucket_slots] != kEmptyDigest;
}

// Calls body(places) with the slots that may have changed, one block of slots after the other.
template <typename Body>
void for_places(const TableView& table, const SlotComparison& of, int threads, const Body& body) {
  const int64_t first_bucket = of.first / table.bucket_slots;
  const int64_t end_bucket = (of.first + of.n - 1) / table.bucket_slots + 1;
  std::vector<Masks> masks(std::min(kBlock, end_bucket - first_bucket));
  std::vector<Place> places;
  places.reserve(of.n / 64);
  for (int64_t block = first_bucket; block < end_bucket; block += kBlock) {
    const int64_t buckets = std::min(kBlock, end_bucket - block);
    parallel_for(buckets, 256, threads, [&](int64_t begin, int64_t end) {
      for (int64_t b = begin; b < end; ++b) masks[b] = look_at(table, of, block + b);
    });
    places.clear();
    for (int64_t b = 0; b < buckets; ++b) {
      const int64_t from = Range(table, of, block + b).from;
      for (uint64_t rest = masks[b].differs; rest != 0; rest &= rest - 1) {
        const int bit = __builtin_ctzll(rest);
        places.push_back(
            {from + bit, (masks[b].is_there >> bit & 1) != 0, (masks[b].touched >> bit & 1) != 0});
      }
    }
    body(places);
  }
}

// As for_places, if entries have not moved and no slot was freed. A new entry counts as looked up,
// so last steps show all changes but whether a slot that was free has an entry.
template <typename Body>
void for_looked_up(const TableView& table, const SlotComparison& of, int threads,
                   const Body& body) {
  const int64_t words = (of.n + kWord - 1) / kWord;
  std::vector<uint64_t> masks(std::min(kWords, words));
  std::vector<Place> places;
  for (int64_t block = 0; block < words; block += kWords) {
    const int64_t number = std::min(kWords, words - block);
    parallel_for(number, 256, threads, [&](int64_t begin, int64_t end) {
      for (int64_t w = begin; w < end; ++w) {
        const int64_t at = (block + w) * kWord, n = std::min(kWord, of.n - at);
        // Processors prefetch within a page only.
        if (at + kStepsAhead + kWord <= of.n) {
          prefetch_bytes(words_of_steps(table) + of.first + at + kStepsAhead,
                         kWord * sizeof(uint32_t));
        }
        uint32_t room[kWord];
        masks[w] = steps_since(steps_of(table, of.first + at, n, room), n, of.since);
        if (of.marked != nullptr) masks[w] |= mask_of(of.marked + at, n);
      }
    });
    places.clear();
    for (int64_t w = 0; w < number; ++w) {
      const int64_t from = of.first + (block + w) * kWord;
      for (uint64_t rest = masks[w]; rest != 0; rest &= rest - 1) {
        const int64_t slot = from + __builtin_ctzll(rest);
        places.push_back({slot, true, true});
      }
    }
    body(places);
  }
}

}  // namespace

void compare_slots(const TableView& table, const SlotComparison& of, SlotDifferences& found,
                   int threads) {
  if (of.n == 0) return;
  const bool steps_only = !of.moved && !of.freed;
  const auto compare = [&](const std::vector<Place>& places) {
    const auto n = static_cast<int64_t>(places.size());
    const size_t most = found.slots.size() + places.size();
    found.slots.reserve(most);
    found.ids.reserve(most);
    found.touched.reserve(most);
    found.stayed.reserve(most);
    for (int64_t i = 0; i < n; ++i) {
      if (i + kAhead < n) {
        const int64_t ahead = places[i + kAhead].slot;
        prefetch_lines(&table.ids[ahead], 1);
        prefetch_lines(&of.ids[ahead - of.first], 1);
        prefetch_lines(&of.occupied[ahead - of.first], 1);
      }
      Place place = places[i];
      int64_t& before = of.ids[place.slot - of.first];
      bool& was_there = of.occupied[place.slot - of.first];
      if (steps_only && !was_there) place.is_there = has_entry(table, place.slot);
      const int64_t id = place.is_there ? table.ids[place.slot] : 0;
      const bool stayed = place.is_there && was_there && id == before;
      if (was_there && !stayed) {
        found.gone_slots.push_back(place.slot);
        found.gone_ids.push_back(before);
      }
      if (place.is_there && (place.touched || !stayed)) {
        found.slots.push_back(place.slot);
        found.ids.push_back(id);
        found.touched.push_back(place.touched);
        found.stayed.push_back(stayed);
      }
      if (stayed) continue;
      if (place.is_there) before = id;
      was_there = place.is_there;
    }
  };
  if (steps_only) {
    for_looked_up(table, of, threads, compare);
  } else {
    for_places(table, of, threads, compare);
  }
}

}  // namespace torchrec_hkv::hash_table::cpu
