// Row-wise input distribution: sorts ids by the rank that owns them.
//
// One call handles static and dynamic features, so that they share one all-to-all. A feature with a
// block size of 0 is hashed: the id is unchanged and goes to owner_rank(id). Any other block size
// means TorchRec's contiguous blocks: row r goes to rank r / block as row r % block (as FBGEMM's
// block_bucketize_sparse_features does, also for ids beyond the last block).
#pragma once

#include <cstddef>
#include <cstdint>

#include "common/hashing.h"
#include "common/macros.h"

#ifdef TORCHREC_HKV_CUDA
#include <cuda_runtime.h>
#endif

namespace torchrec_hkv::routing {

struct Destination {
  int32_t rank;
  int64_t value;
};

HKV_HOST_DEVICE Destination destination_of(int64_t id, int64_t block_size, int32_t world_size) {
  if (block_size == 0) return Destination{owner_rank(id, world_size), id};
  const uint64_t row = static_cast<uint64_t>(id);
  const uint64_t block = static_cast<uint64_t>(block_size);
  const uint64_t ranks = static_cast<uint64_t>(world_size);
  if (row < block * ranks) {
    return Destination{static_cast<int32_t>(row / block), static_cast<int64_t>(row % block)};
  }
  return Destination{static_cast<int32_t>(row % ranks), static_cast<int64_t>(row / ranks)};
}

// Bags of all features of the sender, in CSR form.
struct Bags {
  const int64_t* ids;
  const float* weights;        // null: none
  const int64_t* offsets;      // [num_bags + 1]
  const int64_t* block_sizes;  // [num_bags / batch_size]
  int64_t num_bags;
  int64_t batch_size;
};

// Outputs in rank order: bag b of rank r has number r * num_bags + b. The ids of a bag keep their
// order.
struct Bucketized {
  int64_t* ids;      // [ids]; with blocks [ids + world_size * num_bags]
  float* weights;    // [ids]; null: none
  int64_t* permute;  // [ids] new position of each id among the ids; null: not wanted
  bool blocks;       // the lengths of each rank's bags precede its ids (blocks.h)

  // Position in `ids` of the id with this number, for this rank.
  HKV_HOST_DEVICE int64_t word(int64_t place, int64_t rank, int64_t num_bags) const {
    return blocks ? place + (rank + 1) * num_bags : place;
  }
};

namespace cpu {

// lengths[r * num_bags + b] = ids of bag b that go to rank r.
void count(const Bags& bags, int32_t world_size, int64_t* lengths, int threads);

// starts = exclusive sums of the lengths, and their total.
void scatter(const Bags& bags, int32_t world_size, const int64_t* starts, Bucketized out,
             int threads);

}  // namespace cpu

#ifdef TORCHREC_HKV_CUDA
namespace cuda {

void count(const Bags& bags, int32_t world_size, int64_t* lengths, cudaStream_t stream);

void scatter(const Bags& bags, int32_t world_size, const int64_t* starts, Bucketized out,
             cudaStream_t stream);

}  // namespace cuda
#endif

}  // namespace torchrec_hkv::routing
