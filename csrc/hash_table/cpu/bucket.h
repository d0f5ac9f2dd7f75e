// Scanning a bucket on the CPU.
#pragma once

#include <atomic>
#include <cstdint>

#ifdef __AVX2__
#include <immintrin.h>
#endif

#include "hash_table/cpu/scores.h"
#include "hash_table/grow.h"
#include "hash_table/table_view.h"

namespace torchrec_hkv::hash_table::cpu {

// Bit p of the result: position p of the bucket carries the digest.
inline uint64_t match_digests(const uint16_t* line, uint16_t digest) {
#ifdef __AVX2__
  const __m256i wanted = _mm256_set1_epi16(static_cast<int16_t>(digest));
  const auto half = [&](const uint16_t* from) {
    const __m256i* vectors = reinterpret_cast<const __m256i*>(from);
    const __m256i low = _mm256_cmpeq_epi16(_mm256_loadu_si256(vectors), wanted);
    const __m256i high = _mm256_cmpeq_epi16(_mm256_loadu_si256(vectors + 1), wanted);
    // packs works within 128-bit lanes; the permutation restores the order.
    const __m256i packed = _mm256_permute4x64_epi64(_mm256_packs_epi16(low, high), 0xD8);
    return static_cast<uint32_t>(_mm256_movemask_epi8(packed));
  };
  return half(line) | static_cast<uint64_t>(half(line + 32)) << 32;
#else
  uint64_t mask = 0;
  for (int p = 0; p < kBucketDigests; ++p) {
    mask |= static_cast<uint64_t>(line[p] == digest) << p;
  }
  return mask;
#endif
}

inline const uint16_t* digest_line(const TableView& table, uint32_t bucket) {
  return table.digests + static_cast<int64_t>(bucket) * kBucketDigests;
}

inline int64_t first_slot_of(const TableView& table, uint32_t bucket) {
  return static_cast<int64_t>(bucket) * table.bucket_slots;
}

// The bucket of a slot, which must not be negative. Most slots are below 2^32, and 32-bit division
// takes a third of the time.
inline int64_t bucket_of_slot(int64_t slot, int32_t bucket_slots) {
  if (slot <= UINT32_MAX) [[likely]]
    return static_cast<uint32_t>(slot) / static_cast<uint32_t>(bucket_slots);
  return slot / bucket_slots;
}

// The two buckets of an id.
inline BucketChoice buckets_of(const TableView& table, int64_t id) {
  if (table.unsplit == 0) [[likely]]
    return choose_buckets(id, table.num_buckets);
  return choose_while_split(id, table.num_buckets, table.unsplit);
}

inline int64_t row_bytes(const TableView& table) { return table.rows.bytes(); }

constexpr int64_t kCacheLine = 64;

inline int64_t lines_of(int64_t bytes) { return (bytes + kCacheLine - 1) / kCacheLine; }

// Prefetches a line for writing. This invalidates the copies of other processors early; at the
// store, that would delay all later stores. GCC emits this instruction only if -march names a
// processor that has it; other processors execute it as a no-op.
inline void prefetch_to_write(const void* from) {
#ifdef __x86_64__
  asm volatile("prefetchw %0" : : "m"(*static_cast<const char*>(from)));
#else
  __builtin_prefetch(from, 1);
#endif
}

// Prefetches for reading or writing. GCC removes functions and loops that only prefetch; the empty
// asm statement prevents that. Few lines are prefetched without a loop, because each instruction of
// the caller may wait for memory.
template <bool kWrite = false>
inline void prefetch_lines(const void* from, int64_t lines) {
  const auto prefetch = [&](int64_t line) {
    const char* const at = static_cast<const char*>(from) + line * kCacheLine;
    if (kWrite) return prefetch_to_write(at);
    __builtin_prefetch(at);
    asm volatile("");
  };
  if (lines < 1) return;
  prefetch(0);
  if (lines < 2) return;
  prefetch(1);
  if (lines < 3) return;
  prefetch(2);
  if (lines < 4) return;
  prefetch(3);
  for (int64_t line = 4; line < lines; ++line) prefetch(line);
}
// Prefetches the lines that contain any of the bytes, at least one.
template <bool kWrite = false>
inline void prefetch_bytes(const void* from, int64_t bytes) {
  const auto before = static_cast<int64_t>(reinterpret_cast<uintptr_t>(from) % kCacheLine);
  prefetch_lines<kWrite>(static_cast<const char*>(from) - before, lines_of(before + bytes));
}

// Prefetches the lines that contain any of the bytes into the second-level cache. A core can have
// more of these requests in flight than of those to the first-level cache: this is faster if a loop
// touches many lines, each once, and far ahead.
inline void prefetch_to_l2(const void* from, int64_t bytes) {
  const auto before = static_cast<int64_t>(reinterpret_cast<uintptr_t>(from) % kCacheLine);
  const char* at = static_cast<const char*>(from) - before;
  for (int64_t lines = lines_of(before + bytes); lines > 0; --lines, at += kCacheLine) {
    __builtin_prefetch(at, 0, 2);
    asm volatile("");
  }
}

// Addresses of the rows or states of a table on the CPU, where no row has a frame. Loops over many
// rows use it, because the checks in TableView::row would dominate them.
class SlotVectors {
 public:
  explicit SlotVectors(const RowStore& store) : first_(store.backing), bytes_(store.bytes()) {}

  char* at(int64_t slot) const { return first_ + slot * bytes_; }
  void prefetch(int64_t slot) const {
    if (bytes_ > 0) prefetch_bytes</*kWrite=*/false>(at(slot), bytes_);
  }
  void prefetch_to_write(int64_t slot) const {
    if (bytes_ > 0) prefetch_bytes</*kWrite=*/true>(at(slot), bytes_);
  }

 private:
  char* const first_;
  const int64_t bytes_;
};

inline void prefetch_line(const TableView& table, uint32_t bucket) {
  prefetch_bytes(digest_line(table, bucket), kBucketDigests * sizeof(uint16_t));
}

// The id's slot in one bucket, or kNoSlot.
inline int64_t find_in_bucket(const TableView& table, int64_t id, uint32_t bucket,
                              uint16_t digest) {
  const int64_t base = first_slot_of(table, bucket);
  for (uint64_t mask = match_digests(digest_line(table, bucket), digest); mask; mask &= mask - 1) {
    const int64_t slot = base + __builtin_ctzll(mask);
    if (table.ids[slot] == id) return slot;
  }
  return kNoSlot;
}

// The id's slot in its table, or kNoSlot.
inline int64_t find_slot(const TableView& table, int64_t id, const BucketChoice& choice) {
  const int64_t slot = find_in_bucket(table, id, choice.first, choice.digest);
  return slot != kNoSlot ? slot : find_in_bucket(table, id, choice.second, choice.digest);
}

// Other threads may touch the slot at the same time.
inline void touch(const TableView& table, int64_t slot, const CallContext& context,
                  uint64_t given) {
  if (table.counted.enabled()) return add_lookup_shared(table.counted, slot, context.now(), given);
  std::atomic_ref<uint32_t> last(table.last_steps[slot]);
  if (last.load(std::memory_order_relaxed) != context.now()) {
    last.store(context.now(), std::memory_order_relaxed);
  }
  if (table.scores != nullptr) touch_score(table, slot, context, given);
}

inline void count(const TableView& table, Counter counter, uint64_t by) {
  if (by != 0) {
    std::atomic_ref<uint64_t>(table.counters[counter]).fetch_add(by, std::memory_order_relaxed);
  }
}

}  // namespace torchrec_hkv::hash_table::cpu
