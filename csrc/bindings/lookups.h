// What a lookup of a group is made of, for the ops and for their autograd formulas.
#pragma once

#include <memory>
#include <optional>

#include "runtime/batch.h"
#include "runtime/table_group.h"
#include "runtime/tensor.h"

namespace torchrec_hkv::bindings {
using namespace runtime;

// A lookup's batch and what it is pooled to, checked. The tensors that it is made of must outlive
// it. Throws TypeError or ValueError.
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

// Throws unless it is one float32 on the group's device; where its value is there.
const float* learning_rate_of(const TableGroup& group, const at::Tensor& learning_rate);

// Slots of a batch's ids, the missing ones inserted. pin: null where no backward is to come.
// scores: int64, one for each id, which tables under 'customized' read; elsewhere an id counts
// once. Throws ValueError or TypeError where a table needs scores and there are none, and the other
// way round; nothing has changed then.
at::Tensor insert_missing(TableGroup& group, const at::Tensor& ids, const at::Tensor& offsets,
                          const BagLayout& layout, const hash_table::Batch& batch,
                          const std::shared_ptr<Pin>& pin, const std::optional<at::Tensor>& scores);

// Pooled rows, and on a GPU positions that were grouped beside for the update: see
// pooled_lookup_grouped. The last two are undefined where nothing was grouped.
struct PooledRows {
  at::Tensor rows;
  at::Tensor grouped;
  at::Tensor ways;
};

// slots: of the batch's ids as they are now. groups: whether to group for an update to come, which
// is for a GPU.
PooledRows pool_rows(const TableGroup& group, const LookupBatch& batch, const at::Tensor& slots,
                     const Use& use, bool groups);

}  // namespace torchrec_hkv::bindings
