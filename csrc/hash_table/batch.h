// A batch as kernels see it: the ids of a call in bags, how they are pooled, and the outputs.
#pragma once

#include <cstdint>

#include "common/dtypes.h"
#include "common/global_pointer.h"
#include "common/macros.h"

namespace torchrec_hkv::hash_table {

// The bags of one feature, in a batch whose features have different numbers of bags.
struct FeatureBags {
  int64_t first;   // number of its first bag
  int64_t output;  // position of the first bag's outputs
  int64_t stride;  // distance between the outputs of two bags
};

// A GPU's report of invalid offsets, in host memory that it can write.
struct BadOffsets {
  int64_t bag;
  int64_t from;  // offset of its begin
  int64_t to;    // offset of its end
  int64_t num_ids;
  uint32_t found;  // the group's number; written last
};

// The ids of one call: feature-major bags of the features of a group, in CSR form.
struct Batch {
  const int64_t* ids;              // [num_ids]
  const int64_t* offsets;          // [num_bags + 1], nondecreasing, from 0 to num_ids; null: one
                                   // feature, one bag
  const int32_t* feature_tables;   // [num_features] table of each feature
  const int32_t* feature_columns;  // [num_features] first column of each feature in the output
  int32_t num_features;
  int64_t batch_size;  // number of bags of each feature, unless features differ
  int64_t num_ids;
  int64_t num_bags;  // of all features
  // [num_features + 1] if features have different numbers of bags; the last has the totals.
  const FeatureBags* ragged = nullptr;
  // On a GPU: a kernel that finds invalid offsets writes the report and sets the flag. No rows are
  // updated until the host has read the report.
  uint32_t* refused = nullptr;
  BadOffsets* bad_offsets = nullptr;
  uint32_t group_number = 0;

  // Number of a feature's first bag; for num_features the number of all bags.
  HKV_HOST_DEVICE int64_t first_bag(int32_t feature) const {
    return ragged == nullptr ? feature * batch_size : ragged[feature].first;
  }
  HKV_HOST_DEVICE int32_t feature_of_bag(int64_t bag) const {
    // Numbers of bags fit 32 bits, and 32-bit division is much faster.
    if (ragged == nullptr) return static_cast<uint32_t>(bag) / static_cast<uint32_t>(batch_size);
    int32_t low = 0, high = num_features;
    while (high - low > 1) {
      const int32_t middle = (low + high) >> 1;
      (ragged[middle].first <= bag ? low : high) = middle;
    }
    return low;
  }
  // Position of the outputs of a feature's bag in an output of this stride. If features have
  // different numbers of bags, the outputs of each feature are contiguous.
  HKV_HOST_DEVICE int64_t output_of(int32_t feature, int64_t bag_of_feature, int64_t stride) const {
    if (ragged == nullptr) return bag_of_feature * stride + feature_columns[feature];
    return ragged[feature].output + bag_of_feature * ragged[feature].stride;
  }
  // Distance to the outputs of the feature's next bag.
  HKV_HOST_DEVICE int64_t output_stride(int32_t feature, int64_t stride) const {
    return ragged == nullptr ? stride : ragged[feature].stride;
  }

  // Position of the feature's first id.
  HKV_HOST_DEVICE int64_t feature_start(int32_t feature) const {
    if (offsets == nullptr) return feature == 0 ? 0 : num_ids;
    return offsets[first_bag(feature)];
  }
  // Feature of the id at a position.
  HKV_HOST_DEVICE int32_t feature_of(int64_t position) const {
    int32_t low = 0;
    int32_t high = num_features;
    while (high - low > 1) {
      const int32_t middle = (low + high) >> 1;
      if (feature_start(middle) <= position) {
        low = middle;
      } else {
        high = middle;
      }
    }
    return low;
  }
};

// How the ids of a bag are reduced.
struct Pooling {
  bool mean;             // divide by the bag's length
  const float* weights;  // [num_ids] or null
};

// The outputs of a batch, or their gradients: a matrix with one row for each sample and the columns
// of all features. If features have different numbers of bags, one matrix for each feature, one
// after the other. Char: char, or const char for reading.
template <typename Char>
struct Output {
  GlobalPointer<Char> data;
  int64_t stride;  // columns of all features; 0 if features have different numbers of bags
  RowType type;

  HKV_HOST_DEVICE Char* at(int64_t place) const { return data + place * element_size(type); }
};

}  // namespace torchrec_hkv::hash_table
