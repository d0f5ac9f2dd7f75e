// The first part of find_or_insert on the GPU.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "hash_table/cuda/insert/missing.cuh"
#include "hash_table/kernels.h"

namespace torchrec_hkv::hash_table::cuda {

// What a find that touches says of each position besides its slot. Null: not wanted.
struct Found {
  bool* there;   // whether the id is in the table
  bool* writer;  // whether it is, and this position is the first of the id's to touch it
};

// As find, and touches what it finds; of what is missing, kMissingFromFull tells apart what can
// only take the place of another. Prepares `missing`. spread: most ids stand at one position.
// keeps_scores: whether a table of the group keeps scores.
// begun: the kernel before it is the one that starts the clock and clears the flags.
void find_and_touch(const TableView* tables, const TableView* only, const Batch& batch,
                    const Visit& visit, int64_t* slots, const Found& found, const Missing& missing,
                    bool spread, bool keeps_scores, bool begun, cudaStream_t stream);

}  // namespace torchrec_hkv::hash_table::cuda
