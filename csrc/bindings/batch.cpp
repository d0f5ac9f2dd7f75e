#include "bindings/batch.h"

#include "bindings/checks.h"
#include "hash_table/admission_kernels.h"
#include "hash_table/kernels.h"

namespace torchrec_hkv::bindings {
namespace {

// Positions and bags are kept in 32 bits, and the scratch table of an insertion has at most 2^31
// places.
constexpr int64_t kMaxBatch = int64_t{1} << 31;

void check_offsets(const TableGroup& group, const at::Tensor& offsets, int64_t batch_size,
                   int64_t num_features, int64_t num_ids) {
  check_dtype(offsets, "offsets", at::kLong);
  check_device(offsets, "offsets", group.device());
  TORCH_CHECK_VALUE(batch_size >= 0, "batch_size is ", batch_size, ", but must not be negative.");
  check_length(offsets, "offsets", num_features * batch_size + 1);
  TORCH_CHECK_VALUE(offsets.is_contiguous(), "offsets must be contiguous.");
  TORCH_CHECK_VALUE(offsets.numel() < kMaxBatch, "a batch has ", offsets.numel() - 1,
                    " bags, but must have fewer than 2^31.");
  if (group.device().is_cuda()) return;  // looking would wait for the device
  const int64_t* at = offsets.const_data_ptr<int64_t>();
  const int64_t bags = offsets.numel() - 1;
  TORCH_CHECK_VALUE(at[0] == 0, "offsets must begin with 0, but begin with ", at[0], ".");
  for (int64_t b = 0; b < bags; ++b) {
    TORCH_CHECK_VALUE(at[b] <= at[b + 1], "offsets must not decrease, but go from ", at[b], " to ",
                      at[b + 1], " at bag ", b, ".");
  }
  TORCH_CHECK_VALUE(at[bags] == num_ids, "offsets must end with the number of ids, ", num_ids,
                    ", but end with ", at[bags], ".");
}

}  // namespace

hash_table::Batch make_batch(const TableGroup& group, const at::Tensor& ids,
                             const std::optional<at::Tensor>& offsets, int64_t batch_size,
                             int64_t rounds) {
  const int64_t num_features = rounds * group.num_features();
  check_dtype(ids, "ids", at::kLong);
  check_vector(ids, "ids");
  check_device(ids, "ids", group.device());
  TORCH_CHECK_VALUE(ids.is_contiguous(), "ids must be contiguous.");
  TORCH_CHECK_VALUE(ids.numel() < kMaxBatch, "a batch has ", ids.numel(),
                    " ids, but must have fewer than 2^31.");
  if (offsets) {
    check_offsets(group, *offsets, batch_size, num_features, ids.numel());
  } else {
    TORCH_CHECK_VALUE(num_features == 1, "offsets must be given for a group of ", num_features,
                      " features.");
  }
  return hash_table::Batch{ids.const_data_ptr<int64_t>(),
                           offsets ? offsets->const_data_ptr<int64_t>() : nullptr,
                           group.feature_tables(),
                           group.feature_columns(),
                           static_cast<int32_t>(num_features),
                           offsets ? batch_size : 1,
                           ids.numel()};
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

}  // namespace torchrec_hkv::bindings
