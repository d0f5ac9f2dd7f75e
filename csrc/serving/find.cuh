// Finds rows of read-only tables on a GPU, one thread per id.
#pragma once

#include <cstdint>

#include "serving/table.h"

namespace torchrec_hkv::serving::cuda {

struct BucketWords {
  int64_t at[8];
};

__device__ inline BucketWords load_bucket(const Bucket* bucket) {
  BucketWords words;
  const auto* from = reinterpret_cast<const longlong2*>(bucket);
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    const longlong2 two = __ldg(from + k);
    words.at[2 * k] = two.x;
    words.at[2 * k + 1] = two.y;
  }
  return words;
}

enum class BucketMatch { kNo, kErased, kFound };

// Searches an id in a bucket; *row is the number of its row.
__device__ inline BucketMatch find_in_bucket(const BucketWords& words, int64_t id, int64_t* row) {
  const auto header = static_cast<uint64_t>(words.at[0]);
  uint32_t matches = 0;
#pragma unroll
  for (int k = 0; k < kBucketIds; ++k) matches |= (words.at[k + 1] == id ? 1u : 0u) << k;
  matches &= (1u << count_of(header)) - 1;
  if (matches == 0) return BucketMatch::kNo;
  const int position = __ffs(matches) - 1;
  *row = first_row_of(header) + position;
  return is_erased(header, position) ? BucketMatch::kErased : BucketMatch::kFound;
}

__device__ inline BucketMatch find_in_layer(const Layer& layer, int64_t id, int64_t* row) {
  const CandidateBuckets choice = choose(id, layer.geometry);
  const BucketWords words = load_bucket(layer.buckets + choice.first);
  const BucketMatch found = find_in_bucket(words, id, row);
  if (found != BucketMatch::kNo || !has_spilled(static_cast<uint64_t>(words.at[0]))) return found;
  return find_in_bucket(load_bucket(layer.buckets + choice.second), id, row);
}

// The address of a row of the base, in GPU memory or in host memory. Counts the row if its lookup
// is sampled.
__device__ inline const char* row_in_tiers(const Table& table, int64_t row, bool sampled,
                                           bool* is_in_host_memory) {
  const HotRowCache& hot = table.hot;
  const uint2 word = __ldg(reinterpret_cast<const uint2*>(hot.words) + row / kHotMaskRows);
  if (sampled && hot.counts != nullptr && hot.counts[row] < kMaxHotCount) {
    atomicAdd(hot.counts + row, 1u);
  }
  const int64_t index = hot_index({word.x, word.y}, row);
  *is_in_host_memory = index < 0;
  return index < 0 ? table.base.rows + row * table.row_bytes : hot.rows + index * table.row_bytes;
}

// The row of an id; null if the table lacks it. kTiered: the table may have rows in host memory;
// the last two arguments are passed to row_in_tiers.
template <bool kTiered = false>
__device__ inline const char* find_row(const Table& table, int64_t id, bool sampled = false,
                                       bool* is_in_host_memory = nullptr) {
  int64_t row = 0;
  if (table.changes.buckets != nullptr) {
    const BucketMatch found = find_in_layer(table.changes, id, &row);
    if (found == BucketMatch::kErased) return nullptr;
    if (found == BucketMatch::kFound) return table.changes.rows + row * table.row_bytes;
  }
  if (find_in_layer(table.base, id, &row) != BucketMatch::kFound) return nullptr;
  if constexpr (kTiered) {
    if (table.hot.words != nullptr) return row_in_tiers(table, row, sampled, is_in_host_memory);
  }
  return table.base.rows + row * table.row_bytes;
}

}  // namespace torchrec_hkv::serving::cuda
