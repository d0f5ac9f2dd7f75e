#include "runtime/tensor_train/batch.h"

#include "runtime/checks.h"
#include "tensor_train/cpu/kernels.h"

namespace torchrec_hkv::runtime {
namespace {

using tensor_train::BatchCpu;
using tensor_train::TableCpu;

void check_offsets_on_cpu(const at::Tensor& offsets, int64_t num_ids) {
  const int64_t* const at = offsets.const_data_ptr<int64_t>();
  const int64_t bags = offsets.numel() - 1;
  TORCH_CHECK_VALUE(at[0] == 0, "offsets must begin with 0, but begin with ", at[0], ".");
  for (int64_t b = 0; b < bags; ++b) {
    TORCH_CHECK_VALUE(at[b] <= at[b + 1], "offsets must not decrease, but go from ", at[b], " to ",
                      at[b + 1], " at bag ", b, ".");
  }
  TORCH_CHECK_VALUE(at[bags] == num_ids, "offsets must end with the number of ids, ", num_ids,
                    ", but end with ", at[bags], ".");
}

void check_ids_on_cpu(const TensorTrainBatch& call) {
  const int64_t bad = tensor_train::cpu::first_bad_id(call.tables.data(), call.batch);
  if (bad < 0) return;
  int32_t feature = 0;
  while (call.batch.offsets[(feature + 1) * call.batch.batch_size] <= bad) ++feature;
  const int32_t table = call.batch.feature_tables[feature];
  TORCH_CHECK_VALUE(false, "table '", call.group->name(table), "' was asked for id ",
                    call.batch.ids[bad], ", but has the ids 0 to ", call.tables[table].rows - 1,
                    ".");
}

void set_cores(at::TensorList cores, at::Device device, TensorTrainBatch* call) {
  TORCH_CHECK_VALUE(static_cast<int64_t>(cores.size()) == call->group->num_cores(),
                    "the tables of the group have ", call->group->num_cores(), " cores, but ",
                    cores.size(), " were given.");
  const at::ScalarType dtype = cores[0].scalar_type();
  TORCH_CHECK_TYPE(dtype == at::kFloat || dtype == at::kBFloat16,
                   "cores must be of dtype Float or BFloat16, but are of dtype ", dtype, ".");
  size_t next = 0;
  for (int32_t t = 0; t < call->group->num_tables(); ++t) {
    TableCpu& table = call->tables[t];
    table.type = dtype == at::kFloat ? RowType::kFloat32 : RowType::kBFloat16;
    for (int32_t k = 0; k < table.cores; ++k) {
      const at::Tensor& core = cores[next++];
      check_dtype(core, "cores", dtype);
      check_device(core, "cores", device);
      TORCH_CHECK_VALUE(core.is_contiguous() && core.numel() == table.p[k] * table.slice(k),
                        "core ", k, " of table '", call->group->name(t), "' must have ",
                        table.p[k] * table.slice(k), " elements, contiguous, but has shape ",
                        core.sizes(), ".");
      table.core[k] = static_cast<const char*>(core.const_data_ptr());
    }
  }
}

}  // namespace

TensorTrainBatch sortable_batch(int64_t group, const at::Tensor& ids, const at::Tensor& offsets,
                                const std::optional<at::Tensor>& weights, int64_t batch_size,
                                bool mean, bool pooled) {
  TensorTrainBatch call;
  call.group = TensorTrainGroup::from_handle(group);
  check_dtype(ids, "ids", at::kLong);
  check_vector(ids, "ids");
  TORCH_CHECK_VALUE(ids.is_contiguous(), "ids must be contiguous.");
  check_dtype(offsets, "offsets", at::kLong);
  check_device(offsets, "offsets", ids.device());
  TORCH_CHECK_VALUE(offsets.is_contiguous(), "offsets must be contiguous.");
  TORCH_CHECK_VALUE(batch_size >= 0, "batch_size is ", batch_size, ", but must not be negative.");
  check_length(offsets, "offsets", call.group->num_features() * batch_size + 1);
  TORCH_CHECK_VALUE(ids.numel() < kMaxBatch && offsets.numel() < kMaxBatch, "a batch has ",
                    ids.numel(), " ids and ", offsets.numel() - 1,
                    " bags, but must have fewer than 2^31.");
  for (int32_t t = 0; t < call.group->num_tables(); ++t) {
    call.tables.push_back(call.group->table(t));
  }
  call.batch = BatchCpu{call.group->num_features(),
                        call.group->num_tables(),
                        call.group->feature_tables(),
                        ids.const_data_ptr<int64_t>(),
                        offsets.const_data_ptr<int64_t>(),
                        nullptr,
                        batch_size,
                        mean,
                        pooled};
  TORCH_CHECK_VALUE(pooled || call.group->common_dim() >= 0,
                    "rows that are not pooled need tables of one dim, but those of the group "
                    "differ.");
  if (weights) {
    TORCH_CHECK_VALUE(pooled, "weights were given, but only pooled rows can be weighted.");
    check_dtype(*weights, "weights", at::kFloat);
    check_device(*weights, "weights", ids.device());
    check_length(*weights, "weights", ids.numel());
    TORCH_CHECK_VALUE(weights->is_contiguous(), "weights must be contiguous.");
    call.batch.weights = weights->const_data_ptr<float>();
  }
  TORCH_CHECK_VALUE(!call.group->tf32() || !ids.device().is_cpu(),
                    "precision is 'tf32', but on a CPU it must be 'fp32'.");
  if (ids.device().is_cpu()) {  // on a GPU, reading ids would wait for the device
    check_offsets_on_cpu(offsets, ids.numel());
    check_ids_on_cpu(call);
  }
  return call;
}

TensorTrainBatch checked_batch(at::TensorList cores, int64_t group, const at::Tensor& ids,
                               const at::Tensor& offsets, const std::optional<at::Tensor>& weights,
                               const at::Tensor& index, int64_t batch_size, bool mean,
                               bool pooled) {
  TensorTrainBatch call = sortable_batch(group, ids, offsets, weights, batch_size, mean, pooled);
  set_cores(cores, ids.device(), &call);
  check_dtype(index, "index", at::kLong);
  check_device(index, "index", ids.device());
  TORCH_CHECK_VALUE(index.is_contiguous(), "index must be contiguous.");
  if (ids.device().is_cpu()) check_length(index, "index", ids.numel());
  return call;
}

TensorTrainBatch checked_cores(at::TensorList cores, int64_t group, at::Device device) {
  TensorTrainBatch call;
  call.group = TensorTrainGroup::from_handle(group);
  for (int32_t t = 0; t < call.group->num_tables(); ++t) {
    call.tables.push_back(call.group->table(t));
  }
  set_cores(cores, device, &call);
  return call;
}

void check_flat_gradients(const TensorTrainBatch& call, const at::Tensor& gradients,
                          at::Device device) {
  check_dtype(gradients, "gradients", at::kFloat);
  check_device(gradients, "gradients", device);
  check_length(gradients, "gradients", call.group->num_elements() + call.group->num_slices());
  TORCH_CHECK_VALUE(gradients.is_contiguous(), "gradients must be contiguous.");
}

std::vector<int64_t> output_shape(const TensorTrainBatch& call, const at::Tensor& ids) {
  if (!call.batch.pooled) return {ids.numel(), call.group->common_dim()};
  return {call.batch.batch_size, call.group->total_dim()};
}

void check_states(const TensorTrainBatch& call, at::TensorList states, const at::Tensor& step,
                  const at::Tensor& learning_rate, at::Device device) {
  TORCH_CHECK_VALUE(static_cast<int64_t>(states.size()) == call.group->num_cores(),
                    "the tables of the group have ", call.group->num_cores(),
                    " cores with a state each, but ", states.size(), " states were given.");
  size_t next = 0;
  for (int32_t t = 0; t < call.group->num_tables(); ++t) {
    const TableCpu& table = call.tables[t];
    for (int32_t k = 0; k < table.cores; ++k) {
      const at::Tensor& state = states[next++];
      const int64_t width =
          state_width(call.group->optimizer(), static_cast<int32_t>(table.slice(k)));
      check_dtype(state, "states", at::kFloat);
      check_device(state, "states", device);
      TORCH_CHECK_VALUE(state.is_contiguous() && state.numel() == table.p[k] * width,
                        "the state of core ", k, " of table '", call.group->name(t), "' must have ",
                        table.p[k] * width, " elements, contiguous, but has shape ", state.sizes(),
                        ".");
    }
  }
  check_dtype(step, "step", at::kLong);
  check_device(step, "step", device);
  TORCH_CHECK_VALUE(step.numel() == 1, "step must have 1 element, but has shape ", step.sizes(),
                    ".");
  check_dtype(learning_rate, "learning_rate", at::kFloat);
  check_device(learning_rate, "learning_rate", device);
  TORCH_CHECK_VALUE(learning_rate.numel() == 1, "learning_rate must have 1 element, but has shape ",
                    learning_rate.sizes(), ".");
  TORCH_CHECK_VALUE(call.group->optimizer().kind != Optimizer::kNone,
                    "the group has no optimizer: its cores can't be updated.");
}

at::Tensor checked_gradient(const TensorTrainBatch& call, const at::Tensor& ids,
                            const at::Tensor& grad) {
  const std::vector<int64_t> shape = output_shape(call, ids);
  check_dtype(grad, "grad", at::kFloat);
  check_device(grad, "grad", ids.device());
  TORCH_CHECK_VALUE(grad.sizes() == at::IntArrayRef(shape), "grad must have shape ",
                    at::IntArrayRef(shape), ", but has shape ", grad.sizes(), ".");
  return grad.contiguous();
}

}  // namespace torchrec_hkv::runtime
