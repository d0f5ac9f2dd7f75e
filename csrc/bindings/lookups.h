// Parts of a group's lookup, for the ops and their autograd formulas.
#pragma once

#include <memory>
#include <optional>

#include "runtime/batch.h"
#include "runtime/table_group.h"
#include "runtime/tensor.h"

namespace torchrec_hkv::bindings {
using namespace runtime;

// The checked batch and output of a lookup. The tensors that it refers to must outlive it. Throws
// TypeError or ValueError.
struct LookupBatch {
  LookupBatch(const TableGroup& group, const at::Tensor& ids, const at::Tensor& offsets,
              const std::optional<at::Tensor>& weights, int64_t batch_size, bool mean,
              at::OptionalIntArrayRef bags, std::optional<at::ScalarType> dtype);

  const at::Tensor& ids;
  const at::Tensor& offsets;
  const BagLayout layout;
  const hash_table::Batch batch;
  const hash_table::Pooling pooling;
  const at::ScalarType dtype;  // dtype of the output
  const RowType type;          // the corresponding type of rows
};

// Describes the pooling. weights: float32, one per id, on the group's device; may be missing.
// Throws TypeError or ValueError.
hash_table::Pooling make_pooling(const TableGroup& group, const std::optional<at::Tensor>& weights,
                                 bool mean, const at::Tensor& ids);

// Returns the device address of learning_rate. Throws unless it is one float32 on the group's
// device.
const float* learning_rate_of(const TableGroup& group, const at::Tensor& learning_rate);

// Returns the slots of a batch's ids, and inserts missing ids. pin: null without a backward.
// scores: int64, one per id, for tables under 'customized'; in other tables an id counts once.
// Throws ValueError or TypeError, before any change, if scores are missing or not needed. found:
// where to write whether each id was in its table before, on the group's device; may be null.
at::Tensor insert_missing(TableGroup& group, const at::Tensor& ids, const at::Tensor& offsets,
                          const BagLayout& layout, const hash_table::Batch& batch,
                          const std::shared_ptr<Pin>& pin, const std::optional<at::Tensor>& scores,
                          bool* found = nullptr);

// Pooled rows, and on a GPU the positions grouped for the update: see pooled_lookup_grouped. The
// last two are undefined without a grouping.
struct PooledRows {
  at::Tensor rows;
  at::Tensor grouped;
  at::Tensor ways;
};

// Pools rows. slots: the current slots of the batch's ids. groups: whether to group positions for
// an update; GPU only.
PooledRows pool_rows(const TableGroup& group, const LookupBatch& batch, const at::Tensor& slots,
                     const AccessSet& use, bool groups);

}  // namespace torchrec_hkv::bindings
