// The distinct ids and prefixes of a batch: an order of positions, and the begins of runs in it.
#pragma once

#include <cstdint>
#include <vector>

#include "tensor_train/cpu/tables.h"

namespace torchrec_hkv::tensor_train::cpu {

// The bag of each position, feature * batch_size + sample, and each table's part of `order`.
struct BatchPositions {
  std::vector<int64_t> bags;          // [n]
  std::vector<int64_t> table_starts;  // [tables + 1]
  std::vector<int64_t> columns;  // [features]: first column of the feature's rows in the output
  int64_t stride;                // columns of the output
};
BatchPositions places_of(const TableCpu* tables, const BatchCpu& batch);

// The factor by which a position's row is multiplied in the output.
inline float factor_of(const BatchCpu& batch, const BatchPositions& places, int64_t position) {
  float factor = batch.weights != nullptr ? batch.weights[position] : 1.0f;
  if (batch.mean && batch.pooled) {
    const int64_t bag = places.bags[position];
    factor /= static_cast<float>(batch.offsets[bag + 1] - batch.offsets[bag]);
  }
  return factor;
}

// The place in the output of a position's row.
inline int64_t target_of(const BatchCpu& batch, const BatchPositions& places, int64_t position) {
  if (!batch.pooled) return position * places.stride;
  const int64_t bag = places.bags[position];
  return bag % batch.batch_size * places.stride + places.columns[bag / batch.batch_size];
}

// The distinct ids of one table, in order of (middle, head, last).
struct Directory {
  std::vector<int64_t> starts;    // first place of each distinct id in `order`, and the end
  std::vector<int64_t> lasts;     // slice of the last core of each distinct id
  std::vector<int64_t> prefixes;  // first distinct id of each prefix, and the end
  std::vector<int64_t> heads;     // head of each prefix
  std::vector<int64_t> middles;   // middle of each prefix, not decreasing
  int64_t ids() const { return static_cast<int64_t>(lasts.size()); }
};
Directory directory_of(const TableCpu& table, const BatchCpu& batch, const int64_t* order,
                       int64_t begin, int64_t end);

// A range of prefixes of one middle slice. prefix_ranges_of creates ranges of at most `most`
// prefixes.
struct PrefixRange {
  int64_t begin;
  int64_t end;
};
std::vector<PrefixRange> prefix_ranges_of(const std::vector<int64_t>& middles, int64_t most);

// Splits [0, costs.size()) into at most `parts` ranges of about equal cost, which begin only at
// indices that may_begin accepts. The result depends on the arguments only.
std::vector<int64_t> split_evenly(const std::vector<int64_t>& costs,
                                  const std::vector<uint8_t>& may_begin, int64_t parts);

}  // namespace torchrec_hkv::tensor_train::cpu
