// The tables of a group with their memory. Kernels get them as TableViews, Python as an object.
#pragma once

#include <atomic>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "common/optimizers.h"
#include "hash_table/aging.h"
#include "hash_table/table_view.h"
#include "runtime/group_admission.h"
#include "runtime/group_clock.h"
#include "runtime/host_words.h"
#include "runtime/initial_rows.h"
#include "runtime/stream_order.h"
#include "runtime/table_config.h"
#include "runtime/table_memory.h"
#include "runtime/tensor.h"

namespace torchrec_hkv::runtime {

// Available and total bytes of memory.
struct AvailableMemory {
  int64_t hbm_free;
  int64_t hbm_total;
  int64_t host_free;
  int64_t host_total;
};

// The arrays of a table for export and load. Their first dimension is the number of slots at the
// full capacity, except for the last array.
struct TableState {
  at::Tensor occupied;        // bool
  at::Tensor ids;             // int64
  at::Tensor rows;            // [., dim]
  at::Tensor states;          // float32 [., state width]
  at::Tensor last_steps;      // int32
  at::Tensor scores;          // int64, empty under LRU
  at::Tensor optimizer_step;  // int64 [1], updates so far
};

class TableGroup {
 public:
  // Creates empty tables. feature_tables: the table of each feature, in output order. state_dim:
  // number of float32 state values of a row; by default what the optimizer needs. Throws
  // ValueError, before it allocates, if the tables need more memory than is available.
  static std::shared_ptr<TableGroup> make(std::vector<TableConfig> configs,
                                          std::vector<int64_t> feature_tables,
                                          OptimizerConfig optimizer,
                                          std::optional<int64_t> state_dim, at::Device device,
                                          const AvailableMemory& available);
  ~TableGroup();
  TableGroup(const TableGroup&) = delete;
  TableGroup& operator=(const TableGroup&) = delete;

  // Ops identify a group by a number, because the dispatcher takes no such objects. Throws
  // ValueError if no live group has the number.
  static std::shared_ptr<TableGroup> from_handle(int64_t handle);
  int64_t handle() const { return handle_; }

  at::Device device() const { return device_; }
  const OptimizerConfig& optimizer() const { return optimizer_; }
  int64_t num_tables() const { return static_cast<int64_t>(configs_.size()); }
  int64_t num_features() const { return static_cast<int64_t>(feature_table_list_.size()); }
  int64_t total_dim() const { return total_dim_; }
  int64_t feature_table(int64_t feature) const { return feature_table_list_.at(feature); }
  int64_t feature_dim(int64_t feature) const { return configs_[feature_table(feature)].dim; }
  // Slots of all tables at their full capacities. Slot numbers are below this.
  int64_t num_slots() const { return num_slots_; }
  const hash_table::GroupShape& shape() const { return shape_; }
  // The hint for updates that the device writes; null on a CPU.
  hash_table::UpdateHint* update_hint() const { return host_words_.update_hint(); }
  // Makes the kernels of a batch report bad offsets to this group. No effect on a CPU.
  void watch_offsets(hash_table::Batch* batch) const;
  // Throws ValueError if a GPU has reported bad offsets since the last call. Does not wait.
  void check_bad_offsets() const;
  // Whether a table has, or will have, rows in host memory and frames for them.
  bool has_frames() const { return frame_moves_.any(); }
  const hash_table::FrameMoves& frame_moves() const { return frame_moves_; }
  // Whether a table remembers the ids that it evicts.
  bool remembers_evicted() const { return remembers_evicted_; }
  // Whether a table restores the counts of ids that return.
  bool restores_counts() const { return restores_counts_; }
  // Whether results depend on the calls only, because a table is deterministic, or
  // torch.use_deterministic_algorithms is set during the call.
  bool deterministic() const;
  // Whether a table needs a score for every id, and whether a table takes scores.
  bool needs_scores() const { return needs_scores_; }
  bool takes_scores() const;
  // Whether a table stores given scores unchanged.
  bool has_customized() const;
  const at::Tensor& counters() const { return counters_; }
  // The initialization of new rows in all tables.
  hash_table::NewRows initial_rows() const { return initial_rows_; }
  // Number of updates of each table, int64 [tables], on the device.
  const at::Tensor& optimizer_steps() const { return optimizer_steps_; }
  const GroupAdmission& admission() const { return *admission_; }
  const hash_table::Aging& aging() const { return aging_; }
  // hash_table::AgedLfu of each table, float64 [tables, 7], on the device; zeros under other
  // policies.
  const at::Tensor& aged_lfu() const { return aged_lfu_; }
  // hash_table::MiniatureCounters of each table, int64 [tables, 14], and their entries, on the
  // device.
  const at::Tensor& miniature_counters() const { return miniature_tally_; }
  const std::vector<at::Tensor>& miniature_entries() const { return miniature_entries_; }
  // Whether a table has miniatures.
  bool simulates() const { return simulates_; }
  // Sets AgedLfu::c of a table under kAgedLfu from the next call on. Does not wait for the device.
  void set_aging(int64_t table, double c);
  // Resets a table's measurements for its half-life to `lookups` in `steps`. c: the first value, if
  // the table chooses c; -1 for the configured value.
  void restart_aging(int64_t table, double lookups = 0, double steps = 0, double c = -1);
  // GroupClock::set.
  void set_clock(int64_t now);

  // Views on the group's device.
  const hash_table::TableView* views() const;
  // A view in host memory, with pointers to the group's device.
  const hash_table::TableView& view(int64_t table) const;
  // The view in host memory if the group has one table and one feature, otherwise null. For calls
  // that can't be captured in a CUDA graph while the table may grow, such as insertions.
  const hash_table::TableView* only_view_now() const {
    return num_tables() == 1 && num_features() == 1 ? &host_views_[0] : nullptr;
  }
  // The same for other calls. Also null while the table may grow, because a CUDA graph would keep
  // the captured view.
  const hash_table::TableView* only_view() const { return growing_ ? nullptr : only_view_now(); }
  at::ScalarType row_dtype(int64_t table) const;
  // The view of a group's only table, in host memory; null for several tables.
  const hash_table::TableView* only_table() const {
    return num_tables() == 1 ? &host_views_[0] : nullptr;
  }
  // Shape of the row matrices of calls, which fits all tables (hash_table/row_matrix.h).
  RowType matrix_type() const;
  at::ScalarType matrix_dtype() const;
  int32_t widest_state() const;
  const int32_t* feature_tables() const { return feature_tables_.const_data_ptr<int32_t>(); }
  const int32_t* feature_columns() const { return feature_columns_.const_data_ptr<int32_t>(); }

  // Counts the calls that touch rows, and holds their pins.
  GroupClock& clock() const { return *clock_; }
  // Orders calls on several streams. Callers that access the tables' memory must take a turn.
  StreamOrder& order() const { return *order_; }
  // Whether a table has not reached its full capacity.
  bool growing() const { return growing_; }

  TableState export_table(int64_t table) const;
  void load_table(int64_t table, const TableState& state);
  void clear_table(int64_t table);
  // Copies the rows with the highest scores into free frames, if a table's rows are in host memory.
  // Called after a load.
  void fill_frames(int64_t table);
  // Values by slot, for the current slots.
  at::Tensor occupied(int64_t table) const;  // bool
  at::Tensor scores(int64_t table) const;    // int64
  // Stored scores, under a policy that stores them, of slots counted from the table's first slot;
  // of all slots by default.
  at::Tensor stored_scores(int64_t table, const std::optional<at::Tensor>& slots) const;
  at::Tensor last_steps(int64_t table) const;  // int64
  at::Tensor ids(int64_t table) const;         // int64; undefined for free slots
  // (ids, last steps as int32) of slots counted from the table's first slot; of all by default.
  std::pair<at::Tensor, at::Tensor> ids_and_steps(int64_t table,
                                                  const std::optional<at::Tensor>& slots) const;
  // (ids, whether the slot is occupied) of slots numbered over the group; int64 and bool.
  std::pair<at::Tensor, at::Tensor> entries_at(const at::Tensor& slots) const;
  // Copies of a table's counts of ids that are not admitted (admission.h), uint8.
  at::Tensor counts(int64_t table) const;
  void load_counts(int64_t table, const at::Tensor& counts);
  // Copies of a table's memory of evicted ids (evicted_memory.h), int16: marks, then counts.
  at::Tensor evicted_marks(int64_t table) const;
  void load_evicted_marks(int64_t table, const at::Tensor& marks);
  // Occupied slots of each table, int64 [tables], on the device.
  at::Tensor sizes() const;
  int64_t hbm_bytes(int64_t table) const;
  int64_t host_bytes(int64_t table) const;

  // Growth. growth_schedule.cpp decides when tables grow; table_growth.cpp makes them grow. A table
  // below its full capacity doubles before its entries take more than 7/8 of its slots. This only
  // changes the slots of entries. These functions wait for the device if a table grows or may have
  // to, and throw during the capture of a CUDA graph.

  // Called before the ids of a batch are inserted, and before the turn of that call. first_bags:
  // the number of each feature's first bag, then the number of all bags; ignored without offsets.
  void make_room(const hash_table::Batch& batch, const at::Tensor& ids,
                 const std::optional<at::Tensor>& offsets, at::IntArrayRef first_bags);
  // Called before n entries are put into a table with room, and before the turn of that call.
  void expect_entries(int64_t table, int64_t n);
  // Grows a table now, so that it takes this many rows without further growth. Called, like the
  // next function, in the turn of a call that writes everything.
  void reserve(int64_t table, int64_t rows);
  // Grows a table to the geometry of a file, if it can have it.
  bool reserve_buckets(int64_t table, int64_t num_buckets, int64_t bucket_slots);
  // Splits all buckets that have not been split yet.
  void finish_growth();
  // Whether a table has such buckets. Files can't describe the order of its slots then.
  bool splitting() const;
  int64_t present_slots(int64_t table) const;
  int64_t full_slots(int64_t table) const;
  // Number of times that growth has changed slots. Slots found at another value are stale.
  int64_t growths() const { return growths_; }
  // Number of calls that have freed slots, other than the regular removal of old entries in calls
  // that look up ids.
  int64_t removals() const { return removals_; }
  void note_removal() { ++removals_; }
  // A new pin, with the current number of growths until a lookup finds slots.
  std::shared_ptr<Pin> pin() const;

 private:
  TableGroup(std::vector<TableConfig> configs, std::vector<int64_t> feature_tables,
             OptimizerConfig optimizer, std::optional<int64_t> state_dim, at::Device device,
             const AvailableMemory& available);

  void check_index(int64_t table) const;
  int64_t state_width_of(const TableConfig& config) const;
  TableLayout layout(const TableConfig& config) const;
  void check_memory(const AvailableMemory& available) const;
  hash_table::TableView make_view(int64_t table) const;
  // Rows or states of the current slots, in HBM or host memory; [slots, width].
  at::Tensor present_vectors(int64_t table, bool states) const;
  // Stores ids and last steps on a GPU, whose digests already mark the slots of these ids.
  void load_entries(int64_t table, const at::Tensor& ids, const at::Tensor& last_steps);
  // Called before a table grows to this many buckets. If rows must be in host memory then, moves
  // them there, and its view has no frames. Returns whether rows were moved.
  bool move_rows_to_host(int64_t table, int64_t num_buckets);
  hash_table::TableView view_without_frames(int64_t table) const;
  void upload_views();
  void make_aging();
  void make_frame_moves();

  int64_t buckets_for(int64_t table, int64_t entries) const;
  std::vector<int64_t> count_new(const hash_table::Batch& batch, const at::Tensor& ids,
                                 const std::optional<at::Tensor>& offsets,
                                 at::IntArrayRef first_bags) const;
  // The tables that may be too small for n more ids, according to the host's bounds.
  std::vector<int64_t> expect_ids(int64_t n);
  // Grows tables for a batch. Returns the sizes of all tables, including the batch's ids.
  std::vector<int64_t> check_and_grow(const hash_table::Batch& batch, const at::Tensor& ids,
                                      const std::optional<at::Tensor>& offsets,
                                      at::IntArrayRef first_bags,
                                      const std::vector<int64_t>& tables);
  void grow(int64_t table, int64_t num_buckets);
  void grow_on_gpu(int64_t table, int64_t num_buckets);
  // Backs memory for this number of buckets.
  void back(int64_t table, int64_t num_buckets);
  // The counter of misses of a table on a CPU.
  int64_t misses(int64_t table) const;
  // Begins to double a table on a CPU: from now on it has twice as many buckets, and all of its old
  // buckets must be split. The memory must be backed.
  void begin_split(int64_t table);
  // Splits buckets until `unsplit` of them remain.
  void split(int64_t table, int64_t unsplit);
  void finish_split(int64_t table);
  // Splits some buckets of each table that is doubling. sizes: the number of entries of each table
  // after this call's insertions, or empty if they have not been counted.
  void split_some(const std::vector<int64_t>& sizes);
  // Called after slots have moved: uploads the views and counts a growth.
  void note_growth();
  // The fewest buckets with which all ids of a state are found in their slots, or all buckets.
  int64_t loaded_buckets(int64_t table, const at::Tensor& ids, const at::Tensor& occupied) const;
  // Sets the number of buckets of a table that will be overwritten; it may decrease.
  void begin_load(int64_t table, int64_t num_buckets);
  // The counts (int64) or last steps (int32) of these slots; of all slots if `slots` is null. For
  // tables with CountedSteps.
  at::Tensor read_counted(int64_t table, const std::optional<at::Tensor>& slots, bool counts) const;
  void write_counted(int64_t table, const at::Tensor& last_steps, const at::Tensor& counts);

  std::vector<TableConfig> configs_;
  std::vector<int64_t> feature_table_list_;
  OptimizerConfig optimizer_;
  at::Device device_;
  std::vector<TableMemory> memory_;
  std::vector<int64_t> first_slots_;
  int64_t num_slots_ = 0;
  int64_t total_dim_ = 0;
  std::optional<int64_t> state_dim_;
  hash_table::GroupShape shape_{.widest = 0, .four_wide = true, .float32_rows = true};
  bool needs_scores_ = false;
  hash_table::FrameMoves frame_moves_;
  bool remembers_evicted_ = false;
  bool restores_counts_ = false;
  bool simulates_ = false;
  bool packed_ = false;  // whether ids and last steps of the only table are packed
  bool deterministic_ = false;
  hash_table::NewRows initial_rows_ = hash_table::NewRows::kUniform;
  std::vector<hash_table::TableView> host_views_;
  std::unique_ptr<GroupAdmission> admission_;
  GroupHostWords host_words_;
  at::Tensor refused_;               // int32 [1], see Batch; undefined on a CPU
  std::vector<at::Tensor> evicted_;  // int16, of each table's EvictedMemory, or empty
  at::Tensor expire_after_;          // int32 [tables], on the device
  hash_table::Aging aging_;
  at::Tensor counters_;         // int64 [tables, kNumCounters]
  at::Tensor optimizer_steps_;  // int64 [tables]
  at::Tensor aged_lfu_;         // see aged_lfu()
  at::Tensor miniature_tally_;
  std::vector<at::Tensor> miniature_entries_;  // int32; empty if the table has none
  at::Tensor views_;                           // bytes of TableView[tables], on the device
  at::Tensor feature_tables_;                  // int32, on the device
  at::Tensor feature_columns_;                 // int32, on the device
  int64_t handle_ = 0;

  // The host's knowledge of a growing table. Changed in turns of order().
  struct Growth {
    int64_t max_entries = 0;         // upper bound on the number of entries
    int64_t checks = 0;              // consecutive calls that read the size
    int64_t counted = 0;             // number of entries when they were counted last
    int64_t misses = 0;              // counter of misses at that time
    int64_t misses_before_last = 0;  // counter of misses before the last call, while it splits
  };
  std::vector<Growth> growth_;
  std::atomic<bool> growing_ = false;  // whether a table is below its full capacity
  std::atomic<int64_t> growths_ = 0;
  std::atomic<int64_t> removals_ = 0;

  std::shared_ptr<GroupClock> clock_;
  std::unique_ptr<StreamOrder> order_;  // last member, destroyed before the memory
};

// Holds a growing group alone, from the call that makes room for ids to the call that inserts them.
// Otherwise a thread that reads the size of the tables would miss the ids of another thread that
// has made room but not inserted yet.
class HoldToGrow {
 public:
  explicit HoldToGrow(const TableGroup& group)
      : order_(group.growing() ? &group.order() : nullptr) {
    if (order_ != nullptr) order_->hold(Hold::kExclusive);
  }
  ~HoldToGrow() {
    if (order_ != nullptr) order_->release(Hold::kExclusive);
  }
  HoldToGrow(const HoldToGrow&) = delete;
  HoldToGrow& operator=(const HoldToGrow&) = delete;

 private:
  StreamOrder* const order_;
};

}  // namespace torchrec_hkv::runtime
