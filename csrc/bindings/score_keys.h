// Scores as callers give and get them, and as tables keep them. Kernels compare 64 bits without a
// sign. Under 'customized' a score is any int64, so that a table keeps it with its sign bit
// inverted, which orders the bits as the numbers. Under the frequency policies a score that is
// given is a count of at least 0. All other scores are kept as they are.
#pragma once

#include <optional>
#include <vector>

#include "bindings/table_group.h"
#include "bindings/tensor.h"

namespace torchrec_hkv::bindings {

// Inverts the sign bits.
at::Tensor inverted_sign(const at::Tensor& scores);

// What kernels are given for the scores of a call's ids. first_bags and offsets say which ids are
// of which feature, as in TableGroup::make_room. Refuses counts below 0 on a CPU; on a GPU, where
// looking would wait for the device, they count as 0.
at::Tensor keys_of_given(const TableGroup& group, const at::Tensor& scores,
                         const std::optional<at::Tensor>& offsets, at::IntArrayRef first_bags);

// Scores for callers, from keys of the slots, or of entries of these tables (int32, by position;
// undefined: all of the group's only table).
at::Tensor scores_of_slots(const TableGroup& group, const at::Tensor& keys,
                           const at::Tensor& slots);
at::Tensor scores_of_tables(const TableGroup& group, const at::Tensor& keys,
                            const at::Tensor& tables);

// The same between the keys and the scores of one table, in either direction.
at::Tensor converted(const TableGroup& group, int64_t table, const at::Tensor& scores);

}  // namespace torchrec_hkv::bindings
