// The arguments that the Tensor-Train ops share, checked.
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

// Without cores: what sorting takes. Looks at ids and offsets where they are on the CPU.
TensorTrainBatch sortable_batch(int64_t group, const at::Tensor& ids, const at::Tensor& offsets,
                                const std::optional<at::Tensor>& weights, int64_t batch_size,
                                bool mean, bool pooled);

// On a GPU the length of the index is not looked at.
TensorTrainBatch checked_batch(at::TensorList cores, int64_t group, const at::Tensor& ids,
                               const at::Tensor& offsets, const std::optional<at::Tensor>& weights,
                               const at::Tensor& index, int64_t batch_size, bool mean, bool pooled);

// Without a batch.
TensorTrainBatch checked_cores(at::TensorList cores, int64_t group, at::Device device);

// Refuses what tt_flat_gradients does not give: the gradients of all cores, and behind them a flag
// for each of their slices.
void check_flat_gradients(const TensorTrainBatch& call, const at::Tensor& gradients,
                          at::Device device);

// Shape of the lookup's output.
std::vector<int64_t> output_shape(const TensorTrainBatch& batch, const at::Tensor& ids);

// Refuses what an update can't be made with.
void check_states(const TensorTrainBatch& batch, at::TensorList states, const at::Tensor& step,
                  const at::Tensor& learning_rate, at::Device device);

// The gradient of the output, contiguous.
at::Tensor checked_gradient(const TensorTrainBatch& batch, const at::Tensor& ids,
                            const at::Tensor& grad);

}  // namespace torchrec_hkv::runtime
