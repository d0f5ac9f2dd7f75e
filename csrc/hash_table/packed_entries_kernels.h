// Converts the packed ids and last steps of a GPU table (packed_entries.h) to and from arrays.
#pragma once

#ifdef TORCHREC_HKV_CUDA
#include <cuda_runtime.h>

#include <cstdint>

#include "hash_table/table_view.h"

namespace torchrec_hkv::hash_table::cuda {

// ids[i], last_steps[i] = those of slots[i], counted from the table's first; of slot i if slots is
// null. They have no meaning for free slots. ids, last_steps: null if not wanted.
void read_entries(const TableView& table, const int64_t* slots, int64_t n, int64_t* ids,
                  uint32_t* last_steps, cudaStream_t stream);

// Writes these ids and last steps, [num_slots] each, to all slots that the digests mark as
// occupied. The other slots become free.
void load_entries(const TableView& table, const int64_t* ids, const uint32_t* last_steps,
                  cudaStream_t stream);

}  // namespace torchrec_hkv::hash_table::cuda
#endif
