// The ids of one call of a lookup in read-only tables.
#pragma once

#include <optional>

#include "bindings/serving/open_tables.h"

namespace torchrec_hkv::bindings {

// Ids of all features, one after the other; where the bags of each begin.
struct ServingBatch {
  at::Tensor ids;
  at::Tensor weights;  // undefined: none
  at::Tensor offsets;  // int64 [features * batch_size + 1]
  int64_t features;
  int64_t batch_size;

  const float* weights_data() const {
    return weights.defined() ? weights.const_data_ptr<float>() : nullptr;
  }
};

// Checks ids [n], lengths [features, samples] and weights [n].
ServingBatch check_serving_batch(const at::Tensor& ids, const at::Tensor& lengths,
                                 const std::optional<at::Tensor>& weights);

// Refuses lengths that don't add up to the number of ids.
void check_total_length(int64_t total, int64_t ids);

// The ids of one feature and the table that they are looked up in; all else of the output is unset.
serving::Feature feature_of(const ServingTables& tables, const ServingBatch& batch, int64_t feature,
                            int64_t table);

// Adds to the number of ids that were looked up in a table in host memory.
void count_lookups(const ServingTables& tables, int64_t table, int64_t n);

}  // namespace torchrec_hkv::bindings
