// Kernels of syncs of replicas and of deltas. As in kernels.h: in cpu/ on `threads` threads, in
// cuda/ on a stream.
#pragma once

#include <cstdint>

#include "hash_table/slot_changes.h"
#include "hash_table/slot_values.h"
#include "hash_table/table_view.h"

#ifdef TORCHREC_HKV_CUDA
#include <cuda_runtime.h>
#endif

namespace torchrec_hkv::hash_table {
namespace cpu {

// What may have changed in some consecutive slots of a table, in one pass over digests and last
// steps.
void slot_changes(const TableView& table, const SlotChanges& look, int threads);

// How many of n answers are not 0, and these: their slots, counted from `first`, ascending, and
// what they are.
int64_t count_changes(const uint8_t* changes, int64_t n);
void list_changes(const uint8_t* changes, int64_t n, int64_t first, int64_t* slots, uint8_t* bits);

// Reads rows, states, last steps and, unless `scores` is null, scores of the entries at `slots`. An
// invalid slot (kNoSlot) reads zeros. The table's rows must be float32.
void read_values(const TableView& table, const int64_t* slots, int64_t n, const ValueMatrix& out,
                 uint32_t* last_steps, uint64_t* scores, int threads);

// Writes the same over what stands in slots[i], where that is ids[i]; elsewhere, and at kNoSlot,
// nothing is done. No slot may be named twice.
void write_values(const TableView& table, const int64_t* slots, int64_t n, const int64_t* ids,
                  const ValueMatrix& from, const uint32_t* last_steps, const uint64_t* scores,
                  int threads);

}  // namespace cpu

#ifdef TORCHREC_HKV_CUDA
namespace cuda {

void slot_changes(const TableView& table, const SlotChanges& look, cudaStream_t stream);

void read_values(const TableView& table, const int64_t* slots, int64_t n, const ValueMatrix& out,
                 uint32_t* last_steps, uint64_t* scores, cudaStream_t stream);

void write_values(const TableView& table, const int64_t* slots, int64_t n, const int64_t* ids,
                  const ValueMatrix& from, const uint32_t* last_steps, const uint64_t* scores,
                  cudaStream_t stream);

}  // namespace cuda
#endif

}  // namespace torchrec_hkv::hash_table
