// Kernels that move rows between HBM and host memory; see frames.h.
#pragma once

#include "hash_table/kernels.h"

#ifdef TORCHREC_HKV_CUDA

namespace torchrec_hkv::hash_table::cuda {

// At the end of an insertion, for tables with frames: brings rows of the batch's ids into frames
// and writes back the rows that they replace. Then writes the states and, as `rows` says, the rows
// of new ids, which the insertion left to this call. With NewRows::kUntouched no other rows move.
void place_rows_in_frames(const TableView* tables, const Batch& batch, const CallContext& context,
                          NewRows rows, const int64_t* slots, const bool* placed,
                          const uint32_t* any_missing, const FrameMoves& moving, void* scratch,
                          cudaStream_t stream);
// Bytes of scratch for this number of ids.
size_t frames_scratch(int64_t num_ids, const FrameMoves& moving);

// Writes dirty frames back. Frames keep their rows.
void write_back(const TableView& table, cudaStream_t stream);

// Gives free frames to the slots of the highest rank.
void fill_frames(const TableView& table, cudaStream_t stream);

}  // namespace torchrec_hkv::hash_table::cuda

#endif
