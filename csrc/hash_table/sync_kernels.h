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

// Compares slots with what they held, and notes what they hold now, in one pass over digests and
// last steps and a look at the ids of the slots that may have changed.
void compare_slots(const TableView& table, const SlotComparison& comparison, SlotDifferences& found,
                   int threads);

// Reads rows, states, last steps and, unless `scores` is null, scores of the entries at `slots`. An
// invalid slot (kNoSlot) reads zeros. The table's rows must be float32.
void read_values(const TableView& table, const int64_t* slots, int64_t n, const ValueMatrix& out,
                 uint32_t* last_steps, uint64_t* scores, int threads);

// Writes the same over what stands in slots[i], where that is ids[i]; elsewhere, and at kNoSlot,
// nothing is done. No slot may be named twice.
void write_values(const TableView& table, const int64_t* slots, int64_t n, const int64_t* ids,
                  const ValueMatrix& from, const uint32_t* last_steps, const uint64_t* scores,
                  int threads);

// Writes a record of each slot's entry, whose row may be of any type, and, unless `scores` is null,
// scores. is_new: of each, whether it was not in the table at the last sync. kNoSlot gives zeros.
void pack_records(const TableView& table, const int64_t* slots, const bool* is_new, int64_t n,
                  const ReplicaRecords& out, uint64_t* scores, int threads);

// Merges the records of two replicas into `own`, but for the flags: rows and states become means
// over the replicas that have the id, or, of an id that neither had at the last sync, over both, a
// replica without it counting with the initial row and states of 0. Writes what comes of them over
// the entry at slots[i], which must be that of ids[i]; only where that is kNoSlot, or on the way to
// it, to `own`.
void merge_records(const TableView& table, const MergedEntries& entries, const ReplicaRecords& own,
                   const float* theirs, int threads);

// The distinct ids of several parts of `ids`, in the order in which they come first, and the places
// of all of `ids` among them. n must be below 2^32 - 1. Returns how many.
int64_t distinct_ids(const int64_t* ids, int64_t n, int64_t* distinct, int64_t* places);

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
