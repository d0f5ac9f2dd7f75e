// The tables of a group with their memory: what kernels see as TableView, as a Python object.
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

// What tables may take, in bytes, and what there is at all.
struct AvailableMemory {
  int64_t hbm_free;
  int64_t hbm_total;
  int64_t host_free;
  int64_t host_total;
};

// One table's arrays, for export and load; first dimension the slots of the full capacity, but for
// the last.
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
  // Makes empty tables. feature_tables: the table of each feature, in the order of the output.
  // state_dim: fp32 values of state a row keeps; by default what the optimizer needs. Throws
  // ValueError, before anything is allocated, where the tables need more than is available.
  static std::shared_ptr<TableGroup> make(std::vector<TableConfig> configs,
                                          std::vector<int64_t> feature_tables,
                                          OptimizerConfig optimizer,
                                          std::optional<int64_t> state_dim, at::Device device,
                                          const AvailableMemory& available);
  ~TableGroup();
  TableGroup(const TableGroup&) = delete;
  TableGroup& operator=(const TableGroup&) = delete;

  // Ops name a group by a number, since the dispatcher takes no other objects. Throws ValueError
  // for a number that no living group has.
  static std::shared_ptr<TableGroup> from_handle(int64_t handle);
  int64_t handle() const { return handle_; }

  at::Device device() const { return device_; }
  const OptimizerConfig& optimizer() const { return optimizer_; }
  int64_t num_tables() const { return static_cast<int64_t>(configs_.size()); }
  int64_t num_features() const { return static_cast<int64_t>(feature_table_list_.size()); }
  int64_t total_dim() const { return total_dim_; }
  int64_t feature_table(int64_t feature) const { return feature_table_list_.at(feature); }
  int64_t feature_dim(int64_t feature) const { return configs_[feature_table(feature)].dim; }
  // Of all tables at their full capacities. Slot numbers are below this.
  int64_t num_slots() const { return num_slots_; }
  const hash_table::GroupShape& shape() const { return shape_; }
  // What the device says of updates; null on a CPU.
  hash_table::UpdateHint* update_hint() const { return host_words_.update_hint(); }
  // Has the kernels of a batch say here if they can't follow its offsets. On a CPU nothing.
  void watch_offsets(hash_table::Batch* batch) const;
  // Throws ValueError if a GPU has said so since this was last called. Does not wait for it.
  void check_bad_offsets() const;
  // Whether one of the tables has rows in host memory and frames for them, or will have.
  bool has_frames() const { return moving_rows_.any(); }
  const hash_table::MovingRows& moving_rows() const { return moving_rows_; }
  // Whether one of the tables remembers what it evicts.
  bool remembers_evicted() const { return remembers_evicted_; }
  // Whether one gives counts back to ids that return.
  bool restores_counts() const { return restores_counts_; }
  // Whether a call's result is to follow from the calls alone: one of the tables wants it, or
  // torch.use_deterministic_algorithms does, when the call is made.
  bool deterministic() const;
  // Whether one of the tables needs a score with every id; whether one takes any.
  bool needs_scores() const { return needs_scores_; }
  bool takes_scores() const;
  // Whether one takes scores as they are given.
  bool has_customized() const;
  const at::Tensor& counters() const { return counters_; }
  // What a new id's row is initialised to, in all tables.
  hash_table::NewRows initial_rows() const { return initial_rows_; }
  // Updates of each table so far, int64 [tables], on the device.
  const at::Tensor& optimizer_steps() const { return optimizer_steps_; }
  const GroupAdmission& admission() const { return *admission_; }
  const hash_table::Aging& aging() const { return aging_; }
  // hash_table::AgedLfu of each table, float64 [tables, 7], on the device; zeros under other
  // policies.
  const at::Tensor& aged_lfu() const { return aged_lfu_; }
  // hash_table::MiniatureTally of each table, int64 [tables, 14], and their entries, on the device.
  const at::Tensor& miniature_tally() const { return miniature_tally_; }
  const std::vector<at::Tensor>& miniature_entries() const { return miniature_entries_; }
  // Whether one of the tables has miniatures.
  bool simulates() const { return simulates_; }
  // AgedLfu::c of a table under kAgedLfu, from the next call on. Does not wait for the device.
  void set_aging(int64_t table, double c);
  // Forgets what a table has measured for its half-life but for so many lookups in so many steps.
  // c: where the table chooses its own, the first; -1: as it was made.
  void restart_aging(int64_t table, double lookups = 0, double steps = 0, double c = -1);
  // GroupClock::set.
  void set_clock(int64_t now);

  // On the group's device.
  const hash_table::TableView* views() const;
  // In host memory, its pointers on the group's device.
  const hash_table::TableView& view(int64_t table) const;
  // The same, where the group has one table and one feature; otherwise null. For calls that are not
  // captured in a CUDA graph while the table may grow: those that insert.
  const hash_table::TableView* only_view_now() const {
    return num_tables() == 1 && num_features() == 1 ? &host_views_[0] : nullptr;
  }
  // The same for other calls: null too while the table may grow, since a graph would keep the view
  // that it was captured with.
  const hash_table::TableView* only_view() const { return growing_ ? nullptr : only_view_now(); }
  at::ScalarType row_dtype(int64_t table) const;
  // The view of a group's only table, in host memory; null where there are several.
  const hash_table::TableView* only_table() const {
    return num_tables() == 1 ? &host_views_[0] : nullptr;
  }
  // Of rows that calls are given and give back, of any of the tables (hash_table/row_matrix.h).
  RowType matrix_type() const;
  at::ScalarType matrix_dtype() const;
  int32_t widest_state() const;
  const int32_t* feature_tables() const { return feature_tables_.const_data_ptr<int32_t>(); }
  const int32_t* feature_columns() const { return feature_columns_.const_data_ptr<int32_t>(); }

  // Counts the calls that touch rows, and holds their pins.
  GroupClock& clock() const { return *clock_; }
  // Orders calls on several streams. Callers of what touches the tables' memory take their turn.
  StreamOrder& order() const { return *order_; }
  // Whether a table has not its full capacity.
  bool growing() const { return growing_; }

  TableState export_table(int64_t table) const;
  void load_table(int64_t table, const TableState& state);
  void clear_table(int64_t table);
  // Where a table's rows are in host memory, those of the highest rank come into frames that are
  // free, as they are after it was loaded.
  void fill_frames(int64_t table);
  // By slot, of the slots that there are at present.
  at::Tensor occupied(int64_t table) const;    // bool
  at::Tensor scores(int64_t table) const;      // int64
  at::Tensor last_steps(int64_t table) const;  // int64
  at::Tensor ids(int64_t table) const;         // int64; of free slots they mean nothing
  // (ids, last steps as int32) of slots, counted from the table's first; no slots: of all.
  std::pair<at::Tensor, at::Tensor> ids_and_steps(int64_t table,
                                                  const std::optional<at::Tensor>& slots) const;
  // (ids, whether there is an entry) of slots that are numbered through the group; int64 and bool.
  std::pair<at::Tensor, at::Tensor> entries_at(const at::Tensor& slots) const;
  // Copies of a table's counts of ids that are not admitted (admission.h), uint8.
  at::Tensor counts(int64_t table) const;
  void load_counts(int64_t table, const at::Tensor& counts);
  // Copies of what a table remembers of evicted ids (evicted_memory.h), int16: marks, and behind
  // them counts.
  at::Tensor evicted_marks(int64_t table) const;
  void load_evicted_marks(int64_t table, const at::Tensor& marks);
  // Occupied slots of each table, int64 [tables], on the device.
  at::Tensor sizes() const;
  int64_t hbm_bytes(int64_t table) const;
  int64_t host_bytes(int64_t table) const;

  // Growth, in table_growth.cpp. A table that has not its full capacity doubles before its entries
  // take more than 7/8 of its slots. Then its slots are others than before; nothing else changes.
  // Waits for the device where a table grows or may have to, and throws where a CUDA graph is being
  // captured.

  // Before the ids of a batch are inserted, and before their call's turn. first_bags: number of
  // each feature's first bag, and that of all bags; where there are no offsets nothing.
  void make_room(const hash_table::Batch& batch, const at::Tensor& ids,
                 const std::optional<at::Tensor>& offsets, at::IntArrayRef first_bags);
  // Before n entries are put into a table that has room for them, and before their call's turn.
  void expect_entries(int64_t table, int64_t n);
  // Grows a table now, so that it takes so many rows without growing. In the turn of a call that
  // writes everything, as the next.
  void reserve(int64_t table, int64_t rows);
  // The same, to the geometry of a file, if the table can have it.
  bool reserve_buckets(int64_t table, int64_t num_buckets, int64_t bucket_slots);
  int64_t present_slots(int64_t table) const;
  int64_t full_slots(int64_t table) const;
  // How often slots have changed by growth: slots that were found at another number are stale.
  int64_t growths() const { return growths_; }
  // A new pin, whose slots are those of now until a lookup finds them.
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
  // Rows or states of the slots that there are, wherever they are; [slots, width].
  at::Tensor present_vectors(int64_t table, bool states) const;
  // On a GPU, once the digests are those of the slots with these ids.
  void load_entries(int64_t table, const at::Tensor& ids, const at::Tensor& last_steps);
  // Before a table grows to so many buckets: where it then has its rows in host memory they go
  // there, and its view has no frames. Returns whether that is so.
  bool bring_home(int64_t table, int64_t num_buckets);
  hash_table::TableView view_at_home(int64_t table) const;
  void upload_views();
  void make_aging();
  void make_moving_rows();

  int64_t buckets_for(int64_t table, int64_t entries) const;
  std::vector<int64_t> count_new(const hash_table::Batch& batch, const at::Tensor& ids,
                                 const std::optional<at::Tensor>& offsets,
                                 at::IntArrayRef first_bags) const;
  // The tables that may get too full by n more ids, for all that the host knows.
  std::vector<int64_t> expect_ids(int64_t n);
  void look_and_grow(const hash_table::Batch& batch, const at::Tensor& ids,
                     const std::optional<at::Tensor>& offsets, at::IntArrayRef first_bags,
                     const std::vector<int64_t>& tables);
  void grow(int64_t table, int64_t num_buckets);
  // The fewest buckets in which all of a state's ids stand where they are found, or all.
  int64_t loaded_buckets(int64_t table, const at::Tensor& ids, const at::Tensor& occupied) const;
  // Gives a table that is going to be overwritten so many buckets, be they fewer than it has.
  void begin_load(int64_t table, int64_t num_buckets);

  std::vector<TableConfig> configs_;
  std::vector<int64_t> feature_table_list_;
  OptimizerConfig optimizer_;
  at::Device device_;
  std::vector<TableMemory> memory_;
  std::vector<int64_t> first_slots_;
  int64_t num_slots_ = 0;
  int64_t total_dim_ = 0;
  std::optional<int64_t> state_dim_;
  hash_table::GroupShape shape_{0, true, true, true};
  bool needs_scores_ = false;
  hash_table::MovingRows moving_rows_;
  bool remembers_evicted_ = false;
  bool restores_counts_ = false;
  bool simulates_ = false;
  bool packed_ = false;  // whether ids and last steps are, of the only table
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
  std::vector<at::Tensor> miniature_entries_;  // int32; empty: the table has none
  at::Tensor views_;                           // bytes of TableView[tables], on the device
  at::Tensor feature_tables_;                  // int32, on the device
  at::Tensor feature_columns_;                 // int32, on the device
  int64_t handle_ = 0;

  // What the host knows of a table that grows. Changed in turns of order().
  struct Growth {
    int64_t most_entries = 0;  // it has no more
    int64_t looks = 0;         // calls in a row that had to look
  };
  std::vector<Growth> growth_;
  std::atomic<bool> growing_ = false;  // whether a table has not its full capacity
  std::atomic<int64_t> growths_ = 0;

  std::shared_ptr<GroupClock> clock_;
  std::unique_ptr<StreamOrder> order_;  // last: its end comes before the memory's
};

// Holds a group that may still grow alone, from the call that makes room for ids to the one that
// inserts them: another thread's ids, for which there is room but which are not there yet, would be
// forgotten by who looks how full the tables are.
class HoldToGrow {
 public:
  explicit HoldToGrow(const TableGroup& group)
      : order_(group.growing() ? &group.order() : nullptr) {
    if (order_ != nullptr) order_->hold(Hold::kAlone);
  }
  ~HoldToGrow() {
    if (order_ != nullptr) order_->release(Hold::kAlone);
  }
  HoldToGrow(const HoldToGrow&) = delete;
  HoldToGrow& operator=(const HoldToGrow&) = delete;

 private:
  StreamOrder* const order_;
};

}  // namespace torchrec_hkv::runtime
