// Dispatcher ops of Tensor-Train tables. Fakes are in torchrec_hkv/tensor_train/ops.py, the
// autograd formulas in autograd.cpp.
//
// The index of tt_sort is opaque and depends on the device. On a CPU it has the positions in sorted
// order, and does not depend on weights, mean and pooled. For GPUs see cuda_ops.cpp.
#include <ATen/Parallel.h>
#include <torch/library.h>

#include <algorithm>

#include "common/hashing.h"
#include "runtime/checks.h"
#include "runtime/tensor_train/batch.h"
#include "tensor_train/cpu/kernels.h"
#include "tensor_train/cpu/zeroed_memory.h"

namespace torchrec_hkv::bindings {
using namespace runtime;
namespace {

namespace kernels = tensor_train::cpu;
using tensor_train::kMaxCores;
using tensor_train::TableCpu;

at::Tensor tt_sort(int64_t group, const at::Tensor& ids, const at::Tensor& offsets,
                   const std::optional<at::Tensor>& weights, int64_t batch_size, bool mean,
                   bool pooled) {
  const TensorTrainBatch call =
      sortable_batch(group, ids, offsets, weights, batch_size, mean, pooled);
  at::Tensor index = at::empty_like(ids);
  kernels::sort_ids(call.tables.data(), call.batch, index.mutable_data_ptr<int64_t>());
  return index;
}

at::Tensor tt_lookup(at::TensorList cores, int64_t group, const at::Tensor& ids,
                     const at::Tensor& offsets, const std::optional<at::Tensor>& weights,
                     const std::optional<at::Tensor>& given, int64_t batch_size, bool mean,
                     bool pooled) {
  const at::Tensor index =
      given ? *given : tt_sort(group, ids, offsets, weights, batch_size, mean, pooled);
  const TensorTrainBatch call =
      checked_batch(cores, group, ids, offsets, weights, index, batch_size, mean, pooled);
  at::Tensor out = at::empty(output_shape(call, ids), ids.options().dtype(at::kFloat));
  kernels::lookup(call.tables.data(), call.batch, index.const_data_ptr<int64_t>(),
                  out.mutable_data_ptr<float>(), at::get_num_threads());
  return out;
}

at::Tensor tt_lookup_fused(const at::Tensor& /*anchor*/, at::TensorList cores,
                           at::TensorList /*states*/, const at::Tensor& /*step*/, int64_t group,
                           const at::Tensor& ids, const at::Tensor& offsets,
                           const std::optional<at::Tensor>& weights,
                           const std::optional<at::Tensor>& index, int64_t batch_size, bool mean,
                           bool pooled, const at::Tensor& /*learning_rate*/) {
  return tt_lookup(cores, group, ids, offsets, weights, index, batch_size, mean, pooled);
}

std::vector<at::Tensor> tt_gradients(at::TensorList cores, int64_t group, const at::Tensor& grad,
                                     const at::Tensor& ids, const at::Tensor& offsets,
                                     const std::optional<at::Tensor>& weights,
                                     const at::Tensor& index, int64_t batch_size, bool mean,
                                     bool pooled) {
  const TensorTrainBatch call =
      checked_batch(cores, group, ids, offsets, weights, index, batch_size, mean, pooled);
  const at::Tensor of_output = checked_gradient(call, ids, grad);
  std::vector<at::Tensor> gradients;
  std::vector<float*> pointers(call.tables.size() * kMaxCores, nullptr);
  for (size_t t = 0; t < call.tables.size(); ++t) {
    for (int32_t k = 0; k < call.tables[t].cores; ++k) {
      const at::Tensor& core = cores[gradients.size()];
      gradients.push_back(at::zeros(core.sizes(), core.options().dtype(at::kFloat)));
      pointers[t * kMaxCores + k] = gradients.back().mutable_data_ptr<float>();
    }
  }
  kernels::gradients(call.tables.data(), call.batch, index.const_data_ptr<int64_t>(),
                     of_output.const_data_ptr<float>(), {pointers.data(), nullptr},
                     at::get_num_threads());
  for (size_t i = 0; i < gradients.size(); ++i) {
    gradients[i] = gradients[i].to(cores[i].scalar_type());
  }
  return gradients;
}

// Increments the step and applies the optimizer to the touched slices of all cores.
void update_cores(const TensorTrainBatch& call, at::TensorList cores, at::TensorList states,
                  const at::Tensor& step, const std::vector<const float*>& gradients,
                  const std::vector<std::vector<uint8_t>>& touched,
                  const at::Tensor& learning_rate) {
  const int64_t updates = ++*step.mutable_data_ptr<int64_t>();
  const float rate = *learning_rate.const_data_ptr<float>();
  size_t next = 0;
  for (const TableCpu& table : call.tables) {
    for (int32_t k = 0; k < table.cores; ++k, ++next) {
      kernels::update_core(static_cast<char*>(cores[next].mutable_data_ptr()), table.type,
                           table.p[k], table.slice(k), states[next].mutable_data_ptr<float>(),
                           gradients[next], touched[next].data(), call.group->optimizer(), rate,
                           updates, mix64(next + 1), at::get_num_threads());
    }
  }
}

void tt_update(at::TensorList cores, at::TensorList states, at::Tensor step, int64_t group,
               const at::Tensor& grad, const at::Tensor& ids, const at::Tensor& offsets,
               const std::optional<at::Tensor>& weights, const at::Tensor& index,
               int64_t batch_size, bool mean, bool pooled, const at::Tensor& learning_rate) {
  const TensorTrainBatch call =
      checked_batch(cores, group, ids, offsets, weights, index, batch_size, mean, pooled);
  check_states(call, states, step, learning_rate, ids.device());
  const at::Tensor of_output = checked_gradient(call, ids, grad);
  std::vector<kernels::ZeroedFloats> gradients;
  std::vector<std::vector<uint8_t>> touched;
  std::vector<float*> gradient_pointers(call.tables.size() * kMaxCores, nullptr);
  std::vector<uint8_t*> touched_pointers(call.tables.size() * kMaxCores, nullptr);
  for (size_t t = 0; t < call.tables.size(); ++t) {
    const TableCpu& table = call.tables[t];
    for (int32_t k = 0; k < table.cores; ++k) {
      gradients.emplace_back(table.p[k] * table.slice(k));
      touched.emplace_back(table.p[k], 0);
      gradient_pointers[t * kMaxCores + k] = gradients.back().data();
      touched_pointers[t * kMaxCores + k] = touched.back().data();
    }
  }
  kernels::gradients(call.tables.data(), call.batch, index.const_data_ptr<int64_t>(),
                     of_output.const_data_ptr<float>(),
                     {gradient_pointers.data(), touched_pointers.data()}, at::get_num_threads());
  std::vector<const float*> of_cores;
  for (const kernels::ZeroedFloats& gradient : gradients) of_cores.push_back(gradient.data());
  update_cores(call, cores, states, step, of_cores, touched, learning_rate);
  size_t next = 0;
  for (const TableCpu& table : call.tables) {
    for (int32_t k = 0; k < table.cores; ++k, ++next) {
      kernels::clear_slices(gradients[next].data(), touched[next].data(), table.p[k],
                            table.slice(k), at::get_num_threads());
      gradients[next].keep();
    }
  }
}

// The gradients of all cores, one after the other, and then 1 or 0 for each slice with or without a
// gradient, as one tensor that ranks can sum.
at::Tensor tt_flat_gradients(at::TensorList cores, int64_t group, const at::Tensor& grad,
                             const at::Tensor& ids, const at::Tensor& offsets,
                             const std::optional<at::Tensor>& weights, const at::Tensor& index,
                             int64_t batch_size, bool mean, bool pooled) {
  const TensorTrainBatch call =
      checked_batch(cores, group, ids, offsets, weights, index, batch_size, mean, pooled);
  const at::Tensor of_output = checked_gradient(call, ids, grad);
  at::Tensor flat =
      at::zeros({call.group->num_elements() + call.group->num_slices()}, of_output.options());
  std::vector<uint8_t> touched(call.group->num_slices(), 0);
  std::vector<float*> gradient_pointers(call.tables.size() * kMaxCores, nullptr);
  std::vector<uint8_t*> touched_pointers(call.tables.size() * kMaxCores, nullptr);
  float* gradient = flat.mutable_data_ptr<float>();
  uint8_t* slices = touched.data();
  for (size_t t = 0; t < call.tables.size(); ++t) {
    const TableCpu& table = call.tables[t];
    for (int32_t k = 0; k < table.cores; ++k) {
      gradient_pointers[t * kMaxCores + k] = gradient;
      touched_pointers[t * kMaxCores + k] = slices;
      gradient += table.p[k] * table.slice(k);
      slices += table.p[k];
    }
  }
  kernels::gradients(call.tables.data(), call.batch, index.const_data_ptr<int64_t>(),
                     of_output.const_data_ptr<float>(),
                     {gradient_pointers.data(), touched_pointers.data()}, at::get_num_threads());
  std::copy(touched.begin(), touched.end(), gradient);
  return flat;
}

void tt_apply_gradients(at::TensorList cores, at::TensorList states, at::Tensor step, int64_t group,
                        const at::Tensor& gradients, const at::Tensor& learning_rate) {
  const TensorTrainBatch call = checked_cores(cores, group, gradients.device());
  check_states(call, states, step, learning_rate, gradients.device());
  check_flat_gradients(call, gradients, gradients.device());
  std::vector<const float*> of_cores;
  std::vector<std::vector<uint8_t>> touched;
  const float* gradient = gradients.const_data_ptr<float>();
  const float* flag = gradient + call.group->num_elements();
  for (const TableCpu& table : call.tables) {
    for (int32_t k = 0; k < table.cores; ++k) {
      of_cores.push_back(gradient);
      gradient += table.p[k] * table.slice(k);
      touched.emplace_back(table.p[k], 0);
      for (uint8_t& slice : touched.back()) slice = *flag++ > 0.0f;
    }
  }
  update_cores(call, cores, states, step, of_cores, touched, learning_rate);
}

at::Tensor tt_weights_gradient(at::TensorList cores, int64_t group, const at::Tensor& grad,
                               const at::Tensor& ids, const at::Tensor& offsets,
                               const at::Tensor& index, int64_t batch_size, bool mean) {
  const TensorTrainBatch call = checked_batch(cores, group, ids, offsets, std::nullopt, index,
                                              batch_size, mean, /*pooled=*/true);
  const at::Tensor of_output = checked_gradient(call, ids, grad);
  at::Tensor out = at::empty({ids.numel()}, ids.options().dtype(at::kFloat));
  kernels::weights_gradient(call.tables.data(), call.batch, index.const_data_ptr<int64_t>(),
                            of_output.const_data_ptr<float>(), out.mutable_data_ptr<float>(),
                            at::get_num_threads());
  return out;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(torchrec_hkv, m) {
  m.def(
      "tt_sort(int group, Tensor ids, Tensor offsets, Tensor? weights, int batch_size, bool mean, "
      "bool pooled) -> Tensor");
  m.def(
      "tt_lookup(Tensor[] cores, int group, Tensor ids, Tensor offsets, Tensor? weights, "
      "Tensor? index, int batch_size, bool mean, bool pooled) -> Tensor");
  m.def(
      "tt_lookup_fused(Tensor anchor, Tensor[] cores, Tensor[] states, Tensor step, int group, "
      "Tensor ids, Tensor offsets, Tensor? weights, Tensor? index, int batch_size, bool mean, "
      "bool pooled, Tensor learning_rate) -> Tensor");
  m.def(
      "tt_gradients(Tensor[] cores, int group, Tensor grad, Tensor ids, Tensor offsets, "
      "Tensor? weights, Tensor index, int batch_size, bool mean, bool pooled) -> Tensor[]");
  m.def(
      "tt_update(Tensor(a!)[] cores, Tensor(b!)[] states, Tensor(c!) step, int group, Tensor grad, "
      "Tensor ids, Tensor offsets, Tensor? weights, Tensor index, int batch_size, bool mean, "
      "bool pooled, Tensor learning_rate) -> ()");
  m.def(
      "tt_flat_gradients(Tensor[] cores, int group, Tensor grad, Tensor ids, Tensor offsets, "
      "Tensor? weights, Tensor index, int batch_size, bool mean, bool pooled) -> Tensor");
  m.def(
      "tt_apply_gradients(Tensor(a!)[] cores, Tensor(b!)[] states, Tensor(c!) step, int group, "
      "Tensor gradients, Tensor learning_rate) -> ()");
  m.def(
      "tt_weights_gradient(Tensor[] cores, int group, Tensor grad, Tensor ids, Tensor offsets, "
      "Tensor index, int batch_size, bool mean) -> Tensor");
}

TORCH_LIBRARY_IMPL(torchrec_hkv, CPU, m) {
  m.impl("tt_sort", &tt_sort);
  m.impl("tt_lookup", &tt_lookup);
  m.impl("tt_lookup_fused", &tt_lookup_fused);
  m.impl("tt_gradients", &tt_gradients);
  m.impl("tt_update", &tt_update);
  m.impl("tt_flat_gradients", &tt_flat_gradients);
  m.impl("tt_apply_gradients", &tt_apply_gradients);
  m.impl("tt_weights_gradient", &tt_weights_gradient);
}

}  // namespace torchrec_hkv::bindings
