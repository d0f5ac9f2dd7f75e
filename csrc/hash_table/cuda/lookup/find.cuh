// The first part of find_or_insert on the GPU.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "hash_table/cuda/insert/missing_lists.cuh"
#include "hash_table/kernels.h"

namespace torchrec_hkv::hash_table::cuda {

// Further results of a touching find, by position. Null: not wanted.
struct Found {
  bool* present;  // whether the id is in the table
  bool* writer;   // whether this position is the first to touch the id's entry
};

// As find, and touches found entries. Missing ids that must replace another entry get
// kMissingFromFull. Prepares `missing`. mostly_unique: most ids occur at one position only. scores:
// those that tables of the group store. begun: the previous kernel starts the clock and clears the
// flags.
void find_and_touch(const TableView* tables, const TableView* only, const Batch& batch,
                    const CallContext& context, int64_t* slots, const Found& found,
                    const MissingLists& missing, bool mostly_unique, StoredScores scores,
                    bool begun, cudaStream_t stream);

}  // namespace torchrec_hkv::hash_table::cuda
