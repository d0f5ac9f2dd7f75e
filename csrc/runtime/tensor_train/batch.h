// Checks of the arguments that the Tensor-Train ops share.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "runtime/tensor.h"
#include "runtime/tensor_train/group.h"
#include "tensor_train/cpu/tables.h"

namespace torchrec_hkv::runtime {

// A group's tables with their cores, and a batch for them.
struct TensorTrainBatch {
  std::shared_ptr<TensorTrainGroup> group;
  std::vector<tensor_train::TableCpu> tables;
  tensor_train::BatchCpu batch;
};

// A batch without cores, for sorting. Checks the values of ids and offsets on a CPU.
TensorTrainBatch sortable_batch(int64_t group, const at::Tensor& ids, const at::Tensor& offsets,
                                const std::optional<at::Tensor>& weights, int64_t batch_size,
                                bool mean, bool pooled);

// A batch with cores. On a GPU the length of the index is not checked.
TensorTrainBatch checked_batch(at::TensorList cores, int64_t group, const at::Tensor& ids,
                               const at::Tensor& offsets, const std::optional<at::Tensor>& weights,
                               const at::Tensor& index, int64_t batch_size, bool mean, bool pooled);

// Cores without a batch.
TensorTrainBatch checked_cores(at::TensorList cores, int64_t group, at::Device device);

// Checks for a result of tt_flat_gradients: the gradients of all cores, then a flag per slice.
void check_flat_gradients(const TensorTrainBatch& call, const at::Tensor& gradients,
                          at::Device device);

// Shape of the lookup's output.
std::vector<int64_t> output_shape(const TensorTrainBatch& batch, const at::Tensor& ids);

// Checks the arguments of an update.
void check_states(const TensorTrainBatch& batch, at::TensorList states, const at::Tensor& step,
                  const at::Tensor& learning_rate, at::Device device);

// The gradient of the output, contiguous.
at::Tensor checked_gradient(const TensorTrainBatch& batch, const at::Tensor& ids,
                            const at::Tensor& grad);

}  // namespace torchrec_hkv::runtime
