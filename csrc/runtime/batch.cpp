#include "runtime/batch.h"

#include <cstring>
#include <limits>

#include "hash_table/admission_kernels.h"
#include "hash_table/kernels.h"
#include "runtime/checks.h"
#include "runtime/on_device.h"

namespace torchrec_hkv::runtime {
namespace {

using hash_table::Batch;
using hash_table::FeatureBags;

void check_offsets(const TableGroup& group, const at::Tensor& offsets, int64_t num_bags,
                   int64_t num_ids) {
  check_dtype(offsets, "offsets", at::kLong);
  check_device(offsets, "offsets", group.device());
  check_length(offsets, "offsets", num_bags + 1);
  TORCH_CHECK_VALUE(offsets.is_contiguous(), "offsets must be contiguous.");
  TORCH_CHECK_VALUE(num_bags > 0 || num_ids == 0, "a batch without bags must have no ids, but has ",
                    num_ids, ".");
  if (group.device().is_cuda()) return;  // reading the offsets would wait for the device
  const int64_t* at = offsets.const_data_ptr<int64_t>();
  TORCH_CHECK_VALUE(at[0] == 0, "offsets must begin with 0, but begin with ", at[0], ".");
  for (int64_t b = 0; b < num_bags; ++b) {
    TORCH_CHECK_VALUE(at[b] <= at[b + 1], "offsets must not decrease, but go from ", at[b], " to ",
                      at[b + 1], " at bag ", b, ".");
  }
  TORCH_CHECK_VALUE(at[num_bags] == num_ids, "offsets must end with the number of ids, ", num_ids,
                    ", but end with ", at[num_bags], ".");
}

Batch checked_ids(const TableGroup& group, const at::Tensor& ids) {
  group.check_bad_offsets();
  check_dtype(ids, "ids", at::kLong);
  check_vector(ids, "ids");
  check_device(ids, "ids", group.device());
  TORCH_CHECK_VALUE(ids.is_contiguous(), "ids must be contiguous.");
  TORCH_CHECK_VALUE(ids.numel() < kMaxBatch, "a batch has ", ids.numel(),
                    " ids, but must have fewer than 2^31.");
  Batch batch{};
  batch.ids = ids.const_data_ptr<int64_t>();
  batch.feature_tables = group.feature_tables();
  batch.feature_columns = group.feature_columns();
  batch.num_features = static_cast<int32_t>(group.num_features());
  batch.batch_size = 1;
  batch.num_ids = ids.numel();
  batch.num_bags = 1;
  return batch;
}

}  // namespace

BagLayout::BagLayout(const TableGroup& group, int64_t batch_size, at::OptionalIntArrayRef bags,
                     int64_t rounds)
    : is_ragged_(bags.has_value()), batch_size_(batch_size) {
  TORCH_CHECK_VALUE(rounds >= 1, "rounds is ", rounds, ", but must be at least 1.");
  TORCH_CHECK_VALUE(
      group.total_dim() == 0 || rounds <= std::numeric_limits<int32_t>::max() / group.total_dim(),
      "the columns of ", rounds, " rounds of ", group.total_dim(),
      " must not exceed 2^31 - 1 together.");
  const int64_t features = group.num_features();
  num_features_ = rounds * features;
  if (is_ragged_) {
    TORCH_CHECK_VALUE(static_cast<int64_t>(bags->size()) == num_features_, "bags must have ",
                      num_features_, " numbers, one for each feature, but has ", bags->size(), ".");
    FeatureBags next{0, 0, 0};
    for (int64_t f = 0; f < num_features_; ++f) {
      const int64_t number = (*bags)[f];
      TORCH_CHECK_VALUE(number >= 0 && number < kMaxBatch, "bags of feature ", f, " are ", number,
                        ", but must be from 0 to 2^31 - 1.");
      next.stride = group.feature_dim(f % features);
      ragged_.push_back(next);
      next.first += number;
      next.output += number * next.stride;
    }
    ragged_.push_back(next);
    num_bags_ = next.first;
    output_shape_ = {next.output};
  } else {
    TORCH_CHECK_VALUE(batch_size >= 0, "batch_size is ", batch_size, ", but must not be negative.");
    TORCH_CHECK_VALUE(batch_size < kMaxBatch, "batch_size is ", batch_size,
                      ", but must be less than 2^31.");
    num_bags_ = num_features_ * batch_size;
    output_shape_ = {batch_size, rounds * group.total_dim()};
  }
  TORCH_CHECK_VALUE(num_bags_ + 1 < kMaxBatch, "a batch has ", num_bags_,
                    " bags, but must have fewer than 2^31.");
  const c10::OptionalDeviceGuard guard(group.device());
  if (rounds > 1) {
    const auto options = at::dtype(at::kInt).device(group.device());
    const auto given = [&](const int32_t* from) {
      return at::from_blob(const_cast<int32_t*>(from), {features}, options);
    };
    const at::Tensor first = at::arange(rounds, options).mul(group.total_dim()).unsqueeze(1);
    tables_ = given(group.feature_tables()).repeat({rounds});
    columns_ = first.add(given(group.feature_columns())).flatten();
  }
#ifdef TORCHREC_HKV_CUDA
  if (is_ragged_ && group.device().is_cuda()) {
    const auto n = static_cast<int64_t>(ragged_.size());
    ragged_on_device_ = at::empty({n * static_cast<int64_t>(sizeof(FeatureBags))},
                                  at::dtype(at::kByte).device(group.device()));
    auto* const to = reinterpret_cast<FeatureBags*>(ragged_on_device_.data_ptr<uint8_t>());
    HKV_ON_DEVICE(group.device(), ,
                  hash_table::cuda::write_feature_bags(to, ragged_.data(), n, stream));
  }
#endif
}

std::vector<int64_t> BagLayout::first_bags() const {
  std::vector<int64_t> first;
  for (int64_t f = 0; f <= num_features_; ++f) {
    first.push_back(is_ragged_ ? ragged_[f].first : f * batch_size_);
  }
  return first;
}

void BagLayout::describe(Batch* batch) const {
  batch->num_features = static_cast<int32_t>(num_features_);
  batch->batch_size = is_ragged_ ? 0 : batch_size_;
  batch->num_bags = num_bags_;
  if (tables_.defined()) {
    batch->feature_tables = tables_.const_data_ptr<int32_t>();
    batch->feature_columns = columns_.const_data_ptr<int32_t>();
  }
  if (ragged_on_device_.defined()) {
    batch->ragged =
        reinterpret_cast<const FeatureBags*>(ragged_on_device_.const_data_ptr<uint8_t>());
  } else if (is_ragged_) {
    batch->ragged = ragged_.data();
  }
}

Batch make_batch(const TableGroup& group, const at::Tensor& ids, const at::Tensor& offsets,
                 const BagLayout& layout) {
  Batch batch = checked_ids(group, ids);
  check_offsets(group, offsets, layout.num_bags(), ids.numel());
  layout.describe(&batch);
  batch.offsets = offsets.const_data_ptr<int64_t>();
  group.watch_offsets(&batch);
  return batch;
}

Batch make_batch(const TableGroup& group, const at::Tensor& ids) {
  const Batch batch = checked_ids(group, ids);
  TORCH_CHECK_VALUE(batch.num_features == 1, "offsets must be given for a group of ",
                    batch.num_features, " features.");
  return batch;
}

at::Tensor insert_scratch(const TableGroup& group, const at::Tensor& ids,
                          [[maybe_unused]] const hash_table::Placement& placement,
                          [[maybe_unused]] bool scored) {
  int64_t bytes = 0;
#ifdef TORCHREC_HKV_CUDA
  if (group.device().is_cuda()) {
    bytes = static_cast<int64_t>(
        hash_table::cuda::find_or_insert_scratch(ids.numel(), placement, scored));
  }
#endif
  return at::empty({bytes}, ids.options().dtype(at::kByte).device(group.device()));
}

}  // namespace torchrec_hkv::runtime
