// Lookup and gradients of tiles, by class of tables. Each rank has its own source file, because
// these are slow to compile.
#pragma once

#include "tensor_train/cuda/kernels.h"

namespace torchrec_hkv::tensor_train::cuda {

struct TileInput;

struct TileRun {
  KernelClass kernel;  // `vectors` and `exact` are set only if places are in units of 4
  Precision precision;
  bool backward;
  bool few;     // few prefixes, so use many small tiles
  bool shares;  // all blocks get equal shares of the prefixes instead of tiles
  // Whether the batch is large enough for kernels for many ids per prefix. The device decides
  // whether prefixes have many ids.
  bool may_be_dense;
  bool deterministic;  // for gradients: TileInput has sums in fixed point
  int64_t num_ids;
  int64_t max_prefixes;  // at least 1
  int32_t blocks;        // largest number of blocks of columns
  int64_t only_lasts;    // slices of the last core if the group is one table; otherwise 0
  int32_t multiprocessors;
  cudaStream_t stream;
};

// Whether gradients of a table with q = 4, 4, 4 have a kernel for many ids per prefix.
bool has_dense_gradients_32(int64_t only_lasts);
bool has_dense_gradients_64(int64_t only_lasts);

void run_tiles_32(const TileRun& run, const TileInput& in);
void run_tiles_64(const TileRun& run, const TileInput& in);
void run_tiles_128(const TileRun& run, const TileInput& in);
void run_tiles_256(const TileRun& run, const TileInput& in);

}  // namespace torchrec_hkv::tensor_train::cuda
