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

// What a GPU says of a group's updates, so that the next is done the quicker way; nothing but speed
// depends on it. Zeros at first.
struct UpdateHint {
  uint32_t unique_ids;       // 1: most slots of a batch were at one of its positions
  uint32_t longest_feature;  // positions of the feature with most
  uint32_t hot_slots;        // 1: a slot had a large part of a feature's positions
};

namespace cpu {

// slots[i] = the slot of ids[i] in its group, or kNoSlot. Changes nothing.
void find(const TableView* tables, const Batch& batch, int64_t* slots, int threads);

// The same, and inserts: an id that is found is touched (step, score); one that is not takes a free
// slot of its buckets, the one of the emptier bucket once the first is three quarters full; where
// both are full, the place of the lowest score that is not pinned; where all are pinned, or rank
// above it (RefuseLower), none: kNoSlot, counted as refused. An id that is not admitted gets none
// either. A new id's state is zero. found[i], where wanted: whether the id was there before. Before
// all that the tables age. On a CPU ids are placed in the order of the batch, so that the same
// batch on the same table gives the same slots whatever the number of threads.
void find_or_insert(const TableView* tables, const Batch& batch, const Visit& visit,
                    const Aging& aging, const Placement& placement, int64_t* slots, bool* found,
                    int threads);

// out[b, columns of f] = the reduced rows of bag (f, b), added up in float and rounded once. An id
// without a slot counts with its initial row. A bag without ids gives zeros.
void pool_rows(const TableView* tables, const Batch& batch, const int64_t* slots, Pooling pooling,
               Output<char> out, int threads);

// weights_grad[i] = the dot product of row i with its bag's gradient (divided by the bag's length
// under mean).
void pool_weights_grad(const TableView* tables, const Batch& batch, const int64_t* slots, bool mean,
                       Output<const char> grad, float* weights_grad, int threads);

// Adds up the gradients of equal slots, then updates each row and its state once. Deterministic.
// Every table's step goes on by one, before the rows are updated, whether or not it has ids in the
// batch. learning_rate: one value, in the memory of the device.
void update_rows(const TableView* tables, const Batch& batch, const int64_t* slots, Pooling pooling,
                 Output<const char> grad, const OptimizerConfig& optimizer,
                 const float* learning_rate, int32_t num_tables, int threads);

// out[i] = the initial row of ids[i], columns [column_offset, column_offset + dim).
void initial_rows(const InitialRows& init, const int64_t* ids, int64_t n, int32_t dim,
                  int32_t column_offset, float* out, int threads);

// vectors[i] = the vector at slots[i] of one table (slots counted from the table's first), zeros
// where there is none.
void gather(const TableView& table, const RowStore& store, const int64_t* slots, int64_t n,
            char* vectors, int threads);

// rows[i] = the row at slots[i], numbered through the tables of a group, of the batch's id i. Where
// there is none, the id's initial row. found[i], where wanted: whether there is one.
void gather_rows(const TableView* tables, const Batch& batch, const int64_t* slots,
                 const RowMatrix& rows, bool* found, int threads);

// Assigns rows[i] to the row at slots[i], or adds it. Slots are numbered through the tables of a
// group. kNoSlot is skipped. Of several rows for one slot, the last is assigned. When adding, each
// sum is rounded to the table's type, in the order of the call. But rows that are added to a row of
// 8 bits are summed first, and the stored row is rounded once, unless in_order.
void write_rows(const TableView* tables, int32_t num_tables, const int64_t* slots, int64_t n,
                const RowMatrix& rows, bool add, bool in_order, int threads);

// Touches slots as a hit does; position i of the batch has slots[i], numbered through the tables.
// kNoSlot is skipped.
void touch_slots(const TableView* tables, const Batch& batch, const int64_t* slots,
                 const Visit& visit, int threads);

// Frees slots, numbered through the tables of a group. kNoSlot is skipped.
void erase_slots(const TableView* tables, int32_t num_tables, const int64_t* slots, int64_t n,
                 int threads);

// Where a policy takes scores as they are given: of several for one slot, numbered through the
// tables of a group, the last one stays. After a call that touched the slots, whose threads may
// have written them in any order. Slots that are none are skipped.
void keep_last_scores(const TableView* tables, int32_t num_tables, const int64_t* slots,
                      const uint64_t* scores, int64_t n, int threads);

// chosen[i] = whether a slot holds an entry that is selected, of the slots that the tables have at
// present: those of each table begin at selection.starts.
void select_slots(const TableView* tables, int32_t num_tables, const Selection& selection,
                  bool* chosen, int threads);

// What the tables of a group keep of the entries at slots, numbered through the tables; none of
// them is kNoSlot.
void export_slots(const TableView* tables, int32_t num_tables, const int64_t* slots, int64_t n,
                  const Exported& out, int threads);

// Writes the digests of a table whose occupied slots hold these ids (host memory). Returns the
// number of occupied slots that could not be found again: ids outside their buckets, or standing
// twice.
int64_t rebuild_digests(const int64_t* ids, const uint8_t* occupied, uint32_t num_buckets,
                        int32_t bucket_slots, uint16_t* digests);

// owners[i] = the owner bucket of the id in slot first + i, or -1 where the slot is free.
void slot_owners(const TableView& table, int64_t first, int64_t n, int32_t* owners, int threads);

// Puts entry i into slots[i], with its row, state, last step and score. placed[i]: whether the slot
// was free and in one of the id's buckets; otherwise nothing is done with it.
void restore_slots(const TableView& table, const Entries& entries, const int64_t* slots,
                   bool* placed, int threads);

// Writes rows, states and scores of entries over what stands in slots[i], where that is the same
// id; elsewhere, and at kNoSlot, nothing is done. No slot may be named twice.
void overwrite_slots(const TableView& table, const Entries& entries, const int64_t* slots,
                     int threads);

// Puts entries where a new id would go. Where both buckets are full, an entry takes the place of
// the lowest rank if that is lower than its own, and what stood there goes to `displaced`;
// otherwise it is counted as one that found no place. None of the ids may be in the table.
void restore_entries(const TableView& table, const Entries& entries, const Displaced& displaced);

// misplaced[i]: whether slots[i] is in none of the buckets that ids[i] has in a table of this
// geometry, or the id's owner bucket is not in [owner_begin, owner_end).
void find_misplaced(const int64_t* ids, const int64_t* slots, int64_t n, uint32_t num_buckets,
                    int32_t bucket_slots, int64_t owner_begin, int64_t owner_end, bool* misplaced,
                    int threads);

}  // namespace cpu

#ifdef TORCHREC_HKV_CUDA
namespace cuda {

// Offsets of a batch may be wrong: they are read only by the device. Kernels never read or write
// outside of arrays for that. Those that pool or update report what they find (Batch::refused); of
// such a batch bags give zeros or wrong rows, and no row is updated.

// to[i] = from[i], which is in host memory and may be freed at once.
void write_feature_bags(FeatureBags* to, const FeatureBags* from, int64_t n, cudaStream_t stream);

// `only`: the view in host memory, where the group has one table and one feature; otherwise null.
void find(const TableView* tables, const TableView* only, const Batch& batch, int64_t* slots,
          cudaStream_t stream);

// Bytes of scratch that find_or_insert needs for a batch, aligned to 256. scored: whether scores
// are given.
size_t find_or_insert_scratch(int64_t num_ids, const Placement& placement, bool scored);

// Counts first: `clock` is the visit's. there[i], writer[i], where wanted: whether the id was there
// before; whether this position is the one of all its positions whose row write_rows is to write.
void find_or_insert(const TableView* tables, const TableView* only, const Batch& batch,
                    Clock* clock, const Tick& tick, const Aging& aging, const uint64_t* scores,
                    const Placement& placement, int64_t* slots, bool* there, bool* writer,
                    void* scratch, cudaStream_t stream);

// What `tick` says: one step on, or none, and the pins.
void tick(Clock* clock, const Tick& tick, cudaStream_t stream);

// The pin ends.
void release(Clock* clock, int32_t place, uint32_t generation, cudaStream_t stream);

void gather(const TableView& table, const RowStore& store, const int64_t* slots, int64_t n,
            char* vectors, cudaStream_t stream);

// only: the view in host memory, where the group has one table; otherwise null. So below.
void gather_rows(const TableView* tables, const TableView* only, const Batch& batch,
                 const int64_t* slots, const RowMatrix& rows, bool* found, cudaStream_t stream);

// Which of several rows for one slot is written: the one that `writer` names, or, where that is
// null, the first to claim the slot in `claims`, a zeroed bitmap of the group's slots. Neither is
// read when adding.
void write_rows(const TableView* tables, const TableView* only, int32_t num_tables,
                const int64_t* slots, int64_t n, const RowMatrix& rows, bool add,
                const bool* writer, uint32_t* claims, cudaStream_t stream);

// write_rows and cpu::keep_last_scores in the order of positions, so that of several rows, or
// scores, for one slot the last is kept, and sums are rounded as on a CPU. slots: sorted, [n];
// positions: where they stood, ascending among equals. Slots that are none are skipped.
void write_rows_in_order(const TableView* tables, int32_t num_tables, const int64_t* slots,
                         const int64_t* positions, const RowMatrix& rows, int64_t n, bool add,
                         cudaStream_t stream);
void keep_last_scores(const TableView* tables, int32_t num_tables, const int64_t* slots,
                      const int64_t* positions, const uint64_t* scores, int64_t n,
                      cudaStream_t stream);

void touch_slots(const TableView* tables, const TableView* only, const Batch& batch,
                 const int64_t* slots, const Visit& visit, cudaStream_t stream);

void erase_slots(const TableView* tables, const TableView* only, int32_t num_tables,
                 const int64_t* slots, int64_t n, cudaStream_t stream);

// most_slots: that one table has.
void select_slots(const TableView* tables, int32_t num_tables, int64_t most_slots,
                  const Selection& selection, bool* chosen, cudaStream_t stream);

void export_slots(const TableView* tables, int32_t num_tables, const int64_t* slots, int64_t n,
                  const Exported& out, cudaStream_t stream);

void pool_rows(const TableView* tables, const Batch& batch, const int64_t* slots, Pooling pooling,
               Output<char> out, const GroupShape& shape, const UpdateHint* hint,
               cudaStream_t stream);

void pool_weights_grad(const TableView* tables, const Batch& batch, const int64_t* slots, bool mean,
                       Output<const char> grad, float* weights_grad, cudaStream_t stream);

// Whether most ids of a batch are expected to stand at one of its positions, as the device has
// found some batches ago: it is not waited for.
bool expects_unique_ids(const UpdateHint* hint);

// How the positions of a batch are grouped by their slots.
struct Grouping {
  bool moved;  // the sort has left the pairs in the other half of the scratch
};

// Bytes of scratch that an update needs for a batch of num_ids in num_bags, slot numbers below
// num_slots, and tables of this shape; weighted: whether ids have weights.
size_t update_rows_scratch(int64_t num_ids, int64_t num_bags, int64_t num_slots,
                           const GroupShape& shape, bool weighted);

// The first part of an update, which takes no gradients: brings the positions of equal slots
// together in `scratch`, which must be aligned to 256 bytes. It looks at the offsets, and of the
// tables at how their slots are numbered and at the types of their rows. weighted: as above. hint:
// the group's. beside: where `stream` is that of a SideStream: in a CUDA graph the other may be
// held until the largest blocks begin.
Grouping group_positions(const TableView* tables, const Batch& batch, const int64_t* slots,
                         bool weighted, int64_t num_slots, const GroupShape& shape,
                         const UpdateHint* hint, void* scratch, cudaStream_t stream,
                         SideStream* beside = nullptr);

// grouping, scratch: what group_positions has made of the same batch, slots and shape; it is used
// up. hint: the group's, in host memory that the GPU can write.
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
void restore_entries(const TableView& table, const Entries& entries, const Displaced& displaced,
                     bool* waiting, cudaStream_t stream);

// Scratch of restore_entries_in_order.
struct RestoreOrder {
  uint32_t* tickets;  // [2 n]
  uint32_t* turns;    // [num_buckets]
  uint32_t* next;     // 0 at first
  uint8_t* moved;     // [n], given back: whether the entry has taken the place of another
};

// As cpu::restore_entries, entry by entry, but what entry i takes the place of goes to place i of
// `displaced`. buckets: what entry_buckets has written, [2 n], sorted, and where each stood.
void entry_buckets(const TableView& table, const Entries& entries, int64_t* buckets,
                   cudaStream_t stream);
void restore_entries_in_order(const TableView& table, const Entries& entries,
                              const Displaced& displaced, const int64_t* buckets,
                              const int64_t* places, const RestoreOrder& order,
                              cudaStream_t stream);

}  // namespace cuda
#endif

}  // namespace torchrec_hkv::hash_table
