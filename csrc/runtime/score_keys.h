// Scores as callers give and get them, and as tables keep them. Kernels compare 64 bits without a
// sign. Under 'customized' a score is any int64, so that a table keeps it with its sign bit
// inverted, which orders the bits as the numbers. Under the frequency policies a score that is
// given is a count of at least 0. All other scores are kept as they are.
#pragma once

#include <optional>
#include <vector>

#include "runtime/table_group.h"
#include "runtime/tensor.h"

namespace torchrec_hkv::runtime {

// Inverts the sign bits.
at::Tensor inverted_sign(const at::Tensor& scores);

// What kernels are given for the scores of a call's ids. first_bags and offsets say which ids are
// of which feature, as in TableGroup::make_room. Refuses counts below 0 on a CPU; on a GPU, where
// looking would wait for the device, they count as 0.
at::Tensor keys_of_given(const TableGroup& group, const at::Tensor& scores,
                         const std::optional<at::Tensor>& offsets, at::IntArrayRef first_bags);

// Likewise for a training lookup: tables under 'customized' read the scores, and under the
// frequency policies each id counts once. Undefined where no table is 'customized'. Throws
// TypeError or ValueError for scores of another dtype, device or length, for missing and for
// needless ones.
at::Tensor keys_of_lookup(const TableGroup& group, const std::optional<at::Tensor>& scores,
                          int64_t num_ids, const at::Tensor& offsets, at::IntArrayRef first_bags);

// The keys, for kernels; null where they are undefined.
const uint64_t* data_of(const at::Tensor& keys);

// Of several scores that a call gives for one slot, the last stays under 'customized': on a CPU,
// and on a GPU where the group is deterministic. After the call has touched the slots, and in its
// turn. keys: as kernels get them; null where none are given.
void keep_last_scores(const TableGroup& group, const at::Tensor& slots, const uint64_t* keys);

// Scores for callers, from keys of the slots, or of entries of these tables (int32, by position;
// undefined: all of the group's only table).
at::Tensor scores_of_slots(const TableGroup& group, const at::Tensor& keys,
                           const at::Tensor& slots);
at::Tensor scores_of_tables(const TableGroup& group, const at::Tensor& keys,
                            const at::Tensor& tables);

// The same between the keys and the scores of one table, in either direction.
at::Tensor converted(const TableGroup& group, int64_t table, const at::Tensor& scores);

}  // namespace torchrec_hkv::runtime
