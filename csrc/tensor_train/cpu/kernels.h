// Lookup, gradients and update of groups of Tensor-Train tables on a CPU.
//
// All results are equal bit for bit for any number of threads.
#pragma once

#include <cstdint>

#include "common/optimizers.h"
#include "tensor_train/cpu/tables.h"

namespace torchrec_hkv::tensor_train::cpu {

// The first position whose id is outside of its table, or -1.
int64_t first_bad_id(const TableCpu* tables, const BatchCpu& batch);

// Sorts the positions of a batch by (table, middle, head, last), equal ids by position, once for
// lookup and gradients. Ids must be valid. order: [n].
void sort_ids(const TableCpu* tables, const BatchCpu& batch, int64_t* order);

// Pooled: out is [batch_size][sum of the features' dims]. Otherwise [n][dim], and all tables have
// the same dim. Each distinct id's row is computed once, and each prefix once.
void lookup(const TableCpu* tables, const BatchCpu& batch, const int64_t* order, float* out,
            int threads);

// Gradients of the cores. grad is of lookup's output; gradients of equal ids are summed first. Adds
// to cores[table * kMaxCores + k], fp32 in the core's layout. Sets touched[...][i] to 1 if slice i
// has a gradient.
struct CoreGradients {
  float* const* cores;
  uint8_t* const* touched;  // null: not wanted
};
void gradients(const TableCpu* tables, const BatchCpu& batch, const int64_t* order,
               const float* grad, const CoreGradients& out, int threads);

// out[i]: gradient of the weight of position i, [n].
void weights_gradient(const TableCpu* tables, const BatchCpu& batch, const int64_t* order,
                      const float* grad, float* out, int threads);

// Applies an optimizer to the touched slices of one core. A slice is what the formulas of
// common/optimizers.h call a row: row-wise Adagrad has one sum of mean(g^2) a slice. state is
// [slices][state_width(config, slice_size)]. step counts this update too.
void update_core(char* core, RowType type, int64_t slices, int64_t slice_size, float* state,
                 const float* grad, const uint8_t* touched, const OptimizerConfig& config,
                 float learning_rate, int64_t step, uint64_t core_seed, int threads);

}  // namespace torchrec_hkv::tensor_train::cpu
