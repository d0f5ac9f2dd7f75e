#include "bindings/serving/batch.h"

#include <algorithm>

#include "runtime/checks.h"

namespace torchrec_hkv::bindings {
using namespace runtime;

namespace {

void check_total_length(int64_t total, int64_t ids) {
  TORCH_CHECK_VALUE(total == ids, "lengths add up to ", total, ", but there are ", ids, " ids.");
}

// Calls body(lengths) with the contiguous lengths of a batch in host memory, int32_t or int64_t.
template <class Body>
void with_lengths(const ServingBatch& batch, const Body& body) {
  const at::Tensor lengths = batch.lengths.contiguous();
  if (lengths.scalar_type() == at::kInt) {
    body(lengths.const_data_ptr<int32_t>());
  } else {
    body(lengths.const_data_ptr<int64_t>());
  }
}

// Throws if a length is negative. signs: bitwise or of the lengths from bag `first` on.
template <class Length>
void check_signs(const ServingBatch& batch, int64_t signs, const Length* lengths, int64_t first) {
  if (signs >= 0) return;
  while (lengths[first] >= 0) ++first;
  TORCH_CHECK_VALUE(false, "lengths must not be negative, but have ", lengths[first],
                    " for feature ", first / batch.batch_size, ", sample ",
                    first % batch.batch_size, ".");
}

}  // namespace

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
  batch.lengths = lengths;
  batch.features = lengths.size(0);
  batch.batch_size = lengths.size(1);
  if (weights) {
    check_dtype(*weights, "weights", at::kFloat);
    check_length(*weights, "weights", ids.numel());
    check_device(*weights, "weights", ids.device());
    batch.weights = weights->contiguous();
  }
  return batch;
}

at::Tensor bag_offsets(const ServingBatch& batch) {
  const int64_t bags = batch.lengths.numel();
  at::Tensor offsets = at::empty({bags + 1}, batch.ids.options());
  if (batch.ids.is_cuda()) {  // reading the lengths would wait for the device
    offsets.select(0, 0).zero_();
    at::Tensor ends = offsets.narrow(0, 1, bags);
    at::cumsum_out(ends, batch.lengths.flatten(), 0, at::kLong);
    return offsets;
  }
  int64_t* const to = offsets.data_ptr<int64_t>();
  with_lengths(batch, [&](const auto* lengths) {
    int64_t end = to[0] = 0, signs = 0;
    for (int64_t bag = 0; bag < bags; ++bag) {
      signs |= lengths[bag];
      to[bag + 1] = end += lengths[bag];
    }
    check_signs(batch, signs, lengths, 0);
  });
  check_total_length(to[bags], batch.ids.numel());
  return offsets;
}

std::vector<int64_t> feature_offsets(const ServingBatch& batch) {
  std::vector<int64_t> offsets(batch.features + 1, 0);
  if (batch.ids.is_cuda()) {
    const at::Tensor sums = batch.lengths.sum({1}, false, at::kLong).cpu();
    std::copy_n(sums.const_data_ptr<int64_t>(), batch.features, offsets.data() + 1);
  } else {
    with_lengths(batch, [&](const auto* lengths) {
      for (int64_t feature = 0; feature < batch.features; ++feature) {
        const int64_t first = feature * batch.batch_size;
        int64_t sum = 0, signs = 0;  // testing each length would take a tenth of the lookup's time
        for (int64_t bag = first; bag < first + batch.batch_size; ++bag) {
          signs |= lengths[bag];
          sum += lengths[bag];
        }
        check_signs(batch, signs, lengths, first);
        offsets[feature + 1] = sum;
      }
    });
  }
  for (int64_t feature = 0; feature < batch.features; ++feature) {
    TORCH_CHECK_VALUE(offsets[feature + 1] >= 0, "lengths of feature ", feature, " add up to ",
                      offsets[feature + 1], ", but lengths must not be negative.");
    offsets[feature + 1] += offsets[feature];
  }
  check_total_length(offsets.back(), batch.ids.numel());
  return offsets;
}

void check_feature(const ServingBatch& batch, int64_t feature) {
  TORCH_CHECK_VALUE(feature >= 0 && feature < batch.features, "feature ", feature,
                    " is asked for, but there are lengths of ", batch.features, " features.");
}

serving::Feature feature_of(const ServingTables& tables, const at::Tensor& ids, int64_t table) {
  TORCH_CHECK_VALUE(table >= 0 && table < static_cast<int64_t>(tables.tables.size()), "table ",
                    table, " is asked for, but there are ", tables.tables.size(), " tables.");
  serving::Feature made{};
  made.table = &tables.tables[table];
  made.ids = ids.const_data_ptr<int64_t>();
  made.unknown = tables.counters.data_ptr<int64_t>() + 2 * table + 1;
  return made;
}

void count_lookups(const ServingTables& tables, int64_t table, int64_t n) {
  __atomic_fetch_add(tables.counters.data_ptr<int64_t>() + 2 * table, n, __ATOMIC_RELAXED);
}

}  // namespace torchrec_hkv::bindings
