// Entries that an insertion on the GPU returns.
#pragma once

#include <cstdint>

#include "hash_table/cuda/bucket.cuh"
#include "hash_table/cuda/row_matrix.cuh"

namespace torchrec_hkv::hash_table::cuda {

// Returns an id that was not placed, and its given row. By one thread.
__device__ __forceinline__ void give_back(const Placement& placement, const TableView& table,
                                          const TableView* tables, const Batch& batch,
                                          const Visit& visit, int64_t position) {
  const Leavers& leavers = placement.leavers;
  const RowMatrix& given = placement.given_rows;
  const auto at =
      static_cast<int64_t>(atomicAdd(reinterpret_cast<unsigned long long*>(leavers.number), 1ull));
  leavers.ids[at] = batch.ids[position];
  leavers.scores[at] =
      first_score(table.eviction, visit.now(), visit.epoch(), visit.given(position));
  if (leavers.tables != nullptr) leavers.tables[at] = static_cast<int32_t>(&table - tables);
  copy_to_matrix<1>(leavers.rows, at, given.type, given.at(position), table.dim(), 0);
}

}  // namespace torchrec_hkv::hash_table::cuda
