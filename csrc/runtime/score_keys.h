// Converts scores between callers and tables. Kernels compare 64 bits as unsigned numbers. Under
// 'customized' a score is any int64; the table stores it with an inverted sign bit, which gives the
// bits the order of the numbers. Under the frequency policies a given score is a count of at least
// 0. All other scores are stored unchanged.
#pragma once

#include <optional>
#include <vector>

#include "runtime/table_group.h"
#include "runtime/tensor.h"

namespace torchrec_hkv::runtime {

// Inverts the sign bits.
at::Tensor inverted_sign(const at::Tensor& scores);

// The keys that kernels get for the scores of a call's ids. first_bags and offsets assign ids to
// features, as in TableGroup::make_room. Throws for counts below 0 on a CPU. On a GPU they count as
// 0, because reading them would wait for the device.
at::Tensor keys_of_given(const TableGroup& group, const at::Tensor& scores,
                         const std::optional<at::Tensor>& offsets, at::IntArrayRef first_bags);

// The same for a training lookup. Tables under 'customized' read the scores; under the frequency
// policies each id counts once. The result is undefined if no table is 'customized'. Throws
// TypeError or ValueError for scores of another dtype, device or length, and for missing or
// unneeded scores.
at::Tensor keys_of_lookup(const TableGroup& group, const std::optional<at::Tensor>& scores,
                          int64_t num_ids, const at::Tensor& offsets, at::IntArrayRef first_bags);

// Pointer to the keys for kernels; null if they are undefined.
const uint64_t* data_of(const at::Tensor& keys);

// If a call has several scores for one slot, the last score is kept under 'customized', on a CPU,
// and on a GPU if the group is deterministic. Called after the call has touched the slots, within
// its turn. keys: as for kernels; null without scores.
void keep_last_scores(const TableGroup& group, const at::Tensor& slots, const uint64_t* keys);

// Scores for callers, from the keys of slots, or of entries of the given tables. tables: int32, the
// table of each entry; undefined if the group has one table.
at::Tensor scores_of_slots(const TableGroup& group, const at::Tensor& keys,
                           const at::Tensor& slots);
at::Tensor scores_of_tables(const TableGroup& group, const at::Tensor& keys,
                            const at::Tensor& tables);

// Converts between the keys and the scores of one table, in either direction.
at::Tensor converted(const TableGroup& group, int64_t table, const at::Tensor& scores);

}  // namespace torchrec_hkv::runtime
