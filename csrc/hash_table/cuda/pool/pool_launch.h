// The kernels that pool_rows chooses from, and the launch of those whose tiles of lanes take
// neighbouring bags.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "hash_table/cuda/pool/bag_tile.cuh"
#include "hash_table/table_view.h"

namespace torchrec_hkv::hash_table::cuda {

// The arguments of pool_rows that all kernels take. out.stride is a multiple of four.
struct PoolCall {
  const TableView* tables;
  const Batch& batch;
  const int64_t* slots;
  Pooling pooling;
  Output<char> out;
  cudaStream_t stream;

  bool scaled() const { return pooling.mean || pooling.weights != nullptr; }
};

// For dims that are multiples of four, the usual case (shape.four_wide). hot: batches have had hot
// ids; only speed depends on it.
void pool_four_wide(const PoolCall& call, const GroupShape& shape, bool hot);
// For rows of 8 bits, if shape.four_wide.
void pool_int8(const PoolCall& call, const GroupShape& shape);
// For float32 rows of many columns, a multiple of four.
void pool_wide(const PoolCall& call);

// From this number of positions on, rows that are read once evict what the next kernels need from
// L2. If each bag has one id, rows are then read with the evict-last policy, with which reads among
// as many writes are faster.
constexpr int64_t kManyOnce = int64_t{1} << 19;

constexpr int kPoolThreads = 128;  // of a block

using PoolKernel = void (*)(const TableView*, const Batch, const int64_t*, const Pooling,
                            const Output<char>, const BagTiling);

// About how many chunks of positions a tile takes.
struct TileLength {
  int together;  // at most, if all tiles run at once, on three quarters of the GPU
  int rounds;    // otherwise: number of rounds in which the tiles run
  int most;      // otherwise: at most
};

// Launches a kernel with this number of lanes per tile and of blocks per multiprocessor. max_bags:
// of a tile; 0: as many as it has positions.
void launch_pool(PoolKernel kernel, int lanes, int blocks, const TileLength& length,
                 const PoolCall& call, int64_t max_bags = 0);

}  // namespace torchrec_hkv::hash_table::cuda
