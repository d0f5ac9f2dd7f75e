// Kernels that move rows between HBM and host memory: see frames.h.
#pragma once

#include "hash_table/kernels.h"

#ifdef TORCHREC_HKV_CUDA

namespace torchrec_hkv::hash_table::cuda {

// At the end of an insertion: rows of ids of tables with frames come into frames, and what takes
// their place is written home. Rows and states of new ids, which the insertion has left alone
// there, are written: the rows as `rows` says. With NewRows::kUntouched no other rows move.
void settle_rows(const TableView* tables, const Batch& batch, const Visit& visit, NewRows rows,
                 const int64_t* slots, const bool* placed, const uint32_t* any_missing,
                 const MovingRows& moving, void* scratch, cudaStream_t stream);
// Bytes of the scratch, for so many ids.
size_t settle_scratch(int64_t num_ids, const MovingRows& moving);

// Writes what is dirty home. Frames keep their rows.
void write_home(const TableView& table, cudaStream_t stream);

// Gives free frames to the slots of the highest rank.
void fill_frames(const TableView& table, cudaStream_t stream);

}  // namespace torchrec_hkv::hash_table::cuda

#endif
