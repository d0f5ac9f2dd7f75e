// Lookup, gradients and update of groups of Tensor-Train tables on a CPU.
//
// All results are bit-identical for any number of threads.
#pragma once

#include <cstdint>

#include "common/optimizers.h"
#include "tensor_train/cpu/tables.h"

namespace torchrec_hkv::tensor_train::cpu {

// Returns the first position whose id is outside its table, or -1.
int64_t first_bad_id(const TableCpu* tables, const BatchCpu& batch);

// Sorts the positions of a batch by (table, middle, head, last), and equal ids by position. Lookup
// and gradients use the same order, [n]. Ids must be valid.
void sort_ids(const TableCpu* tables, const BatchCpu& batch, int64_t* order);

// out: if pooled [batch_size][sum of the features' dims]; otherwise [n][dim], and all tables have
// the same dim. The row of each distinct id, and each prefix, is computed once.
void lookup(const TableCpu* tables, const BatchCpu& batch, const int64_t* order, float* out,
            int threads);

// Computes gradients of the cores from grad, the gradient of lookup's output. Gradients of equal
// ids are summed first. Adds to cores[table * kMaxCores + k], fp32 in the core's layout. Sets
// touched[...][i] to 1 if slice i has a gradient.
struct CoreGradients {
  float* const* cores;
  uint8_t* const* touched;  // null if not needed
};
void gradients(const TableCpu* tables, const BatchCpu& batch, const int64_t* order,
               const float* grad, const CoreGradients& out, int threads);

// Writes the gradient of the weight of position i to out[i], [n].
void weights_gradient(const TableCpu* tables, const BatchCpu& batch, const int64_t* order,
                      const float* grad, float* out, int threads);

// Sets the touched slices of a core's gradient to zero.
void clear_slices(float* gradient, const uint8_t* touched, int64_t slices, int64_t slice_size,
                  int threads);

// Applies an optimizer to the touched slices of one core. A slice is a row in the formulas of
// common/optimizers.h: row-wise Adagrad has one sum of mean(g^2) per slice. state is
// [slices][state_width(config, slice_size)]. step includes this update.
void update_core(char* core, RowType type, int64_t slices, int64_t slice_size, float* state,
                 const float* grad, const uint8_t* touched, const OptimizerConfig& config,
                 float learning_rate, int64_t step, uint64_t core_seed, int threads);

}  // namespace torchrec_hkv::tensor_train::cpu
