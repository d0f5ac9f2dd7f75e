#include "runtime/tensor_train/group.h"

#include <limits>

#include "runtime/registry.h"

#ifdef TORCHREC_HKV_CUDA
#include <c10/cuda/CUDAFunctions.h>
#endif

namespace torchrec_hkv::runtime {
namespace {

tensor_train::TableCpu table_of(const TensorTrainShape& shape) {
  const size_t cores = shape.p.size();
  TORCH_CHECK_VALUE(cores >= 2 && cores <= tensor_train::kMaxCores && shape.q.size() == cores &&
                        shape.ranks.size() == cores - 1,
                    "table '", shape.name, "' has ", cores, " row factors, ", shape.q.size(),
                    " column factors and ", shape.ranks.size(),
                    " ranks, but must have 2 to 4 of the first, as many of the second and one "
                    "fewer of the third.");
  tensor_train::TableCpu table{};
  table.rows = shape.rows;
  table.cores = static_cast<int32_t>(cores);
  table.r[0] = table.r[cores] = 1;
  constexpr int64_t kMax = std::numeric_limits<int32_t>::max();
  for (size_t k = 0; k < cores; ++k) {
    const int64_t before = k == 0 ? 1 : shape.ranks[k - 1];
    const int64_t after = k + 1 == cores ? 1 : shape.ranks[k];
    TORCH_CHECK_VALUE(before <= 1 << 14 && after <= 1 << 14 && shape.q[k] <= 1 << 14 &&
                          before * shape.q[k] * after <= kMax / 4,
                      "table '", shape.name, "' has a core of slices of ", before, " x ",
                      shape.q[k], " x ", after,
                      " elements, but factors and ranks must be at most 16384 and a slice must "
                      "have fewer than 2^29 elements.");
    table.p[k] = shape.p[k];
    table.q[k] = static_cast<int32_t>(shape.q[k]);
    table.r[k] = static_cast<int32_t>(before);
  }
  return table;
}

}  // namespace

std::shared_ptr<TensorTrainGroup> TensorTrainGroup::make(std::vector<TensorTrainShape> shapes,
                                                         std::vector<int64_t> feature_tables,
                                                         const OptimizerConfig& optimizer,
                                                         bool tf32) {
  TORCH_CHECK_VALUE(!shapes.empty(), "a group must have at least one table.");
  TORCH_CHECK_VALUE(!feature_tables.empty(), "a group must have at least one feature.");
  TORCH_CHECK_VALUE(optimizer.kind != Optimizer::kLamb,
                    "Tensor-Train tables are not trained by LAMB: take another optimizer.");
  TORCH_CHECK_VALUE(!limits_norm(optimizer), "max_norm is ", optimizer.max_norm,
                    ", but Tensor-Train tables store no rows whose norm could be limited: leave it "
                    "None.");
  std::shared_ptr<TensorTrainGroup> group(new TensorTrainGroup);
  group->optimizer_ = optimizer;
  group->tf32_ = tf32;
  for (const TensorTrainShape& shape : shapes) {
    group->tables_.push_back(table_of(shape));
    group->names_.push_back(shape.name);
    group->num_cores_ += group->tables_.back().cores;
    for (int32_t k = 0; k < group->tables_.back().cores; ++k) {
      group->num_elements_ += group->tables_.back().p[k] * group->tables_.back().slice(k);
      group->num_slices_ += group->tables_.back().p[k];
    }
    group->num_prefixes_ += group->tables_.back().heads() * group->tables_.back().middles();
  }
  group->common_dim_ = group->tables_[0].dim();
  for (const tensor_train::TableCpu& table : group->tables_) {
    if (table.dim() != group->common_dim_) group->common_dim_ = -1;
  }
  for (const int64_t table : feature_tables) {
    TORCH_CHECK_VALUE(table >= 0 && table < group->num_tables(), "a feature has table ", table,
                      ", but must have one of 0 to ", group->num_tables() - 1, ".");
    group->feature_tables_.push_back(static_cast<int32_t>(table));
    group->total_dim_ += group->tables_[table].dim();
  }
  group->handle_ = Registry<TensorTrainGroup>::instance().add(group);
  return group;
}

int64_t TensorTrainGroup::outside([[maybe_unused]] c10::Device device) {
#ifdef TORCHREC_HKV_CUDA
  if (device.is_cuda()) {
    // With an index, like the device of ids.
    const c10::DeviceIndex index =
        device.has_index() ? device.index() : c10::cuda::current_device();
    return plans_.outside({c10::kCUDA, index}).item<int64_t>();
  }
#endif
  return 0;
}

TensorTrainGroup::~TensorTrainGroup() { Registry<TensorTrainGroup>::instance().remove(handle_); }

std::shared_ptr<TensorTrainGroup> TensorTrainGroup::from_handle(int64_t handle) {
  std::shared_ptr<TensorTrainGroup> group = Registry<TensorTrainGroup>::instance().find(handle);
  TORCH_CHECK_VALUE(group != nullptr, "no group of Tensor-Train tables has the handle ", handle,
                    "; it may have been deleted.");
  return group;
}

}  // namespace torchrec_hkv::runtime
