// The ops of ops.cpp for tables on a GPU. index_batch in tensor_train/cuda/kernels.h creates the
// index of a batch. It depends on weights, mean and pooled.
#ifdef TORCHREC_HKV_CUDA

#include <ATen/Context.h>
#include <ATen/cuda/EmptyTensor.h>
#include <torch/library.h>

#include <algorithm>

#include "runtime/checks.h"
#include "runtime/on_device.h"
#include "runtime/tensor_train/batch.h"
#include "runtime/tensor_train/fixed_point.h"
#include "runtime/tensor_train/plan.h"

namespace torchrec_hkv::bindings::cuda_ops {

using namespace runtime;

namespace {

namespace kernels = tensor_train::cuda;

cudaStream_t current_stream(const TensorTrainPlan& plan) {
  return c10::cuda::getCurrentCUDAStream(plan.device.index());
}

kernels::BatchCuda batch_of(const TensorTrainBatch& call, const TensorTrainPlan& plan,
                            const at::Tensor& ids) {
  const TensorTrainGroup& group = *call.group;
  kernels::BatchCuda batch;
  batch.ids = call.batch.ids;
  batch.offsets = call.batch.offsets;
  batch.weights = call.batch.weights;
  batch.feature_tables = plan.feature_tables;
  batch.feature_columns = plan.feature_columns;
  batch.num_features = group.num_features();
  batch.batch_size = call.batch.batch_size;
  batch.num_ids = ids.numel();
  batch.mean = call.batch.mean;
  batch.pooled = call.batch.pooled;
  batch.stride = batch.pooled ? group.total_dim() : group.common_dim();
  batch.aligned = batch.stride % 4 == 0;
  batch.deterministic = at::globalContext().deterministicAlgorithms();
  if (batch.pooled) {
    int64_t column = 0;
    for (int32_t f = 0; f < group.num_features(); ++f) {
      batch.aligned = batch.aligned && column % 4 == 0;
      column += group.table(group.feature_tables()[f]).dim();
    }
  }
  return batch;
}

bool is_aligned(const at::Tensor& tensor) {
  return reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) % 16 == 0;
}

// Allocates memory without the dispatcher, which takes the host longer than the allocation.
at::Tensor empty_beside(at::IntArrayRef shape, at::ScalarType dtype, const at::Tensor& ids) {
  return at::Tensor(at::detail::empty_cuda(shape, dtype, ids.device(), std::nullopt));
}
// Undefined if bytes is 0.
at::Tensor scratch_of(size_t bytes, const at::Tensor& ids) {
  if (bytes == 0) return {};
  return empty_beside({static_cast<int64_t>(bytes)}, at::kByte, ids);
}
void* address_of(const at::Tensor& scratch) {
  return scratch.defined() ? scratch.mutable_data_ptr() : nullptr;
}

// An upper bound of index_bytes that fakes can compute; also in torchrec_hkv/tensor_train/ops.py.
int64_t index_words(const TensorTrainGroup& group, const kernels::BatchCuda& batch) {
  const bool scaled = batch.weights != nullptr || (batch.mean && batch.pooled);
  return 2 * std::min(batch.num_ids, group.num_prefixes()) + (scaled ? 4 : 3) * batch.num_ids + 400;
}

at::Tensor sorted(const TensorTrainBatch& call, const at::Tensor& ids) {
  const auto plan = call.group->plans().find(*call.group, ids.device(), at::kFloat, {});
  const at::Tensor outside = call.group->plans().outside(ids.device());
  const kernels::BatchCuda batch = batch_of(call, *plan, ids);
  const int64_t words = index_words(*call.group, batch);
  TORCH_INTERNAL_ASSERT(kernels::index_bytes(plan->kernels, batch) <= sizeof(int64_t) * words);
  at::Tensor index = empty_beside({words}, at::kLong, ids);
  const at::Tensor scratch = scratch_of(kernels::index_scratch_bytes(plan->kernels, batch), ids);
  kernels::index_batch(plan->kernels, batch, index.mutable_data_ptr(), address_of(scratch),
                       outside.mutable_data_ptr<int64_t>(), nullptr, current_stream(*plan));
  return index;
}

at::Tensor tt_sort(int64_t group, const at::Tensor& ids, const at::Tensor& offsets,
                   const std::optional<at::Tensor>& weights, int64_t batch_size, bool mean,
                   bool pooled) {
  const c10::OptionalDeviceGuard guard(ids.device());
  return sorted(sortable_batch(group, ids, offsets, weights, batch_size, mean, pooled), ids);
}

// The arguments of one call, converted for its kernels.
struct DeviceCall {
  TensorTrainBatch checked;
  std::shared_ptr<TensorTrainPlan> plan;
  kernels::BatchCuda batch;
  kernels::Precision precision;
};

std::shared_ptr<TensorTrainPlan> plan_of(const TensorTrainBatch& checked, at::Device device) {
  std::vector<const void*> cores;
  for (const tensor_train::TableCpu& table : checked.tables) {
    cores.insert(cores.end(), table.core, table.core + table.cores);
  }
  const at::ScalarType dtype =
      checked.tables[0].type == RowType::kFloat32 ? at::kFloat : at::kBFloat16;
  return checked.group->plans().find(*checked.group, device, dtype, cores);
}

DeviceCall call_of(TensorTrainBatch checked, const at::Tensor& ids) {
  DeviceCall call;
  call.plan = plan_of(checked, ids.device());
  call.batch = batch_of(checked, *call.plan, ids);
  call.precision = checked.group->tf32() ? kernels::Precision::kTf32 : kernels::Precision::kFp32;
  call.checked = std::move(checked);
  return call;
}

void check_index(const DeviceCall& call, const at::Tensor& index) {
  const int64_t words = index_words(*call.checked.group, call.batch);
  TORCH_CHECK_VALUE(index.numel() == words, "index must have ", words, " elements, but has ",
                    index.numel(),
                    ": sort the batch with the weights, mean and pooled of its lookup.");
}

at::Tensor rows_of(const DeviceCall& call, const at::Tensor& ids, const at::Tensor& index) {
  at::Tensor out = empty_beside(output_shape(call.checked, ids), at::kFloat, ids);
  if (out.numel() == 0) return out;
  TensorTrainPlan& plan = *call.plan;
  // Lookups write the heads of tables with four cores.
  plan.order.run(plan.heads.empty() ? kReadAll : kWriteAll, [&] {
    const cudaStream_t stream = current_stream(plan);
    const at::Tensor scratch =
        scratch_of(kernels::lookup_scratch_bytes(plan.kernels, call.batch), ids);
    for (const kernels::HeadView& head : plan.heads) kernels::make_heads(head, stream);
    kernels::lookup(plan.kernels, call.batch, call.precision, index.const_data_ptr(),
                    address_of(scratch), out.mutable_data_ptr<float>(), /*cleared=*/false, stream);
  });
  return out;
}

at::Tensor tt_lookup(at::TensorList cores, int64_t group, const at::Tensor& ids,
                     const at::Tensor& offsets, const std::optional<at::Tensor>& weights,
                     const std::optional<at::Tensor>& given, int64_t batch_size, bool mean,
                     bool pooled) {
  const c10::OptionalDeviceGuard guard(ids.device());
  const at::Tensor index =
      given ? *given : tt_sort(group, ids, offsets, weights, batch_size, mean, pooled);
  const DeviceCall call = call_of(
      checked_batch(cores, group, ids, offsets, weights, index, batch_size, mean, pooled), ids);
  check_index(call, index);
  return rows_of(call, ids, index);
}

at::Tensor tt_lookup_fused(const at::Tensor& /*anchor*/, at::TensorList cores,
                           at::TensorList /*states*/, const at::Tensor& /*step*/, int64_t group,
                           const at::Tensor& ids, const at::Tensor& offsets,
                           const std::optional<at::Tensor>& weights,
                           const std::optional<at::Tensor>& index, int64_t batch_size, bool mean,
                           bool pooled, const at::Tensor& /*learning_rate*/) {
  return tt_lookup(cores, group, ids, offsets, weights, index, batch_size, mean, pooled);
}

// Adds to the plan's gradients and flags, which must be zero. Increments the step if it is given.
void add_gradients(const DeviceCall& call, at::TensorList cores, const at::Tensor& grad,
                   const at::Tensor& ids, const std::optional<at::Tensor>& weights,
                   const at::Tensor& index, const std::optional<at::Tensor>& step = std::nullopt) {
  if (ids.numel() == 0) {
    if (step) step->add_(1);
    return;
  }
  const TensorTrainGroup& group = *call.checked.group;
  const TensorTrainPlan& plan = *call.plan;
  const cudaStream_t stream = current_stream(plan);
  const at::Tensor of_output = is_aligned(grad) ? grad : grad.clone();
  const at::Tensor scratch =
      scratch_of(kernels::gradients_scratch_bytes(plan.kernels, call.batch), ids);
  std::optional<FixedPointGradients> fixed;
  if (call.batch.deterministic) fixed.emplace(group, plan, cores, grad, weights, ids.numel());
  for (const kernels::HeadView& head : plan.heads) kernels::make_heads(head, stream);
  kernels::gradients(plan.kernels, call.batch, call.precision, index.const_data_ptr(),
                     address_of(scratch), of_output.const_data_ptr<float>(),
                     fixed ? fixed->view() : kernels::FixedPointSums{},
                     step ? step->mutable_data_ptr<int64_t>() : nullptr, stream);
  if (fixed) fixed->finish(group, plan);
  for (const kernels::HeadView& head : plan.heads) kernels::heads_backward(head, stream);
}

std::vector<at::Tensor> tt_gradients(at::TensorList cores, int64_t group, const at::Tensor& grad,
                                     const at::Tensor& ids, const at::Tensor& offsets,
                                     const std::optional<at::Tensor>& weights,
                                     const at::Tensor& index, int64_t batch_size, bool mean,
                                     bool pooled) {
  const c10::OptionalDeviceGuard guard(ids.device());
  const DeviceCall call = call_of(
      checked_batch(cores, group, ids, offsets, weights, index, batch_size, mean, pooled), ids);
  check_index(call, index);
  const at::Tensor of_output = checked_gradient(call.checked, ids, grad);
  std::vector<at::Tensor> gradients;
  TensorTrainPlan& plan = *call.plan;
  plan.order.run(kWriteAll, [&] {
    for (const at::Tensor& core : cores) gradients.push_back(at::empty_like(core));
    add_gradients(call, cores, of_output, ids, weights, index);
    for (size_t i = 0; i < gradients.size(); ++i) {
      gradients[i].view({-1}).copy_(plan.gradients[i]);
    }
    plan.zeros.zero_();
  });
  return gradients;
}

void tt_update(at::TensorList cores, at::TensorList states, at::Tensor step, int64_t group,
               const at::Tensor& grad, const at::Tensor& ids, const at::Tensor& offsets,
               const std::optional<at::Tensor>& weights, const at::Tensor& index,
               int64_t batch_size, bool mean, bool pooled, const at::Tensor& learning_rate) {
  const c10::OptionalDeviceGuard guard(ids.device());
  const DeviceCall call = call_of(
      checked_batch(cores, group, ids, offsets, weights, index, batch_size, mean, pooled), ids);
  check_index(call, index);
  check_states(call.checked, states, step, learning_rate, ids.device());
  const at::Tensor of_output = checked_gradient(call.checked, ids, grad);
  std::vector<void*> addresses;
  for (const at::Tensor& state : states) addresses.push_back(state.mutable_data_ptr());
  TensorTrainPlan& plan = *call.plan;
  plan.order.run(kWriteAll, [&] {
    const kernels::CoreView* const views = plan.core_views(*call.checked.group, addresses);
    add_gradients(call, cores, of_output, ids, weights, index, step);
    kernels::update_cores(views, static_cast<int32_t>(plan.cores.size()), plan.num_slices,
                          call.checked.group->optimizer(), learning_rate.const_data_ptr<float>(),
                          step.const_data_ptr<int64_t>(), current_stream(plan));
  });
}

// The flags of each core's slices, uint8 [p_k], within the plan's zeros.
std::vector<at::Tensor> touched_of(const TensorTrainPlan& plan, const TensorTrainBatch& checked) {
  std::vector<at::Tensor> touched;
  const auto* const begin = static_cast<const uint8_t*>(plan.zeros.const_data_ptr());
  for (const tensor_train::TableCpu& table : checked.tables) {
    for (int32_t k = 0; k < table.cores; ++k) {
      const int64_t at = plan.touched[touched.size()] - begin;
      touched.push_back(plan.zeros.slice(0, at, at + table.p[k]));
    }
  }
  return touched;
}

at::Tensor tt_flat_gradients(at::TensorList cores, int64_t group, const at::Tensor& grad,
                             const at::Tensor& ids, const at::Tensor& offsets,
                             const std::optional<at::Tensor>& weights, const at::Tensor& index,
                             int64_t batch_size, bool mean, bool pooled) {
  const c10::OptionalDeviceGuard guard(ids.device());
  const DeviceCall call = call_of(
      checked_batch(cores, group, ids, offsets, weights, index, batch_size, mean, pooled), ids);
  check_index(call, index);
  const at::Tensor of_output = checked_gradient(call.checked, ids, grad);
  at::Tensor flat;
  TensorTrainPlan& plan = *call.plan;
  plan.order.run(kWriteAll, [&] {
    flat = at::empty({call.checked.group->num_elements() + call.checked.group->num_slices()},
                     of_output.options());
    add_gradients(call, cores, of_output, ids, weights, index);
    int64_t next = 0;
    const auto append = [&](const at::Tensor& part) {
      flat.slice(0, next, next + part.numel()).copy_(part);
      next += part.numel();
    };
    for (const at::Tensor& gradient : plan.gradients) append(gradient);
    for (const at::Tensor& flags : touched_of(plan, call.checked)) append(flags);
    plan.zeros.zero_();
  });
  return flat;
}

void tt_apply_gradients(at::TensorList cores, at::TensorList states, at::Tensor step, int64_t group,
                        const at::Tensor& gradients, const at::Tensor& learning_rate) {
  const c10::OptionalDeviceGuard guard(gradients.device());
  const TensorTrainBatch checked = checked_cores(cores, group, gradients.device());
  check_states(checked, states, step, learning_rate, gradients.device());
  check_flat_gradients(checked, gradients, gradients.device());
  const std::shared_ptr<TensorTrainPlan> shared_plan = plan_of(checked, gradients.device());
  TensorTrainPlan& plan = *shared_plan;
  std::vector<void*> addresses;
  for (const at::Tensor& state : states) addresses.push_back(state.mutable_data_ptr());
  plan.order.run(kWriteAll, [&] {
    const kernels::CoreView* const views = plan.core_views(*checked.group, addresses);
    int64_t next = 0;
    const auto take = [&](int64_t count) {
      next += count;
      return gradients.slice(0, next - count, next);
    };
    for (at::Tensor& gradient : plan.gradients) gradient.copy_(take(gradient.numel()));
    for (at::Tensor& flags : touched_of(plan, checked)) flags.copy_(take(flags.numel()).gt(0));
    step.add_(1);
    kernels::update_cores(views, static_cast<int32_t>(plan.cores.size()), plan.num_slices,
                          checked.group->optimizer(), learning_rate.const_data_ptr<float>(),
                          step.const_data_ptr<int64_t>(), current_stream(plan));
    // The update only clears gradients of slices with a flag.
    plan.zeros.zero_();
  });
}

// Computes the rows of ids and the gradients of their outputs, both [n, columns]. If dims differ,
// each position is a separate bag in every feature, which is empty in all features but its own.
at::Tensor tt_weights_gradient(at::TensorList cores, int64_t group, const at::Tensor& grad,
                               const at::Tensor& ids, const at::Tensor& offsets,
                               const at::Tensor& index, int64_t batch_size, bool mean) {
  const c10::OptionalDeviceGuard guard(ids.device());
  const TensorTrainBatch checked = checked_batch(cores, group, ids, offsets, std::nullopt, index,
                                                 batch_size, mean, /*pooled=*/true);
  const at::Tensor of_output = checked_gradient(checked, ids, grad);
  const int64_t n = ids.numel();
  const int64_t features = checked.group->num_features();
  const int64_t dim = checked.group->common_dim();
  if (n == 0) return at::empty({0}, of_output.options());
  const at::Tensor positions = at::arange(n, ids.options());
  const at::Tensor bags = at::searchsorted(offsets, positions, /*out_int32=*/false,
                                           /*right=*/true) -
                          1;
  const at::Tensor samples = bags.remainder(batch_size);
  at::Tensor rows, gradients;
  if (dim >= 0) {
    const at::Tensor unpooled =
        tt_sort(group, ids, offsets, std::nullopt, batch_size, false, false);
    rows = tt_lookup(cores, group, ids, offsets, std::nullopt, unpooled, batch_size, false, false);
    const at::Tensor lines = samples * features + bags.floor_divide(batch_size);
    gradients = of_output.view({batch_size * features, dim}).index_select(0, lines);
  } else {
    const at::Tensor ends = offsets.slice(0, 0, offsets.numel(), batch_size);  // of the features
    const at::Tensor starts = positions.unsqueeze(0)
                                  .maximum(ends.slice(0, 0, features).unsqueeze(1))
                                  .minimum(ends.slice(0, 1, features + 1).unsqueeze(1))
                                  .reshape({-1});
    const at::Tensor alone = at::cat({starts, ends.slice(0, features, features + 1)});
    const at::Tensor pooled = tt_sort(group, ids, alone, std::nullopt, n, false, true);
    rows = tt_lookup(cores, group, ids, alone, std::nullopt, pooled, n, false, true);
    gradients = of_output.index_select(0, samples);
  }
  at::Tensor out = (rows * gradients).sum(1);
  if (mean) out = out / offsets.diff().index_select(0, bags);
  return out;
}

}  // namespace

TORCH_LIBRARY_IMPL(torchrec_hkv, CUDA, m) {
  m.impl("tt_sort", &tt_sort);
  m.impl("tt_lookup", &tt_lookup);
  m.impl("tt_lookup_fused", &tt_lookup_fused);
  m.impl("tt_gradients", &tt_gradients);
  m.impl("tt_update", &tt_update);
  m.impl("tt_flat_gradients", &tt_flat_gradients);
  m.impl("tt_apply_gradients", &tt_apply_gradients);
  m.impl("tt_weights_gradient", &tt_weights_gradient);
}

}  // namespace torchrec_hkv::bindings::cuda_ops

#endif
