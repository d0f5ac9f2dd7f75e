// The hash table's kernels. Each is declared once here and implemented for both devices: in
// cpu/ on `threads` threads, in cuda/ on a stream. `tables` is an array in the memory of the device
// that runs the kernel; so is every pointer in a batch.
#pragma once

#include <cstddef>
#include <cstdint>

#include "common/optimizers.h"
#include "hash_table/aging.h"
#include "hash_table/table_view.h"

#ifdef TORCHREC_HKV_CUDA
#include <cuda_runtime.h>

namespace torchrec_hkv {
class SideStream;
}
#endif

namespace torchrec_hkv::hash_table {

// What a GPU reports about a group's last update. It selects the kernels of the next update, so
// only speed depends on it. Initially zeros.
struct UpdateHint {
  uint32_t unique_ids;       // 1: most slots of a batch occurred at one position only
  uint32_t longest_feature;  // positions of the feature with the most positions
  uint32_t hot_slots;        // 1: a slot had a large part of a feature's positions
};

namespace cpu {

// slots[i] = the slot of ids[i] in its group, or kNoSlot. Changes nothing.
void find(const TableView* tables, const Batch& batch, int64_t* slots, int threads);

// As find, and inserts missing ids. First the tables age. An id that is found is touched (step,
// score). A missing id takes a free slot of its buckets: of the first, or of the emptier one once
// the first is three quarters full. If both are full, it replaces the lowest score that is not
// pinned. If all entries are pinned or rank above it (RefuseLower), it gets kNoSlot and is counted
// as refused. An id that is not admitted gets kNoSlot, too. The state of a new id is zero. found[i]
// (may be null): whether the id was in the table before. A CPU places ids in the order of the
// batch, so the slots do not depend on the number of threads.
void find_or_insert(const TableView* tables, const Batch& batch, const CallContext& context,
                    const Aging& aging, const Placement& placement, int64_t* slots, bool* found,
                    int threads);

// out[b, columns of f] = the reduced rows of bag (f, b), added up in float and rounded once. An id
// without a slot contributes its initial row. A bag without ids gives zeros.
void pool_rows(const TableView* tables, const Batch& batch, const int64_t* slots, Pooling pooling,
               Output<char> out, int threads);

// weights_grad[i] = the dot product of row i with its bag's gradient (divided by the length of the
// bag for mean pooling).
void pool_weights_grad(const TableView* tables, const Batch& batch, const int64_t* slots, bool mean,
                       Output<const char> grad, float* weights_grad, int threads);

// Adds up the gradients of equal slots, then updates each row and its state once. Deterministic.
// Before that, the step of every table is incremented, whether or not the table has ids in the
// batch. learning_rate: one value, in the memory of the device.
void update_rows(const TableView* tables, const Batch& batch, const int64_t* slots, Pooling pooling,
                 Output<const char> grad, const OptimizerConfig& optimizer,
                 const float* learning_rate, int32_t num_tables, int threads);

// out[i] = the initial row of ids[i], columns [column_offset, column_offset + dim).
void initial_rows(const InitialRows& init, const int64_t* ids, int64_t n, int32_t dim,
                  int32_t column_offset, float* out, int threads);

// vectors[i] = the vector at slots[i] of one table (slots counted from the table's first), or zeros
// for kNoSlot.
void gather(const TableView& table, const RowStore& store, const int64_t* slots, int64_t n,
            char* vectors, int threads);

// rows[i] = the row at slots[i] of the batch's id i, or the id's initial row for kNoSlot. Slots are
// numbered across the tables of a group. found[i] (may be null): whether slots[i] is a slot.
void gather_rows(const TableView* tables, const Batch& batch, const int64_t* slots,
                 const RowMatrix& rows, bool* found, int threads);

// Writes rows[i] to the row at slots[i], or adds it. Of several rows for one slot, one is written
// whole: on a CPU the last. Slots are numbered across the tables of a group; kNoSlot is skipped.
void write_rows(const TableView* tables, int32_t num_tables, const int64_t* slots, int64_t n,
                const RowMatrix& rows, bool add, int threads);

// Touches slots as a hit does; position i of the batch has slots[i], numbered across the tables.
// kNoSlot is skipped.
void touch_slots(const TableView* tables, const Batch& batch, const int64_t* slots,
                 const CallContext& context, int threads);

// Frees slots, numbered across the tables of a group. kNoSlot is skipped.
void erase_slots(const TableView* tables, int32_t num_tables, const int64_t* slots, int64_t n,
                 int threads);

// For policies that store given scores: if several scores are given for one slot, stores the last
// one. Called after a call that touched the slots, whose threads may have stored any of them. Slots
// are numbered across the tables of a group; kNoSlot and kSkipped are skipped.
void keep_last_scores(const TableView* tables, int32_t num_tables, const int64_t* slots,
                      const uint64_t* scores, int64_t n, int threads);

// Reads steps and counts at slots[i], or at slot i if `slots` is null, of a table that keeps
// CountedSteps. steps, counts: null if not wanted. write_counted writes those of slots 0 to n - 1.
void read_counted(const TableView& table, const int64_t* slots, int64_t n, uint32_t* steps,
                  int64_t* counts, int threads);
void write_counted(const TableView& table, const uint32_t* steps, const int64_t* counts, int64_t n,
                   int threads);

// chosen[i] = whether a slot holds an entry that meets the selection. The slots that a table has at
// present begin at selection.starts[table].
void select_slots(const TableView* tables, int32_t num_tables, const Selection& selection,
                  bool* chosen, int threads);

// Reads the ids, scores, rows and states at slots, numbered across the tables of a group. No slot
// may be kNoSlot.
void export_slots(const TableView* tables, int32_t num_tables, const int64_t* slots, int64_t n,
                  const ExportedEntries& out, int threads);

// Writes the digests of a table whose occupied slots hold these ids (host memory). Returns the
// number of occupied slots that a find would not return: ids outside their buckets, and duplicates.
int64_t rebuild_digests(const int64_t* ids, const uint8_t* occupied, uint32_t num_buckets,
                        int32_t bucket_slots, uint16_t* digests);

// owners[i] = the owner bucket of the id in slot first + i, or -1 if the slot is free.
void slot_owners(const TableView& table, int64_t first, int64_t n, int32_t* owners, int threads);

// Puts entry i into slots[i], with its row, state, last step and score. placed[i]: whether the slot
// was free and in one of the id's buckets; otherwise the entry is not written.
void restore_slots(const TableView& table, const Entries& entries, const int64_t* slots,
                   bool* placed, int threads);

// Overwrites the row, state and score at slots[i] if the slot holds the same id. Does nothing for
// other slots and for kNoSlot. A slot may occur once only.
void overwrite_slots(const TableView& table, const Entries& entries, const int64_t* slots,
                     int threads);

// Inserts entries as new ids. If both buckets are full, an entry replaces the lowest rank if that
// is lower than its own, and the replaced entry goes to `displaced`; otherwise the entry is counted
// as one without a slot. None of the ids may be in the table.
void restore_entries(const TableView& table, const Entries& entries,
                     const DisplacedEntries& displaced);

// misplaced[i]: whether slots[i] is in none of the buckets that ids[i] has in a table of this
// geometry, or the id's owner bucket is not in [owner_begin, owner_end).
void find_misplaced(const int64_t* ids, const int64_t* slots, int64_t n, uint32_t num_buckets,
                    int32_t bucket_slots, int64_t owner_begin, int64_t owner_end, bool* misplaced,
                    int threads);

}  // namespace cpu

#ifdef TORCHREC_HKV_CUDA
namespace cuda {

// Only the device reads the offsets of a batch, so they may be invalid. Kernels do not access
// memory outside of the arrays in that case. Kernels that pool or update report invalid offsets
// (Batch::refused). The output of such a batch is zeros or wrong rows, and no row is updated.

// to[i] = from[i]. `from` is in host memory and may be freed when the call returns.
void write_feature_bags(FeatureBags* to, const FeatureBags* from, int64_t n, cudaStream_t stream);

// only: the view in host memory if the group has one table and one feature; otherwise null.
void find(const TableView* tables, const TableView* only, const Batch& batch, int64_t* slots,
          cudaStream_t stream);

// Bytes of scratch that find_or_insert needs for a batch, aligned to 256. scored: whether scores
// are given.
size_t find_or_insert_scratch(int64_t num_ids, const Placement& placement, bool scored);

// Advances the clock first; `clock` is that of the visit. there[i] (may be null): whether the id
// was in the table before. writer[i] (may be null): whether this is the position of the id whose
// row write_rows writes.
void find_or_insert(const TableView* tables, const TableView* only, const Batch& batch,
                    Clock* clock, const Tick& tick, const Aging& aging, const uint64_t* scores,
                    const Placement& placement, int64_t* slots, bool* there, bool* writer,
                    void* scratch, cudaStream_t stream);

// Applies `tick`: advances the step, or not, and updates the pins.
void tick(Clock* clock, const Tick& tick, cudaStream_t stream);

// Ends a pin (clock.h).
void release(Clock* clock, int32_t pin_index, uint32_t generation, cudaStream_t stream);

void gather(const TableView& table, const RowStore& store, const int64_t* slots, int64_t n,
            char* vectors, cudaStream_t stream);

// only: the view in host memory if the group has one table; otherwise null. The same below.
void gather_rows(const TableView* tables, const TableView* only, const Batch& batch,
                 const int64_t* slots, const RowMatrix& rows, bool* found, cudaStream_t stream);

// Of several rows for one slot, writes that of the position in `writer` or, if writer is null, of
// the first thread to claim the slot in `claims`, a zeroed bitmap of the group's slots. Neither is
// read when adding.
void write_rows(const TableView* tables, const TableView* only, int32_t num_tables,
                const int64_t* slots, int64_t n, const RowMatrix& rows, bool add,
                const bool* writer, uint32_t* claims, cudaStream_t stream);

// As cpu::write_rows and cpu::keep_last_scores. slots: sorted, [n]; positions: their positions in
// the call, ascending among equal slots. kNoSlot and kSkipped are skipped.
void write_rows_in_order(const TableView* tables, int32_t num_tables, const int64_t* slots,
                         const int64_t* positions, const RowMatrix& rows, int64_t n, bool add,
                         cudaStream_t stream);
void keep_last_scores(const TableView* tables, int32_t num_tables, const int64_t* slots,
                      const int64_t* positions, const uint64_t* scores, int64_t n,
                      cudaStream_t stream);

void touch_slots(const TableView* tables, const TableView* only, const Batch& batch,
                 const int64_t* slots, const CallContext& context, cudaStream_t stream);

void erase_slots(const TableView* tables, const TableView* only, int32_t num_tables,
                 const int64_t* slots, int64_t n, cudaStream_t stream);

// max_slots: of one table.
void select_slots(const TableView* tables, int32_t num_tables, int64_t max_slots,
                  const Selection& selection, bool* chosen, cudaStream_t stream);

void export_slots(const TableView* tables, int32_t num_tables, const int64_t* slots, int64_t n,
                  const ExportedEntries& out, cudaStream_t stream);

void pool_rows(const TableView* tables, const Batch& batch, const int64_t* slots, Pooling pooling,
               Output<char> out, const GroupShape& shape, const UpdateHint* hint,
               cudaStream_t stream);

void pool_weights_grad(const TableView* tables, const Batch& batch, const int64_t* slots, bool mean,
                       Output<const char> grad, float* weights_grad, cudaStream_t stream);

// Whether most ids of a batch are expected at one position only, as the device reported for an
// earlier batch. Does not wait for the device.
bool expects_unique_ids(const UpdateHint* hint);

// How the positions of a batch are grouped by their slots.
struct Grouping {
  bool moved;  // the sorted pairs are in the other half of the scratch
};

// Bytes of scratch that an update needs for a batch of num_ids in num_bags, slot numbers below
// num_slots, and tables of this shape; weighted: whether ids have weights.
size_t update_rows_scratch(int64_t num_ids, int64_t num_bags, int64_t num_slots,
                           const GroupShape& shape, bool weighted);

// The first part of an update, which needs no gradients: groups the positions of equal slots in
// `scratch`, which must be aligned to 256 bytes. Reads the offsets, and the slot ranges and row
// types of the tables. weighted: as above. hint: of the group. side_stream: whether `stream` is
// that of a SideStream. In a CUDA graph the other stream may then be held until the largest blocks
// begin.
Grouping group_positions(const TableView* tables, const Batch& batch, const int64_t* slots,
                         bool weighted, int64_t num_slots, const GroupShape& shape,
                         const UpdateHint* hint, void* scratch, cudaStream_t stream,
                         SideStream* side_stream = nullptr);

// grouping, scratch: the result of group_positions for the same batch, slots and shape; the call
// overwrites the scratch. hint: of the group, in host memory that the GPU can write.
void update_rows(const TableView* tables, const Batch& batch, Pooling pooling,
                 Output<const char> grad, const OptimizerConfig& optimizer,
                 const float* learning_rate, int32_t num_tables, int64_t num_slots,
                 const GroupShape& shape, const Grouping& grouping, UpdateHint* hint, void* scratch,
                 cudaStream_t stream);

void initial_rows(const InitialRows& init, const int64_t* ids, int64_t n, int32_t dim,
                  int32_t column_offset, float* out, cudaStream_t stream);

void slot_owners(const TableView& table, int64_t first, int64_t n, int32_t* owners,
                 cudaStream_t stream);

void restore_slots(const TableView& table, const Entries& entries, const int64_t* slots,
                   bool* placed, cudaStream_t stream);

void overwrite_slots(const TableView& table, const Entries& entries, const int64_t* slots,
                     cudaStream_t stream);

// waiting: scratch, [entries.n].
void restore_entries(const TableView& table, const Entries& entries,
                     const DisplacedEntries& displaced, bool* waiting, cudaStream_t stream);

// Scratch of restore_entries_in_order.
struct RestoreOrder {
  uint32_t* tickets;  // [2 n]
  uint32_t* turns;    // [num_buckets]
  uint32_t* next;     // initially 0
  uint8_t* moved;     // [n], output: whether the entry has replaced another
};

// As cpu::restore_entries, in the order of the entries, but the entry that entry i replaces goes to
// pin_index i of `displaced`. buckets: the result of entry_buckets, [2 n], sorted; places: the
// index of each before the sort.
void entry_buckets(const TableView& table, const Entries& entries, int64_t* buckets,
                   cudaStream_t stream);
void restore_entries_in_order(const TableView& table, const Entries& entries,
                              const DisplacedEntries& displaced, const int64_t* buckets,
                              const int64_t* places, const RestoreOrder& order,
                              cudaStream_t stream);

}  // namespace cuda
#endif

}  // namespace torchrec_hkv::hash_table
