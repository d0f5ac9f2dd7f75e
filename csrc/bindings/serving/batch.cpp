#include "bindings/serving/batch.h"

#include "runtime/checks.h"

namespace torchrec_hkv::bindings {
using namespace runtime;

void check_total_length(int64_t total, int64_t ids) {
  TORCH_CHECK_VALUE(total == ids, "lengths add up to ", total, ", but there are ", ids, " ids.");
}

ServingBatch check_serving_batch(const at::Tensor& ids, const at::Tensor& lengths,
                                 const std::optional<at::Tensor>& weights) {
  check_dtype(ids, "ids", at::kLong);
  check_vector(ids, "ids");
  TORCH_CHECK_TYPE(lengths.scalar_type() == at::kLong || lengths.scalar_type() == at::kInt,
                   "lengths must be of dtype Int or Long, but are of dtype ", lengths.scalar_type(),
                   ".");
  TORCH_CHECK_VALUE(lengths.dim() == 2, "lengths must have shape [features, samples], but have ",
                    lengths.sizes(), ".");
  check_device(lengths, "lengths", ids.device());
  ServingBatch batch;
  batch.ids = ids.contiguous();
  batch.features = lengths.size(0);
  batch.batch_size = lengths.size(1);
  if (weights) {
    check_dtype(*weights, "weights", at::kFloat);
    check_length(*weights, "weights", ids.numel());
    check_device(*weights, "weights", ids.device());
    batch.weights = weights->contiguous();
  }
  const int64_t bags = lengths.numel();
  if (ids.is_cuda()) {  // looking at the lengths would wait for the device
    batch.offsets = at::zeros({bags + 1}, ids.options());
    batch.offsets.narrow(0, 1, bags).copy_(at::cumsum(lengths.flatten(), 0, at::kLong));
    return batch;
  }
  batch.offsets = at::empty({bags + 1}, ids.options());
  const at::Tensor from = lengths.contiguous();
  int64_t* const offsets = batch.offsets.data_ptr<int64_t>();
  offsets[0] = 0;
  const auto add_up = [&](const auto* of) {
    for (int64_t bag = 0; bag < bags; ++bag) {
      TORCH_CHECK_VALUE(of[bag] >= 0, "lengths must not be negative, but have ", of[bag],
                        " for feature ", bag / batch.batch_size, ", sample ",
                        bag % batch.batch_size, ".");
      offsets[bag + 1] = offsets[bag] + of[bag];
    }
  };
  if (from.scalar_type() == at::kInt) {
    add_up(from.const_data_ptr<int32_t>());
  } else {
    add_up(from.const_data_ptr<int64_t>());
  }
  check_total_length(offsets[bags], ids.numel());
  return batch;
}

serving::Feature feature_of(const ServingTables& tables, const ServingBatch& batch, int64_t feature,
                            int64_t table) {
  TORCH_CHECK_VALUE(feature >= 0 && feature < batch.features, "feature ", feature,
                    " is asked for, but there are lengths of ", batch.features, " features.");
  TORCH_CHECK_VALUE(table >= 0 && table < static_cast<int64_t>(tables.tables.size()), "table ",
                    table, " is asked for, but there are ", tables.tables.size(), " tables.");
  serving::Feature made{};
  made.table = &tables.tables[table];
  made.ids = batch.ids.const_data_ptr<int64_t>();
  made.unknown = tables.counters.data_ptr<int64_t>() + 2 * table + 1;
  return made;
}

void count_lookups(const ServingTables& tables, int64_t table, int64_t n) {
  __atomic_fetch_add(tables.counters.data_ptr<int64_t>() + 2 * table, n, __ATOMIC_RELAXED);
}

}  // namespace torchrec_hkv::bindings
