// Ids and last steps of a GPU's table, which lie packed (packed_entries.h), to and from arrays.
#pragma once

#ifdef TORCHREC_HKV_CUDA
#include <cuda_runtime.h>

#include <cstdint>

#include "hash_table/table_view.h"

namespace torchrec_hkv::hash_table::cuda {

// ids[i], last_steps[i] = those of slots[i], counted from the table's first; slots null: of slot i.
// Of free slots they mean nothing. ids, last_steps null: not wanted.
void read_entries(const TableView& table, const int64_t* slots, int64_t n, int64_t* ids,
                  uint32_t* last_steps, cudaStream_t stream);

// Gives all slots of a table that its digests say are occupied these ids and last steps,
// [num_slots] each; the others become free.
void load_entries(const TableView& table, const int64_t* ids, const uint32_t* last_steps,
                  cudaStream_t stream);

}  // namespace torchrec_hkv::hash_table::cuda
#endif
