// Finding rows of read-only tables on the CPU.
#pragma once

#include <cstdint>

#include "common/macros.h"
#include "serving/table.h"

#ifdef __AVX2__
#include <immintrin.h>
#endif

namespace torchrec_hkv::serving::cpu {

// GCC drops loops that only prefetch, unless there is a statement that it may not drop.
inline void prefetch_line(const void* at) {
  __builtin_prefetch(at);
  asm volatile("");
}

// Position of an id in a bucket, or -1.
inline int position_of(const Bucket& bucket, int64_t id) {
#ifdef __AVX2__
  const __m256i wanted = _mm256_set1_epi64x(id);
  const auto* vectors = reinterpret_cast<const __m256i*>(&bucket);
  const auto match = [&](const __m256i* from) {
    return static_cast<uint32_t>(_mm256_movemask_pd(
        _mm256_castsi256_pd(_mm256_cmpeq_epi64(_mm256_load_si256(from), wanted))));
  };
  uint32_t matches = (match(vectors) | match(vectors + 1) << 4) >> 1;
#else
  uint32_t matches = 0;
  for (int k = 0; k < kBucketIds; ++k) matches |= uint32_t{bucket.ids[k] == id} << k;
#endif
  matches &= (1u << count_of(bucket.header)) - 1;
  return matches == 0 ? -1 : __builtin_ctz(matches);
}

// A row that is read some hundred rows later: into the second-level cache, as the first has no
// room.
inline void prefetch_row(const char* row, int64_t bytes) {
  for (int64_t at = 0; at < bytes; at += 64) {
    __builtin_prefetch(row + at, 0, 2);
    asm volatile("");
  }
}

// The row of an id that a layer holds as erased.
inline constexpr char kErased = 0;

// Where an id is in a bucket: its row, &kErased, or null.
inline const char* row_in(const Layer& layer, int64_t bucket, int64_t id, int64_t row_bytes) {
  const Bucket& in = layer.buckets[bucket];
  const int position = position_of(in, id);
  if (position < 0) return nullptr;
  if (is_erased(in.header, position)) return &kErased;
  return layer.rows + (first_row_of(in.header) + position) * row_bytes;
}

// rows[i] = where the row of ids[i] is, for those that are null. Buckets are prefetched for a batch
// of ids at a time, so that their cache misses overlap; rows as soon as they are found.
inline void find_in_layer(const Layer& layer, int64_t row_bytes, const int64_t* ids, int64_t n,
                          const char** rows) {
  if (layer.buckets == nullptr) return;
  constexpr int kBatch = 64;
  int64_t seconds[kBatch], waiting[kBatch];
  Choice choices[2][kBatch];  // of this batch and of the next
  const auto prefetch = [&](int64_t first, Choice* into) {
    const int64_t count = n - first < kBatch ? n - first : kBatch;
    for (int64_t i = 0; i < count; ++i) {
      into[i] = choose(ids[first + i], layer.geometry);
      prefetch_line(layer.buckets + into[i].first);
    }
  };
  prefetch(0, choices[0]);
  for (int64_t first = 0, turn = 0; first < n; first += kBatch, turn ^= 1) {
    if (first + kBatch < n) prefetch(first + kBatch, choices[turn ^ 1]);
    const Choice* const of = choices[turn];
    const int64_t count = n - first < kBatch ? n - first : kBatch;
    int waits = 0;
    for (int64_t i = 0; i < count; ++i) {
      const int64_t at = first + i;
      if (rows[at] != nullptr) continue;
      rows[at] = row_in(layer, of[i].first, ids[at], row_bytes);
      if (rows[at] != nullptr) prefetch_row(rows[at], row_bytes);
      // Without a branch: nothing tells where an id is.
      const bool waits_for_second =
          rows[at] == nullptr && has_spilled(layer.buckets[of[i].first].header);
      waiting[waits] = at;
      seconds[waits] = of[i].second;
      prefetch_line(waits_for_second ? layer.buckets + of[i].second : layer.buckets + of[i].first);
      waits += waits_for_second;
    }
    for (int k = 0; k < waits; ++k) {
      const char* const row = row_in(layer, seconds[k], ids[waiting[k]], row_bytes);
      rows[waiting[k]] = row;
      if (row != nullptr) prefetch_row(row, row_bytes);
    }
  }
}

// rows[i] = the row of ids[i], or null where the table has none. Returns how many are null.
inline int64_t find_rows(const Table& table, const int64_t* ids, int64_t n, const char** rows) {
  for (int64_t i = 0; i < n; ++i) rows[i] = nullptr;
  find_in_layer(table.changes, table.row_bytes, ids, n, rows);
  find_in_layer(table.base, table.row_bytes, ids, n, rows);
  int64_t unknown = 0;
  for (int64_t i = 0; i < n; ++i) {
    if (rows[i] == &kErased) rows[i] = nullptr;
    unknown += rows[i] == nullptr;
  }
  return unknown;
}

}  // namespace torchrec_hkv::serving::cpu
