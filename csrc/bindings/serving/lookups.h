// Lookups in sets of open read-only tables. They are ops, for exported programs, and also functions
// of the extension module, because a call through the dispatcher takes as long as the lookup of a
// few hundred ids.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <vector>

namespace torchrec_hkv::bindings {

// Returns all outputs as one tensor [samples, columns]. Output i pools feature features[i] from
// table tables[i] with pooling kinds[i] (SUM and the following constants in ops.py).
at::Tensor serving_pool(const at::Tensor& handle, const at::Tensor& ids, const at::Tensor& lengths,
                        const std::optional<at::Tensor>& weights, at::IntArrayRef features,
                        at::IntArrayRef tables, at::IntArrayRef kinds, int64_t columns,
                        at::ScalarType dtype);

// Returns one tensor per output. Output i has the rows of the ids of feature features[i] in
// table tables[i], with dims[i] columns.
std::vector<at::Tensor> serving_rows(const at::Tensor& handle, const at::Tensor& ids,
                                     const at::Tensor& lengths, at::IntArrayRef features,
                                     at::IntArrayRef tables, at::IntArrayRef dims,
                                     at::ScalarType dtype);

// Returns the rows of ids in one table. It takes no lengths, so it does not wait for a GPU.
// Exported programs don't use it, so it is not an op.
at::Tensor serving_table_rows(const at::Tensor& handle, const at::Tensor& ids, int64_t table,
                              at::ScalarType dtype);

}  // namespace torchrec_hkv::bindings
