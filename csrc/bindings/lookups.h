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
  const at::ScalarType dtype;  // of the output
  const RowType type;          // the same
};

// How rows are pooled: weights (may be null) are float32, one for each id, on the group's device.
// Throws TypeError or ValueError.
hash_table::Pooling make_pooling(const TableGroup& group, const std::optional<at::Tensor>& weights,
                                 bool mean, const at::Tensor& ids);

// Throws unless learning_rate is one float32 on the group's device. Returns its address there.
const float* learning_rate_of(const TableGroup& group, const at::Tensor& learning_rate);

// Slots of a batch's ids; missing ids are inserted. pin: null without a backward. scores: int64,
// one for each id, for tables under 'customized'; in other tables an id counts once. Throws
// ValueError or TypeError if scores are missing or not needed; nothing has changed then. found (may
// be null): one for each id, on the group's device: whether it was in its table before.
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

// slots: the present slots of the batch's ids. groups: whether to group positions for an update;
// GPU only.
PooledRows pool_rows(const TableGroup& group, const LookupBatch& batch, const at::Tensor& slots,
                     const Use& use, bool groups);

}  // namespace torchrec_hkv::bindings
