// Lists evicted and refused entries of an insertion in the order of the batch. Remembers evicted
// ids.

#include "common/cuda_check.h"
#include "hash_table/admission.h"
#include "hash_table/cuda/bucket.cuh"
#include "hash_table/cuda/insert/insert.cuh"
#include "hash_table/cuda/insert/missing_lists.cuh"
#include "hash_table/cuda/insert/new_row.cuh"
#include "hash_table/cuda/insert/ordered.cuh"
#include "hash_table/cuda/insert/place.cuh"
#include "hash_table/cuda/row_matrix.cuh"

namespace torchrec_hkv::hash_table::cuda {
namespace {

// Lists the positions of evicted and refused entries. unadmitted: those that are not admitted;
// otherwise the others.
__global__ void __launch_bounds__(kListThreads, 2)
    list_evicted_kernel(int64_t n, const int64_t* __restrict__ slots, bool unadmitted,
                        uint64_t* __restrict__ evicted_count,
                        const __grid_constant__ InsertionOrder order) {
  const auto leaves = [&](int64_t position) {
    if (unadmitted) return slots[position] == kNotAdmitted;
    return slots[position] == kNoSlot || order.replaced[position];
  };
  list_in_order(
      n, take_block(order.blocks), order.blocks, leaves,
      [&](uint32_t place, int64_t position) {
        order.listed()[place] = static_cast<uint32_t>(position);
      },
      [&](uint32_t number) {
        *order.num_evicted = number;
        *order.evicted_before = *evicted_count;
        *evicted_count += number;
      });
}

// One tile for each entry.
__global__ void __launch_bounds__(kThreads)
    write_evicted_kernel(const TableView* __restrict__ tables, const Batch batch,
                         const CallContext context, const Placement placement,
                         const int64_t* __restrict__ slots,
                         const __grid_constant__ InsertionOrder order) {
  const EvictedEntries& evicted_entries = placement.evicted_entries;
  const RowMatrix& is_valid = placement.given_rows;
  const uint32_t number = *order.num_evicted;
  const int lane = threadIdx.x % kTile;
  const uint32_t stride = gridDim.x * (kThreads / kTile);
  for (uint32_t i = (blockIdx.x * kThreads + threadIdx.x) / kTile; i < number; i += stride) {
    const int64_t position = order.listed()[i];
    const int64_t to = static_cast<int64_t>(*order.evicted_before) + i;
    const bool was_evicted = slots[position] >= 0;  // this position's id replaced an entry
    const TableView& table = table_at(tables, batch, position);
    if (lane == 0) {
      if (evicted_entries.tables != nullptr)
        evicted_entries.tables[to] = static_cast<int32_t>(&table - tables);
      evicted_entries.ids[to] = was_evicted ? order.evicted_ids[position] : batch.ids[position];
      evicted_entries.scores[to] = was_evicted
                                       ? order.evicted_scores[position]
                                       : first_score(table.eviction, context.now(), context.epoch(),
                                                     context.given(position));
    }
    copy_to_matrix<kTile>(
        evicted_entries.rows, to, was_evicted ? table.rows.type : is_valid.type,
        was_evicted ? table.row(slots[position] - table.first_slot) : is_valid.at(position),
        table.dim(), lane);
  }
}

// The entry that the id with this number has replaced.
struct EvictedMark {
  const TableView* table;
  EvictedMemory::MarkPosition to;
  bool is_valid = false;  // whether its table remembers it

  __device__ EvictedMark(const TableView* tables, const Batch& batch, const InsertionOrder& order,
                         uint32_t number) {
    if (order.outcomes[number] != kReplaced) return;
    const int64_t position = order.positions[number];
    table = &table_at(tables, batch, position);
    is_valid = table->evicted.marks != nullptr;
    if (is_valid) to = table->evicted.mark_position(order.evicted_ids[position]);
  }
  // Whether both write the same entry.
  __device__ bool same_entry(const EvictedMark& other) const {
    return table == other.table && to.entry == other.to.entry;
  }
};

__global__ void __launch_bounds__(kThreads) clear_claims_kernel(const MissingLists missing) {
  if (*missing.number == 0) return;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i <= missing.mask;
       i += static_cast<int64_t>(gridDim.x) * kThreads) {
    missing.table[i] = 0;
  }
}

// Reuses the scratch table. For each written entry of an EvictedMemory, it holds 1 + the number of
// the last id that writes it. kClaim: enters the ids; otherwise the last id writes its mark.
template <bool kClaim>
__global__ void __launch_bounds__(kThreads)
    remember_kernel(const TableView* __restrict__ tables, const Batch batch,
                    const MissingLists missing, const __grid_constant__ InsertionOrder order) {
  if (*missing.number == 0) return;
  const uint32_t number = *order.number;
  for (uint32_t i = blockIdx.x * kThreads + threadIdx.x; i < number; i += gridDim.x * kThreads) {
    const EvictedMark mark(tables, batch, order, i);
    if (!mark.is_valid) continue;
    const uint32_t begin = scratch_hash(*mark.table, static_cast<int64_t>(mark.to.entry));
    for (uint32_t at = begin;; ++at) {
      uint32_t* const claim = &missing.table[at & missing.mask];
      uint32_t occupant = load_l2(claim);
      if (kClaim && occupant == 0) occupant = atomicCAS(claim, 0u, i + 1);
      if (occupant == 0) break;
      if (occupant != i + 1 && !mark.same_entry(EvictedMark(tables, batch, order, occupant - 1)))
        continue;
      if (kClaim) {
        if (occupant < i + 1) atomicMax(claim, i + 1);
      } else if (occupant == i + 1) {
        const EvictedMemory& evicted = mark.table->evicted;
        evicted.marks[mark.to.entry] = mark.to.mark;
        if (evicted.half_counts != nullptr) {
          evicted.half_counts[mark.to.entry] = EvictedMemory::half_count_of(
              mark.table->eviction, order.evicted_scores[order.positions[i]]);
        }
      }
      break;
    }
  }
}

}  // namespace

void write_evicted_in_order(const TableView* tables, const Batch& batch, const CallContext& context,
                            const Placement& placement, const int64_t* slots,
                            const InsertionOrder& order, cudaStream_t stream) {
  const int64_t n = batch.num_ids;
  const int64_t blocks = listing_blocks(n);
  for (const bool unadmitted : {false, true}) {
    if (unadmitted && placement.admissions == nullptr) break;
    HKV_CUDA_CHECK(
        cudaMemsetAsync(order.blocks.ticket, 0, (blocks + 1) * sizeof(unsigned long long), stream));
    list_evicted_kernel<<<static_cast<unsigned>(blocks), kListThreads, 0, stream>>>(
        n, slots, unadmitted, placement.evicted_entries.number, order);
    HKV_CUDA_CHECK_LAUNCH();
    const unsigned grid = min(grid_for(n * kTile), resident_blocks(write_evicted_kernel));
    write_evicted_kernel<<<grid, kThreads, 0, stream>>>(tables, batch, context, placement, slots,
                                                        order);
    HKV_CUDA_CHECK_LAUNCH();
  }
}

void remember_in_order(const TableView* tables, const Batch& batch, const MissingLists& missing,
                       const InsertionOrder& order, cudaStream_t stream) {
  const unsigned grid = grid_for(batch.num_ids);
  clear_claims_kernel<<<min(grid, resident_blocks(clear_claims_kernel)), kThreads, 0, stream>>>(
      missing);
  HKV_CUDA_CHECK_LAUNCH();
  const auto claim = remember_kernel<true>;
  claim<<<min(grid, resident_blocks(claim)), kThreads, 0, stream>>>(tables, batch, missing, order);
  HKV_CUDA_CHECK_LAUNCH();
  const auto write = remember_kernel<false>;
  write<<<min(grid, resident_blocks(write)), kThreads, 0, stream>>>(tables, batch, missing, order);
  HKV_CUDA_CHECK_LAUNCH();
}

}  // namespace torchrec_hkv::hash_table::cuda
