// Lookups in sets of open read-only tables. They are ops, which exported programs name, and
// functions of the extension module: a call through the dispatcher takes as long as the lookup of
// some hundred ids.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <vector>

namespace torchrec_hkv::bindings {

// One [samples, columns] of all outputs; output i pools feature features[i] from table tables[i],
// as kinds[i] says (SUM and what follows it in ops.py).
at::Tensor serving_pool(const at::Tensor& handle, const at::Tensor& ids, const at::Tensor& lengths,
                        const std::optional<at::Tensor>& weights, at::IntArrayRef features,
                        at::IntArrayRef tables, at::IntArrayRef kinds, int64_t columns,
                        at::ScalarType dtype);

// Output i: the rows of the ids of feature features[i] in table tables[i], of dims[i] columns.
std::vector<at::Tensor> serving_rows(const at::Tensor& handle, const at::Tensor& ids,
                                     const at::Tensor& lengths, at::IntArrayRef features,
                                     at::IntArrayRef tables, at::IntArrayRef dims,
                                     at::ScalarType dtype);

// The rows of ids in one table. It takes no lengths, so it waits for no GPU. No program names it,
// so it is no op.
at::Tensor serving_table_rows(const at::Tensor& handle, const at::Tensor& ids, int64_t table,
                              at::ScalarType dtype);

}  // namespace torchrec_hkv::bindings
