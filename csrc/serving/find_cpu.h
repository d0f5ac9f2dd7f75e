// Finding rows of read-only tables on the CPU.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

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

// The positions of an id in a bucket, a bit each.
inline uint32_t matches(const Bucket& bucket, int64_t id) {
#ifdef __AVX2__
  const __m256i wanted = _mm256_set1_epi64x(id);
  const auto* vectors = reinterpret_cast<const __m256i*>(&bucket);
  const auto match = [&](const __m256i* from) {
    return static_cast<uint32_t>(_mm256_movemask_pd(
        _mm256_castsi256_pd(_mm256_cmpeq_epi64(_mm256_load_si256(from), wanted))));
  };
  uint32_t found = (match(vectors) | match(vectors + 1) << 4) >> 1;
#else
  uint32_t found = 0;
  for (int k = 0; k < kBucketIds; ++k) found |= uint32_t{bucket.ids[k] == id} << k;
#endif
  return found & ((1u << count_of(bucket.header)) - 1);
}

// Position of an id in a bucket, or -1.
inline int position_of(const Bucket& bucket, int64_t id) {
  const uint32_t found = matches(bucket, id);
  return found == 0 ? -1 : __builtin_ctz(found);
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

// Finds the rows of some ids, in two steps, so that other work may be done while the buckets are on
// their way from memory.
class Search {
 public:
  // Prefetches the buckets of n ids, which must stay until the search is finished.
  void begin(const Table& table, const int64_t* ids, int64_t n) {
    table_ = &table;
    ids_ = ids;
    n_ = n;
    if (static_cast<int64_t>(choices_.size()) < n) choices_.resize(n);
    for (int64_t i = 0; i < n; ++i) {
      choices_[i] = choose(ids[i], table.base.geometry);
      if (table.base.buckets != nullptr) prefetch_line(table.base.buckets + choices_[i].first);
    }
    if (table.changes.buckets == nullptr) return;
    if (static_cast<int64_t>(changed_.size()) < n) changed_.resize(n);
    for (int64_t i = 0; i < n; ++i) {
      changed_[i] = choose(ids[i], table.changes.geometry);
      prefetch_line(table.changes.buckets + changed_[i].first);
    }
  }

  // rows[i] = the row of ids[i], or null where the table has none. Returns how many are null.
  // prefetches: the rows that are found, into the second-level cache.
  int64_t finish(const char** rows, bool prefetches) {
    const bool has_changes = table_->changes.buckets != nullptr;
    if (has_changes) find_in<false>(table_->changes, changed_.data(), rows, prefetches);
    if (table_->base.buckets == nullptr) {
      if (!has_changes) std::fill_n(rows, n_, nullptr);
    } else if (has_changes) {
      find_in<true>(table_->base, choices_.data(), rows, prefetches);
    } else {
      find_in<false>(table_->base, choices_.data(), rows, prefetches);
    }
    int64_t unknown = 0;
    for (int64_t i = 0; i < n_; ++i) {
      if (rows[i] == &kErased) rows[i] = nullptr;
      unknown += rows[i] == nullptr;
    }
    return unknown;
  }

 private:
  // kOnlyNull: looks for ids whose row is null, else for all.
  template <bool kOnlyNull>
  void find_in(const Layer& layer, const Choice* choices, const char** rows, bool prefetches) {
    const int64_t row_bytes = table_->row_bytes;
    const int64_t prefetched = prefetches ? row_bytes : 0;
    constexpr int64_t kBatch = 64;
    int64_t waiting[kBatch];
    for (int64_t first = 0; first < n_; first += kBatch) {
      const int64_t last = std::min(first + kBatch, n_);
      int waits = 0;
      for (int64_t i = first; i < last; ++i) {
        if (kOnlyNull && rows[i] != nullptr) continue;
        const char* const row = row_in(layer, choices[i].first, ids_[i], row_bytes);
        rows[i] = row;
        if (row != nullptr) prefetch_row(row, prefetched);
        // Without a branch: nothing tells where an id is.
        const bool waits_for_second =
            row == nullptr && has_spilled(layer.buckets[choices[i].first].header);
        waiting[waits] = i;
        prefetch_line(layer.buckets + (waits_for_second ? choices[i].second : choices[i].first));
        waits += waits_for_second;
      }
      for (int k = 0; k < waits; ++k) {
        const int64_t i = waiting[k];
        const char* const row = row_in(layer, choices[i].second, ids_[i], row_bytes);
        rows[i] = row;
        if (row != nullptr) prefetch_row(row, prefetched);
      }
    }
  }

  const Table* table_ = nullptr;
  const int64_t* ids_ = nullptr;
  int64_t n_ = 0;
  std::vector<Choice> choices_, changed_;
};

}  // namespace torchrec_hkv::serving::cpu
