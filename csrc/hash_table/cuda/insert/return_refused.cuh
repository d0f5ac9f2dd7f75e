// Entries that an insertion on the GPU returns.
#pragma once

#include <cstdint>

#include "hash_table/cuda/bucket.cuh"
#include "hash_table/cuda/row_matrix.cuh"

namespace torchrec_hkv::hash_table::cuda {

// Returns an id that was not placed, and its given row. By one thread.
__device__ __forceinline__ void return_refused(const Placement& placement, const TableView& table,
                                               const TableView* tables, const Batch& batch,
                                               const CallContext& context, int64_t position) {
  const EvictedEntries& evicted_entries = placement.evicted_entries;
  const RowMatrix& given = placement.given_rows;
  const auto at = static_cast<int64_t>(
      atomicAdd(reinterpret_cast<unsigned long long*>(evicted_entries.number), 1ull));
  evicted_entries.ids[at] = batch.ids[position];
  evicted_entries.scores[at] =
      first_score(table.eviction, context.now(), context.epoch(), context.given(position));
  if (evicted_entries.tables != nullptr)
    evicted_entries.tables[at] = static_cast<int32_t>(&table - tables);
  copy_to_matrix<1>(evicted_entries.rows, at, given.type, given.at(position), table.dim(), 0);
}

}  // namespace torchrec_hkv::hash_table::cuda
