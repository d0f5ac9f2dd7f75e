// The ids of one call of a lookup in read-only tables.
#pragma once

#include <optional>
#include <vector>

#include "bindings/serving/open_tables.h"

namespace torchrec_hkv::bindings {

// Ids of all features, one after the other, and the lengths of their bags.
struct ServingBatch {
  at::Tensor ids;
  at::Tensor weights;  // undefined if there are none
  at::Tensor lengths;  // int32 or int64 [features, batch_size]
  int64_t features;
  int64_t batch_size;

  const float* weights_data() const {
    return weights.defined() ? weights.const_data_ptr<float>() : nullptr;
  }
};

// Checks ids [n], lengths [features, samples] and weights [n].
ServingBatch check_serving_batch(const at::Tensor& ids, const at::Tensor& lengths,
                                 const std::optional<at::Tensor>& weights);

// Offsets of the ids of each bag: int64 [features * batch_size + 1]. On a CPU, refuses negative
// lengths, and lengths that don't add up to the number of ids.
at::Tensor bag_offsets(const ServingBatch& batch);

// Offsets of the ids of each feature: [features + 1]. Refuses lengths that don't add up to the
// number of ids, and on a CPU negative lengths. Waits for a GPU.
std::vector<int64_t> feature_offsets(const ServingBatch& batch);

void check_feature(const ServingBatch& batch, int64_t feature);

// A Feature with its ids and table; its other fields are unset.
serving::Feature feature_of(const ServingTables& tables, const at::Tensor& ids, int64_t table);

// Adds n to the number of ids that were looked up in a table on the CPU.
void count_lookups(const ServingTables& tables, int64_t table, int64_t n);

}  // namespace torchrec_hkv::bindings
