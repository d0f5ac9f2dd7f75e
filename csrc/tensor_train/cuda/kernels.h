// Lookup, gradients and update of groups of Tensor-Train tables on a GPU.
//
// No function allocates or waits for the device; CUDA graphs may capture all of them. The caller
// passes memory of the sizes that the *_bytes functions return.
//
// A step:
//   index_batch   sorts the ids of all tables by (table, middle, head, last) and finds the distinct
//                 ids and prefixes (pairs of middle and head); may run a batch ahead
//   lookup        computes rows of distinct ids and pools them into the output
//   gradients     adds gradients of the cores to buffers
//   update_cores  applies the optimizer to slices with a gradient, and clears the gradients
//
// Core k of a table has the layout [p_k][r_k][q_k][r_{k+1}], the last one [p_d][q_d][r_d].
// Kernels use three parts of a table (cpu/tables.h maps two and four cores to them):
// the head [heads][head_q][head_r], the middle [middles][head_r][middle_q][last_r] and the last
// [lasts][last_q][last_r]; id = (head * middles + middle) * lasts + last.
//
// Ids outside of [0, rows) are counted, read as rows of zeros, and have no gradient.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "common/dtypes.h"
#include "common/macros.h"
#include "common/optimizers.h"

namespace torchrec_hkv::tensor_train::cuda {

// Precision of the products.
enum class Precision : int32_t {
  kTf32 = 0,  // one tensor core product of operands rounded to tf32: within 1e-3
  kFp32 = 1,  // three products of operands split in two, in tf32 or half precision: within 1e-5
};

// The class of kernels for a table, which plan_tables selects.
struct KernelClass {
  int32_t rank = 0;  // the kernel's rank: 32, 64, 128 or 256
  // Cores are float32 and ranks are multiples of 4, so that kernels read 4 values at a time.
  bool vectors = false;
  bool whole = false;   // vectors, and ranks equal to `rank`, which is at most 128
  bool lasts = false;   // whole, and the last q a multiple of 4
  bool quads = false;   // vectors, not whole, and all q are 4
  bool narrow = false;  // lasts, `rank` is 32 and q = 4, 2, 4
  bool exact = false;   // ranks equal to `rank`, all q multiples of 4: no bounds to check
  bool fours = false;   // exact, all q are 4 and cores are float32
  bool small = false;   // vectors, and each q is at most 4: a row is one block of columns
  RowType type = RowType::kFloat32;  // if exact; other kernels read the type at run time

  bool operator==(const KernelClass&) const = default;
};

// A table in device memory, as kernels read it.
struct TableCuda {
  // Filled in by the caller.
  const void* head;
  const void* middle;  // null: a table of two cores, whose prefixes are slices of the head
  const void* last;
  float* head_grad;  // kernels add to it; null: not wanted
  float* middle_grad;
  float* last_grad;
  // [heads]: kernels set 1 if a slice has a gradient; null: not wanted. They may read whole words.
  uint8_t* head_touched;
  uint8_t* middle_touched;
  uint8_t* last_touched;
  RowType head_type;
  RowType middle_type;
  RowType last_type;
  int32_t head_q, middle_q, last_q;
  int32_t head_r, last_r;  // a table of two cores has head_r = last_r, middles = middle_q = 1,
                           // and plan_tables splits its q into head_q * middle_q
  int64_t rows;
  int64_t heads, middles, lasts;
  // Filled in by plan_tables.
  int32_t dim;
  int32_t kernel;         // index of its class
  int32_t blocks;         // of 4 x 4 head and middle columns, in a prefix
  int32_t middle_blocks;  // of 4 middle columns
  // 2^32 / number of slices, for 32-bit division.
  uint32_t heads_inverse, middles_inverse, lasts_inverse;
  uint64_t first_key;  // an id's key is first_key + (middle * heads + head) * lasts + last
};

constexpr int kMaxClasses = 40;

// Properties of a group of tables that launches need, on the host.
struct Plan {
  const TableCuda* tables = nullptr;  // on the device, filled in by plan_tables
  int32_t num_tables = 0;
  uint64_t num_keys = 0;
  int64_t num_prefixes = 0;  // of all tables together
  int32_t dim = 0;           // of the first table
  int32_t widest = 0;        // largest dim, rounded up to a multiple of 4
  int64_t only_lasts = 0;    // slices of the last core, if there is one table
  bool one_dim = true;       // all tables have the same dim
  bool vectors = true;       // all dims are multiples of 4
  bool clusters = false;     // the device supports thread block clusters
  bool cooperative = false;  // the device supports cooperative launches
  int32_t multiprocessors = 1;
  int32_t num_classes = 0;
  KernelClass classes[kMaxClasses];
  int32_t blocks[kMaxClasses] = {};  // largest TableCuda::blocks of the class
};

// Selects the kernels of tables: fills in the rest of the TableViews, and returns a plan without
// the device pointer. A plan is valid while shapes, types and the alignment of cores do not change.
// Throws std::invalid_argument if ranks exceed 256 or ids 2^63.
Plan plan_tables(TableCuda* tables, int32_t num_tables);

// The ids of one call: feature-major bags.
struct BatchCuda {
  const int64_t* ids = nullptr;              // [num_ids]
  const int64_t* offsets = nullptr;          // [num_features * batch_size + 1], nondecreasing
  const float* weights = nullptr;            // [num_ids], or null
  const int32_t* feature_tables = nullptr;   // [num_features], on the device
  const int32_t* feature_columns = nullptr;  // [num_features] first columns, on the device
  int32_t num_features = 0;
  int64_t batch_size = 0;
  int64_t num_ids = 0;  // below 2^31
  bool mean = false;    // divides pooled rows by the length of the bag
  bool pooled = true;   // one output row for each bag; otherwise one for each id, at its position
  int64_t stride = 0;   // columns of the output
  // Whether the output's address, its stride and all feature_columns are multiples of 4 values.
  bool aligned = true;
  // Lookups and gradients give the same bits in every run; slower.
  bool deterministic = false;

  HKV_HOST_DEVICE int64_t num_bags() const { return num_features * batch_size; }
  HKV_HOST_DEVICE int64_t num_rows() const {
    return pooled ? batch_size : num_ids;
  }  // of the output
};

// Bytes of `index`, which index_batch fills and the other functions read, and of `scratch`. `index`
// must live until the batch's gradients are done, `scratch` only during the call.
size_t index_bytes(const Plan& plan, const BatchCuda& batch);
size_t index_scratch_bytes(const Plan& plan, const BatchCuda& batch);
// invalid: the number of ids out of range is added to it; may be null. out: the lookup's output, if
// it exists already; index_batch zeroes it.
void index_batch(const Plan& plan, const BatchCuda& batch, void* index, void* scratch,
                 int64_t* invalid, float* out, cudaStream_t stream);

// out: [num_rows][stride], written as a whole. cleared: whether index_batch has zeroed it.
size_t lookup_scratch_bytes(const Plan& plan, const BatchCuda& batch);
void lookup(const Plan& plan, const BatchCuda& batch, Precision precision, const void* index,
            void* scratch, float* out, bool cleared, cudaStream_t stream);

// Integer sums of gradients for batch.deterministic: the gradient at grads + i is sums[i] / scale,
// with one scale for each part. scale * (sum of absolute values) must be below 2^62.
struct FixedPointSums {
  const float* grads = nullptr;    // an address below all gradients of the views
  int64_t* sums = nullptr;         // zero at the start
  const double* scales = nullptr;  // on the device: [tables][3] of heads, middles and lasts
};

// Adds to the gradients of the tables and sets touched flags. grad: of the lookup's output,
// [num_rows][stride], aligned to 16 bytes if batch.aligned. steps: incremented for the following
// update unless there are no ids; may be null. sums: with batch.deterministic, replaces gradients.
size_t gradients_scratch_bytes(const Plan& plan, const BatchCuda& batch);
void gradients(const Plan& plan, const BatchCuda& batch, Precision precision, const void* index,
               void* scratch, const float* grad, const FixedPointSums& sums, int64_t* steps,
               cudaStream_t stream);

// One core of one table, for its update.
struct CoreView {
  void* values;
  float* grad;       // [slices][slice_size], cleared after use
  uint8_t* touched;  // [slices], cleared after use
  float* state;      // [slices][state_width(config, slice_size)]
  RowType type;
  int32_t slice_size;
  int64_t first_slice;  // number of slices of the previous cores in the list
  uint64_t seed;        // for stochastic rounding
};

// Applies the optimizer to the touched slices of a list of cores in device memory. A slice is a row
// of common/optimizers.h. Kernels read learning_rate and step, which already counts this update.
// LAMB is not supported.
void update_cores(const CoreView* cores, int32_t num_cores, int64_t num_slices,
                  const OptimizerConfig& config, const float* learning_rate, const int64_t* step,
                  cudaStream_t stream);

// The heads of a table of four cores, [p_0 p_1][q_0 q_1][r_2], are the products of its first two
// cores. make_heads computes them before a lookup. heads_backward computes the cores' gradients
// from the heads' gradient, and clears that.
struct HeadView {
  const void* first;   // [p_0][q_0][r_1]
  const void* second;  // [p_1][r_1][q_1][r_2]
  RowType type;
  float* heads;
  float* heads_grad;       // make_heads uses no gradients and no flags
  uint8_t* heads_touched;  // [p_0 p_1], cleared, too
  float* first_grad;
  float* second_grad;
  uint8_t* first_touched;
  uint8_t* second_touched;
  int32_t p0, p1, q0, q1, r1, r2;
};
void make_heads(const HeadView& view, cudaStream_t stream);
void heads_backward(const HeadView& view, cudaStream_t stream);

}  // namespace torchrec_hkv::tensor_train::cuda
