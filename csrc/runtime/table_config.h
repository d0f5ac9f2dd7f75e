// The configuration of a table from Python.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

#include "hash_table/table_view.h"
#include "runtime/group_admission.h"
#include "runtime/initial_rows.h"

namespace torchrec_hkv::runtime {

struct TableConfig {
  std::string name;
  int64_t capacity;
  int64_t initial_capacity;  // the table grows from this number of rows to the capacity
  int64_t dim;
  int64_t column_offset;
  Eviction eviction;
  double aging;   // under kAgedLfu: AgedLfu::c (hash_table/aged_lfu.h)
  bool adaptive;  // under kAgedLfu: miniatures choose c (miniatures.h), beginning with `aging`
  RowType row_type;
  uint64_t seed;  // mixed with the table's name
  InitialConfig initial;
  int64_t hbm_slots;       // rows and states in HBM; if there are more slots, these are
                           // frames (hash_table/frames.h), or 0. CUDA only
  bool all_states_in_hbm;  // all states are in HBM, although the rows are not
  AdmissionConfig admission;
  int64_t expire_after;      // calls; 0: entries don't expire
  int64_t remember_evicted;  // ids; 0: none (hash_table/evicted_memory.h)
  bool restore_counts;       // whether ids that return get half of their counts back
  bool deterministic;        // whether results depend on the calls only, even on a GPU
};

// Throws ValueError with the table's name for an invalid config. cuda: whether it is on a GPU.
void check_config(const TableConfig& config, bool cuda);

// Whether the ids and last steps of a group of these tables on a GPU are packed
// (hash_table/packed_entries.h): if the group has one large table under LRU that does not grow.
// Kernels for several tables, and plain finds in tables that may grow, do not support packing. It
// would be slower for them, and with scores.
bool can_be_packed(const std::vector<TableConfig>& configs);
// For tests: sets the number of slots from which on a table is large. Returns the previous number.
int64_t set_packed_from(int64_t slots);

// Whether a table's last steps and counts share words (hash_table/counted_steps.h).
bool is_counted(const TableConfig& config, at::Device device);

// Bytes of the marks that remember evicted ids, and of the miniatures.
int64_t evicted_bytes(const TableConfig& config);
int64_t miniature_bytes(const TableConfig& config);

at::ScalarType scalar_type(RowType type);
// Number of elements of a stored row, of the type above: its columns, or the bytes of an int8 row
// (common/dtypes.h).
int64_t stored_width(const TableConfig& config);

}  // namespace torchrec_hkv::runtime
