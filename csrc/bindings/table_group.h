// The tables of a group with their memory: what kernels see as TableView, as a Python object.
#pragma once

#include <ATen/ATen.h>

#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "bindings/group_admission.h"
#include "bindings/initial_rows.h"
#include "common/optimizers.h"
#include "hash_table/geometry.h"
#include "hash_table/table_view.h"

namespace torchrec_hkv::bindings {

struct TableConfig {
  std::string name;
  int64_t capacity;
  int64_t dim;
  int64_t column_offset;
  Eviction eviction;
  RowType row_type;
  uint64_t seed;  // already mixed with the table's name
  InitialConfig initial;
  int64_t hbm_slots;  // rows and states of the slots from here on lie in host memory; CUDA only
  AdmissionConfig admission;
  int64_t expire_after;  // calls; 0: entries don't expire
};

// One table's arrays, for export and load; first dimension num_slots.
struct TableState {
  at::Tensor occupied;    // bool
  at::Tensor ids;         // int64
  at::Tensor rows;        // [., dim]
  at::Tensor states;      // float32 [., state width]
  at::Tensor last_steps;  // int32
  at::Tensor scores;      // int64, empty under LRU
};

class TableGroup {
 public:
  // Makes empty tables. feature_tables: the table of each feature, in the order of the output.
  // state_dim: fp32 values of state a row keeps; by default what the optimizer needs.
  static std::shared_ptr<TableGroup> make(std::vector<TableConfig> configs,
                                          std::vector<int64_t> feature_tables,
                                          OptimizerConfig optimizer,
                                          std::optional<int64_t> state_dim, at::Device device);
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
  int64_t num_slots() const { return num_slots_; }
  bool four_wide() const { return four_wide_; }
  // Whether one of the tables needs a score with every id.
  bool needs_scores() const { return needs_scores_; }
  const at::Tensor& counters() const { return counters_; }
  const GroupAdmission& admission() const { return *admission_; }
  // By table; 0: its entries don't expire.
  const std::vector<uint32_t>& expire_after() const { return expire_after_; }
  const uint32_t* expire_after_on_device() const {
    return reinterpret_cast<const uint32_t*>(expire_after_on_device_.const_data_ptr<int32_t>());
  }

  // On the group's device.
  const hash_table::TableView* views() const;
  // In host memory, its pointers on the group's device.
  const hash_table::TableView& view(int64_t table) const;
  // The same, where the group has one table and one feature; otherwise null.
  const hash_table::TableView* only_view() const {
    return num_tables() == 1 && num_features() == 1 ? &host_views_[0] : nullptr;
  }
  at::ScalarType row_dtype(int64_t table) const;
  const int32_t* feature_tables() const { return feature_tables_.const_data_ptr<int32_t>(); }
  const int32_t* feature_columns() const { return feature_columns_.const_data_ptr<int32_t>(); }

  // The number of the next training step. Steps start at 1.
  int64_t begin_step();
  // A pinned step's rows are not evicted until it is released.
  void pin(int64_t step);
  void release(int64_t step);
  // A call at a step that was begun; scores null.
  hash_table::Visit visit(int64_t now) const;

  TableState export_table(int64_t table) const;
  void load_table(int64_t table, const TableState& state);
  void clear_table(int64_t table);
  at::Tensor occupied(int64_t table) const;    // bool [num_slots]
  at::Tensor scores(int64_t table) const;      // int64 [num_slots]
  at::Tensor last_steps(int64_t table) const;  // int64 [num_slots]
  at::Tensor ids(int64_t table) const { return memory_.at(table).ids; }
  int64_t clock() const;
  // The last step begun, where another table's contents are loaded. Throws where a backward is
  // still to come: it would write to slots that others have then.
  void set_clock(int64_t clock);
  // Occupied slots of each table, int64 [tables], on the device.
  at::Tensor sizes() const;
  int64_t hbm_bytes(int64_t table) const;
  int64_t host_bytes(int64_t table) const;

 private:
  TableGroup(std::vector<TableConfig> configs, std::vector<int64_t> feature_tables,
             OptimizerConfig optimizer, std::optional<int64_t> state_dim, at::Device device);

  struct Memory {
    hash_table::Geometry geometry;
    at::Tensor digests;     // int16 [num_buckets, 64]
    at::Tensor ids;         // int64 [num_slots]
    at::Tensor last_steps;  // int32 [num_slots]
    at::Tensor scores;      // int64 [num_slots] or empty
    at::Tensor rows;        // [hbm_slots, dim]
    at::Tensor states;
    at::Tensor rows_host;  // [num_slots - hbm_slots, dim], pinned
    at::Tensor states_host;
  };

  void check_index(int64_t table) const;
  Memory allocate(const TableConfig& config) const;
  hash_table::TableView make_view(int64_t table) const;
  void free_all(const Memory& memory) const;

  std::vector<TableConfig> configs_;
  std::vector<int64_t> feature_table_list_;
  OptimizerConfig optimizer_;
  at::Device device_;
  std::vector<Memory> memory_;
  std::vector<int64_t> first_slots_;
  int64_t num_slots_ = 0;
  int64_t total_dim_ = 0;
  int64_t state_width_ = 0;
  bool four_wide_ = true;
  bool needs_scores_ = false;
  std::vector<hash_table::TableView> host_views_;
  std::unique_ptr<GroupAdmission> admission_;
  std::vector<uint32_t> expire_after_;
  at::Tensor expire_after_on_device_;  // int32
  at::Tensor counters_;                // int64 [tables, kNumCounters]
  at::Tensor views_;                   // bytes of TableView[tables], on the device
  at::Tensor feature_tables_;          // int32, on the device
  at::Tensor feature_columns_;         // int32, on the device
  int64_t handle_ = 0;

  mutable std::mutex mutex_;
  int64_t clock_ = 0;
  std::multiset<int64_t> pinned_;
};

}  // namespace torchrec_hkv::bindings
