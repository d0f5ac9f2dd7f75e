// Finds rows of read-only tables on the CPU.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "common/macros.h"
#include "common/vectors_cpu.h"
#include "serving/table.h"

#ifdef __AVX2__
#include <immintrin.h>
#endif

namespace torchrec_hkv::serving::cpu {

// Prefetches a line into the second-level cache. A core has fewer requests to the first-level cache
// in flight, and that cache has no room for rows that are read some hundred rows later. GCC drops
// loops that only prefetch, unless they have a statement that it must keep.
inline void prefetch_line(const void* at) {
  __builtin_prefetch(at, 0, 2);
  asm volatile("");
}

inline void prefetch_row(const char* row, int64_t bytes) {
  const char* const end = row + bytes;
  for (; end - row > 192; row += 256) {
    unrolled<4>([&](auto k) { prefetch_line(row + 64 * k); });
  }
  for (; row < end; row += 64) prefetch_line(row);
}

// A bit for each position of a bucket: whether it has the id.
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

// Stands for the row of an id that is erased in a layer.
inline constexpr char kErasedRow = 0;

// Finds the rows of some ids in two steps, so that other work can be done while the buckets are
// fetched from memory.
class RowSearch {
 public:
  // Prefetches the buckets of n ids. The ids must stay valid until the search is finished.
  void begin(const Table& table, const int64_t* ids, int64_t n) {
    table_ = &table;
    ids_ = ids;
    n_ = n;
    begin_in(table.base, buckets_);
    begin_in(table.changes, changed_);
  }

  // rows[i] = the row of ids[i], or null if the table lacks it. Returns how many are null.
  // prefetches: whether to prefetch the found rows.
  int64_t finish(const char** rows, bool prefetches) {
    prefetched_ = prefetches ? table_->row_bytes : 0;
    const bool has_base = table_->base.buckets != nullptr;
    if (table_->changes.buckets == nullptr) {
      if (has_base) return n_ - find_in<false>(table_->base, buckets_.data(), rows);
      std::fill_n(rows, n_, nullptr);
      return n_;
    }
    find_in<false>(table_->changes, changed_.data(), rows);
    if (has_base) find_in<true>(table_->base, buckets_.data(), rows);
    int64_t unknown = 0;
    for (int64_t i = 0; i < n_; ++i) {
      if (rows[i] == &kErasedRow) rows[i] = nullptr;
      unknown += rows[i] == nullptr;
    }
    return unknown;
  }

 private:
  void begin_in(const Layer& layer, std::vector<const Bucket*>& buckets) {
    if (layer.buckets == nullptr) return;
    if (static_cast<int64_t>(buckets.size()) < n_) buckets.resize(n_);
    const Layer local_layer = layer;
    for (int64_t i = 0; i < n_; ++i) {
      buckets[i] = local_layer.buckets + choose(ids_[i], local_layer.geometry).first;
      prefetch_line(buckets[i]);
    }
  }

  // kOnlyNull: searches only ids whose row is null, otherwise all ids. Returns the number of found
  // rows, without erased ones.
  template <bool kOnlyNull>
  int64_t find_in(const Layer& layer, const Bucket* const* buckets, const char** rows) const {
    const Layer local_layer = layer;
    const int64_t n = n_, row_bytes = table_->row_bytes, prefetched = prefetched_;
    const int64_t* const ids = ids_;
    int64_t known = 0;
    // Whether the id may be in its second bucket.
    const auto match_bucket = [=, &known](int64_t i, const Bucket& bucket) {
      const uint32_t found = matches(bucket, ids[i]);
      if (found == 0) {
        rows[i] = nullptr;
        return has_spilled(bucket.header);
      }
      const int position = __builtin_ctz(found);
      if (is_erased(bucket.header, position)) [[unlikely]] {
        rows[i] = &kErasedRow;
        return false;
      }
      rows[i] = local_layer.rows + (first_row_of(bucket.header) + position) * row_bytes;
      prefetch_row(rows[i], prefetched);
      ++known;
      return false;
    };
    constexpr int64_t kBatch = 64;
    int64_t waiting[kBatch];
    const Bucket* seconds[kBatch];
    for (int64_t first = 0; first < n; first += kBatch) {
      const int64_t last = std::min(first + kBatch, n);
      int waits = 0;
      for (int64_t i = first; i < last; ++i) {
        if (kOnlyNull && rows[i] != nullptr) continue;
        if (!match_bucket(i, *buckets[i])) continue;
        waiting[waits] = i;
        seconds[waits] = local_layer.buckets + choose(ids[i], local_layer.geometry).second;
        prefetch_line(seconds[waits++]);
      }
      for (int k = 0; k < waits; ++k) match_bucket(waiting[k], *seconds[k]);
    }
    return known;
  }

  const Table* table_ = nullptr;
  const int64_t* ids_ = nullptr;
  int64_t n_ = 0, prefetched_ = 0;
  std::vector<const Bucket*> buckets_, changed_;
};

}  // namespace torchrec_hkv::serving::cpu
