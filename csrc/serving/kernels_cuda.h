// The CUDA kernels of read-only tables. They take pointers to device memory and wait for nothing.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "serving/table.h"

namespace torchrec_hkv::serving::cuda {

// The rows that a lookup finds, and scratch memory for copies of those in host memory.
struct Staging {
  const char** found;  // scratch [num_found]
  int64_t num_found;
  int64_t row_bytes;   // of the widest row in host memory
  int64_t host_bytes;  // of all rows in host memory of the tables; 0: there are none
  char* memory;        // staging_bytes() bytes, aligned to 16
};
// Bytes of `memory`, which need not be set yet.
size_t staging_bytes(const Staging& staging);

// Writes out the row of each id; unknown ids get their initial or default row and are counted.
struct RowsCall {
  const Table* table;  // in device memory
  // The same of the table on the host, to choose kernels by.
  RowFormat format;
  int32_t dim;
  int64_t row_bytes;
  const int64_t* ids;
  int64_t n;
  RowType type;       // of the output
  char* out;          // [n, dim]
  int64_t* counters;  // [2]: adds the number of ids, and of unknown ones
  Staging staging;    // if the table has rows in host memory; otherwise found is null
  uint32_t phase;     // of is_sampled, another in each call
};
void look_up_rows(const RowsCall& call, cudaStream_t stream);

// One output of a pooled lookup.
struct PooledOutput {
  int32_t table;
  int32_t feature;
  int32_t column;  // its first one
  int32_t layer;   // how many outputs before it are of the same feature
  Mean mean;
  int32_t fused;
};

struct PoolCall {
  const Table* tables;  // in device memory
  // In device memory. First come those whose tables have a multiple of four columns.
  const PooledOutput* outputs;
  int32_t num_outputs;
  int32_t num_in_fours;     // how many these are
  int32_t widest_in_fours;  // columns of the widest table of them
  int32_t widest_other;     // and of the others
  const int64_t* ids;
  int64_t n;
  const int64_t* offsets;  // [features * batch_size + 1]; what lies outside of the ids is left out
  int64_t batch_size;
  const float* weights;  // null: none
  RowType type;          // of the output
  char* out;             // [batch_size, columns]
  int64_t columns;
  Staging staging;    // found: [layers * n]
  int64_t* counters;  // [tables, 2]
  uint32_t phase;     // of is_sampled, another in each call
};
void pool(const PoolCall& call, cudaStream_t stream);

// Copies the hot rows of a table from memory that the GPU reads.
void copy_hot_rows(const HotCopy& call, cudaStream_t stream);

void find_row_numbers(const RowNumbers& call, cudaStream_t stream);

}  // namespace torchrec_hkv::serving::cuda
