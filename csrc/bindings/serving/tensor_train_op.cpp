// torchrec_hkv::serving_tt: lookups in the Tensor-Train tables of a served model.
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <vector>

#include "bindings/serving/batch.h"

namespace torchrec_hkv::bindings {
namespace {

// Looks up ids in the Tensor-Train tables of one group. Returns one tensor with all outputs if they
// are pooled, otherwise one tensor per output.
std::vector<at::Tensor> serving_tt(const at::Tensor& handle, const at::Tensor& ids,
                                   const at::Tensor& lengths,
                                   const std::optional<at::Tensor>& weights,
                                   at::IntArrayRef features, int64_t group, at::IntArrayRef dims,
                                   bool mean, bool pooled) {
  const std::shared_ptr<const ServingTables> open = tables_of(handle, ids);
  TORCH_CHECK_VALUE(group >= 0 && group < static_cast<int64_t>(open->tt_groups.size()), "group ",
                    group, " is asked for, but there are ", open->tt_groups.size(), ".");
  const ServingBatch batch = check_serving_batch(ids, lengths, weights);
  const at::Tensor on_host = bag_offsets(batch).cpu();  // waits for a GPU
  const int64_t* const offsets = on_host.const_data_ptr<int64_t>();
  const int64_t last = offsets[on_host.numel() - 1];
  TORCH_CHECK_VALUE(last == ids.numel(), "lengths add up to ", last, ", but there are ",
                    ids.numel(), " ids.");
  // The ids of these features, one feature after the other.
  std::vector<at::Tensor> of_ids, of_weights;
  std::vector<int64_t> counts;
  at::Tensor own_offsets =
      at::empty({static_cast<int64_t>(features.size()) * batch.batch_size + 1}, on_host.options());
  int64_t* to = own_offsets.data_ptr<int64_t>();
  *to++ = 0;
  int64_t total = 0;
  for (const int64_t feature : features) {
    TORCH_CHECK_VALUE(feature >= 0 && feature < batch.features, "feature ", feature,
                      " is asked for, but there are lengths of ", batch.features, " features.");
    const int64_t* const feature_offsets = offsets + feature * batch.batch_size;
    const int64_t first = feature_offsets[0], n = feature_offsets[batch.batch_size] - first;
    of_ids.push_back(batch.ids.narrow(0, first, n));
    if (batch.weights.defined()) of_weights.push_back(batch.weights.narrow(0, first, n));
    for (int64_t bag = 1; bag <= batch.batch_size; ++bag)
      *to++ = total + feature_offsets[bag] - first;
    total += n;
    counts.push_back(n);
  }
  std::optional<at::Tensor> weights_of_ids;
  if (batch.weights.defined()) weights_of_ids = at::cat(of_weights);
  using Lookup = at::Tensor(at::TensorList, int64_t, const at::Tensor&, const at::Tensor&,
                            const std::optional<at::Tensor>&, const std::optional<at::Tensor>&,
                            int64_t, bool, bool);
  static const auto lookup =
      c10::Dispatcher::singleton().findSchemaOrThrow("torchrec_hkv::tt_lookup", "").typed<Lookup>();
  const at::Tensor out = lookup.call(open->tt_cores[group], open->tt_groups[group], at::cat(of_ids),
                                     own_offsets.to(ids.device()), weights_of_ids, std::nullopt,
                                     batch.batch_size, mean, pooled);
  int64_t columns = pooled ? 0 : out.size(1);
  for (const int64_t dim : dims) columns = pooled ? columns + dim : dim == columns ? columns : -1;
  TORCH_CHECK_VALUE(dims.size() == features.size() && columns == out.size(1), "dims are ", dims,
                    ", but the outputs of these tables have ", out.size(1), " columns.");
  if (pooled) return {out};
  std::vector<at::Tensor> rows_of;
  int64_t first = 0;
  for (const int64_t n : counts) {
    rows_of.push_back(out.narrow(0, first, n).clone());
    first += n;
  }
  return rows_of;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(torchrec_hkv, m) {
  m.def(
      "serving_tt(Tensor handle, Tensor ids, Tensor lengths, Tensor? weights, int[] features, "
      "int group, int[] dims, bool mean, bool pooled) -> Tensor[]");
}

TORCH_LIBRARY_IMPL(torchrec_hkv, CPU, m) { m.impl("serving_tt", &serving_tt); }

#ifdef TORCHREC_HKV_CUDA
TORCH_LIBRARY_IMPL(torchrec_hkv, CUDA, m) { m.impl("serving_tt", &serving_tt); }
#endif

}  // namespace torchrec_hkv::bindings
