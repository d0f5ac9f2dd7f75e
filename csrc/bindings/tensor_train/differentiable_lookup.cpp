#include "bindings/tensor_train/differentiable_lookup.h"

#include <vector>

#include "runtime/tensor_train/group.h"

namespace torchrec_hkv::bindings {
using namespace runtime;
namespace {

using tensor_train::TableCpu;

// The rows of ids in one table, float32 [n, dim]. Ids outside the table, which only a GPU accepts,
// have rows of zeros.
at::Tensor rows_of(const TableCpu& table, at::TensorList cores, const at::Tensor& ids) {
  const at::Tensor inside = at::logical_and(ids.ge(0), ids.lt(table.rows));
  at::Tensor remainder = at::where(inside, ids, 0);
  std::vector<at::Tensor> slices(table.cores);
  for (int32_t k = table.cores - 1; k >= 0; --k) {
    slices[k] = remainder.remainder(table.p[k]);
    remainder = remainder.floor_divide(table.p[k]);
  }
  at::Tensor product;
  int64_t columns = 1;
  for (int32_t k = 0; k < table.cores; ++k) {
    const int64_t p = table.p[k], left = table.r[k], q = table.q[k], right = table.r[k + 1];
    at::Tensor core = cores[k].to(at::kFloat);
    if (k + 1 < table.cores) {
      core = core.reshape({p, left, q * right});
    } else {
      core = core.reshape({p, q, left}).transpose(1, 2);
    }
    const at::Tensor slice = core.index_select(0, slices[k]);
    product = k == 0 ? slice : at::bmm(product, slice);
    columns *= q;
    product = product.reshape({ids.numel(), columns, right});
  }
  return product.squeeze(2) * inside.unsqueeze(1);
}

}  // namespace

at::Tensor differentiable_lookup(at::TensorList cores, int64_t group, const at::Tensor& ids,
                                 const at::Tensor& offsets,
                                 const std::optional<at::Tensor>& weights, int64_t batch_size,
                                 bool mean, bool pooled) {
  const auto tables = TensorTrainGroup::from_handle(group);
  std::vector<int64_t> first_core(tables->num_tables() + 1, 0);
  for (int32_t t = 0; t < tables->num_tables(); ++t) {
    first_core[t + 1] = first_core[t] + tables->table(t).cores;
  }
  const at::Tensor lengths = offsets.diff();
  std::vector<at::Tensor> outputs;
  int64_t first = 0;
  for (int32_t f = 0; f < tables->num_features(); ++f) {
    const int32_t t = tables->feature_tables()[f];
    const at::Tensor in_bags = lengths.narrow(0, f * batch_size, batch_size);
    const int64_t n = in_bags.sum().item<int64_t>();
    at::Tensor rows = rows_of(tables->table(t), cores.slice(first_core[t], tables->table(t).cores),
                              ids.narrow(0, first, n));
    if (weights) rows = rows * weights->narrow(0, first, n).unsqueeze(1);
    first += n;
    if (pooled) {
      const at::Tensor bags = at::arange(batch_size, ids.options());
      const at::Tensor of_rows = at::repeat_interleave(bags, in_bags, 0, n);
      rows = at::zeros({batch_size, rows.size(1)}, rows.options()).index_add(0, of_rows, rows);
      if (mean) rows = rows / in_bags.clamp_min(1).unsqueeze(1);
    }
    outputs.push_back(rows);
  }
  return at::cat(outputs, pooled ? 1 : 0);
}

}  // namespace torchrec_hkv::bindings
