// Lookup and gradients of tiles, by class of tables. One source file for each rank, because they
// are slow to compile.
#pragma once

#include "tensor_train/cuda/kernels.h"

namespace torchrec_hkv::tensor_train::cuda {

struct TileInput;

struct TileRun {
  KernelClass kernel;  // vectors and exact: only if places count in units of 4
  Precision precision;
  bool backward;
  bool few;     // prefixes: many small tiles
  bool shares;  // equal shares of the prefixes for all blocks instead of tiles
  // The batch is large enough for kernels for many ids a prefix; the device decides whether
  // prefixes have many.
  bool may_be_dense;
  bool deterministic;  // of gradients: TileInput has sums in fixed point
  int64_t num_ids;
  int64_t most_prefixes;  // at least 1
  int32_t blocks;         // of columns, at most
  int64_t only_lasts;     // slices of the last core if the group is one table; otherwise 0
  int32_t multiprocessors;
  cudaStream_t stream;
};

// Whether gradients of a table of q = 4, 4, 4 have a kernel for many ids a prefix.
bool has_dense_gradients_32(int64_t only_lasts);
bool has_dense_gradients_64(int64_t only_lasts);

void run_tiles_32(const TileRun& run, const TileInput& in);
void run_tiles_64(const TileRun& run, const TileInput& in);
void run_tiles_128(const TileRun& run, const TileInput& in);
void run_tiles_256(const TileRun& run, const TileInput& in);

}  // namespace torchrec_hkv::tensor_train::cuda
