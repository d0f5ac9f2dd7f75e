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

// Finds the changes in some consecutive slots of a table, in one pass over digests and last steps.
void slot_changes(const TableView& table, const SlotChanges& request, int threads);

// Returns the number of the n results that are not 0, and lists them: slots, counted from `first`
// and ascending, and results.
int64_t count_changes(const uint8_t* changes, int64_t n);
void list_changes(const uint8_t* changes, int64_t n, int64_t first, int64_t* slots, uint8_t* bits);

// Replaces the contents at `slots`, of which none occurs twice; previous[i]: the id before.
void exchange_contents(const SlotContents& contents, const int64_t* slots, const int64_t* ids,
                       const bool* occupied, int64_t n, int64_t* previous);

// Compares slots with their previous contents and stores the present ones, in one pass over digests
// and last steps. Reads ids only of slots that may have changed.
void compare_slots(const TableView& table, const SlotComparison& comparison, SlotDifferences& found,
                   int threads);

// Reads rows, states, last steps and, unless `scores` is null, scores of the entries at `slots`. An
// invalid slot (kNoSlot) reads zeros. The table's rows must be float32.
void read_values(const TableView& table, const int64_t* slots, int64_t n, const ValueMatrix& out,
                 uint32_t* last_steps, uint64_t* scores, int threads);

// Overwrites these values at slots[i] if the slot holds ids[i]. Does nothing for other slots and
// for kNoSlot. A slot may occur once only.
void write_values(const TableView& table, const int64_t* slots, int64_t n, const int64_t* ids,
                  const ValueMatrix& from, const uint32_t* last_steps, const uint64_t* scores,
                  int threads);

// Writes a record of each slot's entry, whose row may be of any type, and, unless `scores` is null,
// scores. is_new: whether the entry was not in the table at the last sync. kNoSlot gives zeros.
void pack_records(const TableView& table, const int64_t* slots, const bool* is_new, int64_t n,
                  const ReplicaRecords& out, uint64_t* scores, int threads);

// Merges the records of two replicas, except for the flags. Rows and states become means over the
// replicas that have the id. For an id that neither had at the last sync, they are means over both:
// a replica without it contributes the initial row and states of 0. Overwrites the entry at
// slots[i], which must be that of ids[i]; for kNoSlot the result goes to `own_records`, which may
// be overwritten in any case.
void merge_records(const TableView& table, const MergedEntries& entries,
                   const ReplicaRecords& own_records, const float* other_records, int threads);

}  // namespace cpu

#ifdef TORCHREC_HKV_CUDA
namespace cuda {

void slot_changes(const TableView& table, const SlotChanges& request, cudaStream_t stream);

// contents: in pinned memory.
void exchange_contents(const SlotContents& contents, const int64_t* slots, const int64_t* ids,
                       const bool* occupied, int64_t n, int64_t* previous, cudaStream_t stream);

void read_values(const TableView& table, const int64_t* slots, int64_t n, const ValueMatrix& out,
                 uint32_t* last_steps, uint64_t* scores, cudaStream_t stream);

void write_values(const TableView& table, const int64_t* slots, int64_t n, const int64_t* ids,
                  const ValueMatrix& from, const uint32_t* last_steps, const uint64_t* scores,
                  cudaStream_t stream);

}  // namespace cuda
#endif

}  // namespace torchrec_hkv::hash_table
