// The CUDA kernels of read-only tables. They take pointers to device memory and do not synchronize.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "serving/table.h"

namespace torchrec_hkv::serving::cuda {

// The rows that a lookup finds, and scratch memory for copies of those in host memory.
struct Staging {
  const char** found;  // scratch [num_found]
  int64_t num_found;
  int64_t row_bytes;   // bytes of the widest row in host memory
  int64_t host_bytes;  // bytes of all rows in host memory; 0 if there are none
  char* memory;        // staging_bytes() bytes, aligned to 16
};
// Required bytes of `memory`, which need not be set yet.
size_t staging_bytes(const Staging& staging);

// Writes the row of each id; unknown ids get their initial or default row and are counted.
struct RowsLaunch {
  const Table* table;  // in device memory
  // Copies of the table's fields on the host, to choose kernels.
  RowFormat format;
  int32_t dim;
  int64_t row_bytes;
  const int64_t* ids;
  int64_t n;
  RowType type;       // of the output
  char* out;          // [n, dim]
  int64_t* counters;  // [2]: the numbers of ids and of unknown ids are added
  Staging staging;    // if the table has rows in host memory; otherwise found is null
  uint32_t phase;     // of is_sampled, another in each call
};
void look_up_rows(const RowsLaunch& call, cudaStream_t stream);

// One output of a pooled lookup.
struct PooledOutput {
  int32_t table;
  int32_t feature;
  int32_t column;  // first column
  int32_t layer;   // number of earlier outputs of the same feature
  Mean mean;
  int32_t fused;
};

struct PoolLaunch {
  const Table* tables;  // in device memory
  // In device memory. Outputs whose tables have a multiple of four columns come first.
  const PooledOutput* outputs;
  int32_t num_outputs;
  int32_t num_in_fours;     // number of these outputs
  int32_t widest_in_fours;  // columns of the widest table of these outputs
  int32_t widest_other;     // columns of the widest table of the others
  const int64_t* ids;
  int64_t n;
  const int64_t* offsets;  // [features * batch_size + 1]; positions outside the ids are skipped
  int64_t batch_size;
  const float* weights;  // null: none
  RowType type;          // of the output
  char* out;             // [batch_size, columns]
  int64_t columns;
  Staging staging;    // found: [layers * n]
  int64_t* counters;  // [tables, 2]
  uint32_t phase;     // of is_sampled, another in each call
};
void pool(const PoolLaunch& call, cudaStream_t stream);

// Copies the hot rows of a table from memory that the GPU reads.
void copy_hot_rows(const HotRowCopy& call, cudaStream_t stream);

void find_row_numbers(const RowNumbers& call, cudaStream_t stream);

}  // namespace torchrec_hkv::serving::cuda
