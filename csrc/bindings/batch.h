// The ids of a call, checked.
#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <optional>

#include "bindings/table_group.h"

namespace torchrec_hkv::bindings {

// Where a gradient must begin on a GPU, whose kernels read four columns at a time.
constexpr uintptr_t kGradAlignment = 16;

// offsets: none for one bag of all ids, where the group has one feature. rounds: how often the
// group's features come; where more than once, the caller sets their tables and columns. Throws
// TypeError or ValueError before anything is read.
hash_table::Batch make_batch(const TableGroup& group, const at::Tensor& ids,
                             const std::optional<at::Tensor>& offsets, int64_t batch_size,
                             int64_t rounds = 1);

// Memory that find_or_insert works in on a GPU; empty on a CPU. scored: whether scores are given.
at::Tensor insert_scratch(const TableGroup& group, const at::Tensor& ids,
                          const hash_table::Placement& placement, bool scored);

}  // namespace torchrec_hkv::bindings
