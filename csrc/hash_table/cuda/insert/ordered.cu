// Inserts in the order of the batch, without waiting for the host:
//   1. The first position of each missing id represents it. The ids are listed in the order of
//      these positions.
//   2. Each id enters the queues of its two buckets. A sort by queue, in the order of the list,
//      gives its place in both.
//   3. An id is placed when it is first in both queues (ordered_place.cu).
//   4. Work that does not depend on the order follows: entries are completed and rows written.
// If no id is missing, the kernels return at once.

#include "common/cuda_check.h"
#include "hash_table/cuda/bucket.cuh"
#include "hash_table/cuda/entry.cuh"
#include "hash_table/cuda/insert/insert.cuh"
#include "hash_table/cuda/insert/missing_lists.cuh"
#include "hash_table/cuda/insert/ordered.cuh"
#include "hash_table/cuda/insert/place.cuh"
#include "hash_table/cuda/workspace.h"
#include "hash_table/kernels.h"

namespace torchrec_hkv::hash_table::cuda {
namespace {

// The scratch table's entry for an id. After all positions have called this, it holds the id's
// first position.
__device__ __forceinline__ uint32_t first_position_entry(const MissingLists& missing,
                                                         const TableView* tables,
                                                         const TableView& table, const Batch& batch,
                                                         int64_t position, int64_t id) {
  const auto claim = static_cast<uint32_t>(position + 1);
  for (uint32_t at = scratch_hash(table, id);; ++at) {
    const uint32_t index = at & missing.mask;
    // Reading first avoids thousands of compare-and-swaps at the address of a hot new id.
    uint32_t occupant = load_l2(&missing.table[index]);
    if (occupant == 0) occupant = atomicCAS(&missing.table[index], 0u, claim);
    if (occupant == 0) return index;
    if (!same_id<false>(tables, table, batch, static_cast<int64_t>(occupant) - 1, id)) continue;
    if (claim < occupant) atomicMin(&missing.table[index], claim);
    return index;
  }
}

// Counts lookups and misses. Missing ids store their entry of the scratch table in slots[].
__global__ void __launch_bounds__(kThreads)
    first_positions_kernel(const TableView* __restrict__ tables, const Batch batch,
                           int64_t* __restrict__ slots, const MissingLists missing,
                           const __grid_constant__ InsertionOrder order) {
  if (blockIdx.x == 0) {  // lookups are counted by feature
    for (int32_t f = threadIdx.x; f < batch.num_features; f += kThreads) {
      const int64_t ids = batch.feature_start(f + 1) - batch.feature_start(f);
      if (ids > 0) count(tables[batch.feature_tables[f]], kLookups, ids);
    }
  }
  if (*missing.number == 0) {
    if (blockIdx.x == 0 && threadIdx.x == 0) *order.places = 0;  // the sort reads only this number
    return;
  }
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kThreads;
  const auto words = static_cast<int64_t>(order.zero_bytes / sizeof(uint4));
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < words;
       i += stride) {
    reinterpret_cast<uint4*>(order.zeros)[i] = uint4{0, 0, 0, 0};
  }
  for (int64_t begin = static_cast<int64_t>(blockIdx.x) * kThreads; begin < batch.num_ids;
       begin += stride) {
    const int64_t position = begin + threadIdx.x;
    const int64_t was = position < batch.num_ids ? slots[position] : 0;
    const bool missed = is_missing(was);
    const bool absent = missed || was == kNotAdmitted;
    const TableView* const table = absent ? &table_at(tables, batch, position) : tables;
    count_warp(table, kMisses, absent);
    if (missed) {
      slots[position] = encode_reference(
          first_position_entry(missing, tables, *table, batch, position, batch.ids[position]));
    }
  }
}

// Numbers the missing ids and enters them into their queues. Positions then refer to the first one
// of their id, which refers to itself.
__global__ void __launch_bounds__(kListThreads, 2)
    queue_kernel(const TableView* __restrict__ tables, const Batch batch,
                 int64_t* __restrict__ slots, const MissingLists missing,
                 const __grid_constant__ InsertionOrder order) {
  if (*missing.number == 0) return;
  const auto is_representative = [&](int64_t position) {
    if (!is_reference(slots[position])) return false;
    const int64_t first =
        static_cast<int64_t>(missing.table[decode_reference(slots[position])]) - 1;
    slots[position] = encode_reference(first);
    if (first != position && load_l2(missing.any_reference) == 0) *missing.any_reference = 1;
    return first == position;
  };
  const auto enqueue = [&](uint32_t number, int64_t position) {
    const TableView& table = table_at(tables, batch, position);
    const BucketChoice choice = choose_buckets(batch.ids[position], table.num_buckets);
    order.positions[number] = static_cast<uint32_t>(position);
    for (uint32_t which = 0; which < 2; ++which) {
      const uint32_t place = 2 * number + which;
      const uint32_t queue = queue_of(order, table, which == 0 ? choice.first : choice.second);
      order.pairs.pairs.set(place, queue, place);
      order.sort.count(0, place, queue);
    }
  };
  list_in_order(batch.num_ids, take_block(order.blocks), order.blocks, is_representative, enqueue,
                [&](uint32_t number) {
                  *order.number = number;
                  *order.places = 2 * number;
                });
}

// Finds the highest score given for each missing id. It decides whether the id is refused.
__global__ void __launch_bounds__(kThreads)
    highest_kernel(const Batch batch, const CallContext context, const int64_t* __restrict__ slots,
                   const MissingLists missing, unsigned long long* __restrict__ highest) {
  if (*missing.number == 0) return;
  const int64_t position = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (position >= batch.num_ids || !is_reference(slots[position])) return;
  atomicMax(&highest[decode_reference(slots[position])],
            static_cast<unsigned long long>(context.given(position)));
}

// Stores the places of each id, and of each queue's first id, in the sorted queues.
__global__ void __launch_bounds__(kThreads)
    store_tickets_kernel(const MissingLists missing, const __grid_constant__ InsertionOrder order) {
  if (*missing.number == 0) return;
  const uint32_t places = *order.places;
  for (uint32_t i = blockIdx.x * kThreads + threadIdx.x; i < places; i += gridDim.x * kThreads) {
    const Pairs& sorted = order.pairs.pairs;
    const auto queue = static_cast<uint32_t>(sorted.key(i));
    order.tickets()[sorted.value(i)] = i;
    if (i == 0 || sorted.key(i - 1) != queue) order.turns()[queue] = i;
  }
}

// Completes the entries of the ids that were placed.
template <NewRows kRows>
__global__ void __launch_bounds__(kThreads)
    complete_kernel(const TableView* __restrict__ tables, const Batch batch,
                    const CallContext context, const int64_t* __restrict__ slots,
                    const MissingLists missing, const __grid_constant__ InsertionOrder order) {
  __shared__ RowToWrite rows_of_block[kThreads];
  RowToWrite* const rows = rows_of_block + threadIdx.x / kWarp * kWarp;
  if (*missing.number == 0) return;
  const uint32_t number = *order.number;
  for (uint32_t begin = blockIdx.x * kThreads; begin < number; begin += gridDim.x * kThreads) {
    const uint32_t index = begin + threadIdx.x;
    const bool listed = index < number;
    const int64_t position = listed ? order.positions[index] : 0;
    const int outcome = listed ? order.outcomes[index] : kPlaced;
    const TableView* const table = listed ? &table_at(tables, batch, position) : tables;
    const bool placed = listed && (outcome == kPlaced || outcome == kReplaced);
    int64_t id = 0, slot = kNoSlot;
    if (placed) {
      id = batch.ids[position];
      slot = slots[position] - table->first_slot;
      if (missing.placed != nullptr) missing.placed[position] = true;
      if (order.replaced != nullptr) order.replaced[position] = outcome == kReplaced;
      write_id(*table, slot, id);
      if (table->scores != nullptr) {
        table->scores[slot] =
            first_score(table->eviction, context.now(), context.epoch(), context.given(position));
      }
    }
    count_warp(table, kInserted, placed);
    count_warp(table, kEvicted, placed && outcome == kReplaced);
    count_warp(table, kRefused, listed && !placed);
    count_warp(table, kCrowded, listed && outcome == kAllPinned);
    write_rows_of_warp<kRows, false>(rows, table, placed, id, slot);
  }
}

}  // namespace

InsertionOrder insertion_order(int64_t num_ids, const Placement& placement, bool scored,
                               char* base) {
  InsertionOrder order{};
  WorkspaceAllocator workspace(base);
  const auto n = static_cast<size_t>(num_ids);
  const bool leaves = placement.evicted_entries.number != nullptr;
  order.queue_bits = 1;
  while ((int64_t{2} << order.queue_bits) <= 2 * num_ids) ++order.queue_bits;
  order.sort = SmallSort::of(2 * num_ids, order.queue_bits);
  order.zeros = base;
  order.number = workspace.take<uint32_t>(4);
  order.places = order.number + 1;
  order.next = order.number + 2;
  order.num_evicted = order.number + 3;
  order.sort.digits = workspace.take<uint32_t>(order.sort.digit_bytes() / sizeof(uint32_t));
  // Zeroes the ticket and the states, which are adjacent, for further listings.
  auto* const blocks = workspace.take<unsigned long long>(listing_blocks(num_ids) + 1);
  order.blocks.ticket = reinterpret_cast<uint32_t*>(blocks);
  order.blocks.states = blocks + 1;
  order.zero_bytes = workspace.used();
  order.positions = workspace.take<uint32_t>(n);
  order.outcomes = workspace.take<uint8_t>(n);
  for (Pairs* const half : {&order.pairs.pairs, &order.pairs.other}) {
    half->keys = workspace.take<uint32_t>(2 * n);
    half->values = workspace.take<uint32_t>(2 * n);
  }
  if (scored) order.highest = workspace.take<unsigned long long>(n);
  if (leaves || placement.remembers) order.evicted_ids = workspace.take<int64_t>(n);
  if (leaves || placement.restores) order.evicted_scores = workspace.take<uint64_t>(n);
  if (leaves) {
    order.replaced = workspace.take<bool>(n);
    order.evicted_before = workspace.take<unsigned long long>(1);
  }
  order.bytes = workspace.used();
  return order;
}

void insert_in_order(const TableView* tables, const Batch& batch, const CallContext& context,
                     const Placement& placement, int64_t* slots, const MissingLists& missing,
                     InsertionOrder* order, cudaStream_t stream) {
  const int64_t n = batch.num_ids;
  const unsigned grid = grid_for(n);
  if (order->highest != nullptr) {
    HKV_CUDA_CHECK(cudaMemsetAsync(order->highest, 0, n * sizeof(*order->highest), stream));
  }
  if (order->replaced != nullptr) {
    HKV_CUDA_CHECK(cudaMemsetAsync(order->replaced, 0, n * sizeof(bool), stream));
  }
  first_positions_kernel<<<min(grid, resident_blocks(first_positions_kernel)), kThreads, 0,
                           stream>>>(tables, batch, slots, missing, *order);
  HKV_CUDA_CHECK_LAUNCH();
  queue_kernel<<<static_cast<unsigned>(listing_blocks(n)), kListThreads, 0, stream>>>(
      tables, batch, slots, missing, *order);
  HKV_CUDA_CHECK_LAUNCH();
  if (order->highest != nullptr) {
    highest_kernel<<<grid, kThreads, 0, stream>>>(batch, context, slots, missing, order->highest);
    HKV_CUDA_CHECK_LAUNCH();
  }
  sort_small(&order->pairs, order->places, order->sort, stream);
  store_tickets_kernel<<<min(grid_for(2 * n), resident_blocks(store_tickets_kernel)), kThreads, 0,
                         stream>>>(missing, *order);
  HKV_CUDA_CHECK_LAUNCH();
  place_in_order(tables, batch, context, placement.refuse_lower, slots, missing, *order, stream);
  const auto complete = placement.rows == NewRows::kUntouched ? complete_kernel<NewRows::kUntouched>
                        : placement.rows == NewRows::kUniform ? complete_kernel<NewRows::kUniform>
                        : placement.rows == NewRows::kInitial
                            ? complete_kernel<NewRows::kInitial>
                            : complete_kernel<NewRows::kInitialAny>;
  complete<<<min(grid, resident_blocks(complete)), kThreads, 0, stream>>>(tables, batch, context,
                                                                          slots, missing, *order);
  HKV_CUDA_CHECK_LAUNCH();
}

}  // namespace torchrec_hkv::hash_table::cuda
