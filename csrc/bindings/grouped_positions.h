// The positions of a batch, grouped by their slots for an update of rows. CUDA only.
#pragma once

#ifdef TORCHREC_HKV_CUDA

#include "common/side_stream.h"
#include "hash_table/kernels.h"
#include "runtime/checks.h"
#include "runtime/table_group.h"
#include "runtime/tensor.h"

namespace torchrec_hkv::bindings {
using namespace runtime;

// Bytes of scratch memory to group the positions of a batch and to update rows.
inline int64_t grouping_bytes(const TableGroup& group, const hash_table::Batch& batch,
                              bool weighted) {
  return static_cast<int64_t>(hash_table::cuda::update_rows_scratch(
      batch.num_ids, batch.num_bags, group.num_slots(), group.shape(), weighted));
}

// The positions of a batch, grouped by their slots.
struct GroupedPositions {
  at::Tensor memory;
  hash_table::cuda::Grouping how;

  // Allocates memory for the positions.
  GroupedPositions(const TableGroup& group, const hash_table::Batch& batch, bool weighted,
                   const at::Tensor& ids)
      : how{} {
    memory = at::empty({grouping_bytes(group, batch, weighted)}, ids.options().dtype(at::kByte));
  }
  // Uses the results of pooled_lookup_grouped.
  GroupedPositions(const TableGroup& group, const hash_table::Batch& batch, bool weighted,
                   const at::Tensor& memory, const at::Tensor& ways)
      : memory(memory), how{} {
    check_dtype(ways, "ways", at::kLong);
    check_device(ways, "ways", at::kCPU);
    check_length(ways, "ways", 1);
    how = {*ways.const_data_ptr<int64_t>() != 0};
    check_dtype(memory, "grouped", at::kByte);
    check_device(memory, "grouped", group.device());
    check_length(memory, "grouped", grouping_bytes(group, batch, weighted));
    TORCH_CHECK_VALUE(memory.is_contiguous(), "grouped must be contiguous.");
  }
  at::Tensor ways() const {
    at::Tensor said = at::empty({1}, at::kLong);
    *said.data_ptr<int64_t>() = how.moved;
    return said;
  }
  void fill(const TableGroup& group, const hash_table::Batch& batch, bool weighted,
            const int64_t* slots, cudaStream_t stream, SideStream* side_stream = nullptr) {
    how = hash_table::cuda::group_positions(group.views(), batch, slots, weighted,
                                            group.num_slots(), group.shape(), group.update_hint(),
                                            memory.data_ptr(), stream, side_stream);
  }
};

}  // namespace torchrec_hkv::bindings

#endif
