// The kernels that pool_rows chooses from, and the launch that those share whose tiles of lanes
// work on neighbouring bags.
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

// Rows whose dims are multiples of four, the usual case. shape.four_wide. hot: batches have had hot
// ids; only speed depends on it.
void pool_four_wide(const PoolCall& call, const GroupShape& shape, bool hot);
// Rows of 8 bits. shape.four_wide.
void pool_int8(const PoolCall& call, const GroupShape& shape);
// Float32 rows of many columns, multiples of four.
void pool_wide(const PoolCall& call);

// From this number of positions on, rows that are read once evict from L2 all that the next kernels
// need. If each bag has one id, rows are then read with the evict-last policy, with which memory
// serves reads among as many writes faster.
constexpr int64_t kManyOnce = int64_t{1} << 19;

constexpr int kPoolThreads = 128;  // of a block

using PoolKernel = void (*)(const TableView*, const Batch, const int64_t*, const Pooling,
                            const Output<char>, const BagTiling);

// How many chunks of positions a tile takes, about.
struct TileLength {
  int together;  // at most, if all tiles run at once and take three quarters of the GPU
  int rounds;    // otherwise such that there are as many rounds of the tiles that run at a time,
  int most;      // but at most this number
};

// Launches a kernel whose tiles have so many lanes. blocks: of a multiprocessor. most_bags: of a
// tile; 0: as many as it has positions.
void launch_pool(PoolKernel kernel, int lanes, int blocks, const TileLength& length,
                 const PoolCall& call, int64_t most_bags = 0);

}  // namespace torchrec_hkv::hash_table::cuda
