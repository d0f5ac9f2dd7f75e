// find_or_insert on the GPU, without locks:
//   1. The clock advances and entries expire. Found ids are touched (find.cu), and missing ids are
//      listed, so that later kernels need not read every position. If the group has admission,
//      positions of ids that are not admitted are marked (admission.cu).
//   2. A thread takes each listed position. One position represents each missing id
//      (missing_lists.cuh; if scores are given, deduplicate.cu chooses it) and claims a free slot
//      (place.cuh). Or all positions of the id search its first bucket, and the first one claims a
//      slot. Tiles of lanes write the rows.
//   3. Ids whose buckets are full have a list of their own and evict other entries (evict.cu). In
//      deterministic mode, steps 2 and 3 follow the order of the batch (ordered.cu).
//   4. The other positions of an id take the slot of the position that they refer to. Positions of
//      ids that are not admitted get no slot.
//   5. In tables with frames, rows move into frames (cuda/hbm_cache/frames.cu).
// Most kernels start before the previous one ends (common/dependent_launch.cuh).
// In tables that remember evicted ids, step 2 checks which ids return, and the kernel that places
// them counts them; in deterministic mode, count_returned.cu counts them.
#include "common/cuda_check.h"
#include "common/dependent_launch.cuh"
#include "hash_table/admission_kernels.h"
#include "hash_table/aging.h"
#include "hash_table/cuda/bucket.cuh"
#include "hash_table/cuda/clock.cuh"
#include "hash_table/cuda/insert/insert.cuh"
#include "hash_table/cuda/insert/miniature_lists.cuh"
#include "hash_table/cuda/insert/miniatures.cuh"
#include "hash_table/cuda/insert/missing_lists.cuh"
#include "hash_table/cuda/insert/new_row.cuh"
#include "hash_table/cuda/insert/ordered.cuh"
#include "hash_table/cuda/insert/place.cuh"
#include "hash_table/cuda/insert/return_refused.cuh"
#include "hash_table/cuda/lookup/find.cuh"
#include "hash_table/cuda/workspace.h"
#include "hash_table/frames_kernels.h"
#include "hash_table/kernels.h"

namespace torchrec_hkv::hash_table::cuda {
namespace {

// Blocks per multiprocessor, which limits the registers. An insertion mostly waits for memory, so
// many must be in flight.
constexpr int kInsertBlocks = 4;

// One block: advances the clock, ages counts and clears the flags. It also counts the lookups,
// whose number is known, if insertions are not counted in order. sampled: numbers of the ids that
// miniatures see, which it clears.
__global__ void __launch_bounds__(kThreads)
    begin_kernel(Clock* clock, const __grid_constant__ Tick tick, const MissingLists missing,
                 const TableView* __restrict__ tables, const Batch batch, bool counts,
                 int32_t aged_tables, uint32_t* sampled, size_t sampled_bytes) {
  let_next_kernel_start();  // the next kernel may read all but the clock, the flags and aged counts
  for (size_t i = threadIdx.x; i < sampled_bytes / sizeof(uint32_t); i += kThreads) sampled[i] = 0;
  bool any_enabled = false;
  if (aged_tables > 0) {
    const uint32_t now = next_step(clock->now, tick);
    for (int32_t t = threadIdx.x; t < aged_tables; t += kThreads) {
      if (tables[t].aged == nullptr) continue;
      tables[t].begin_aged_call(now);
      any_enabled |= miniatures_enabled(tables[t]);
    }
    // Before the clock advances and lookups are counted.
    any_enabled = __syncthreads_or(any_enabled) != 0;
  }
  if (threadIdx.x < kWarp) {
    tick_warp(clock, tick);
    return;
  }
  if (threadIdx.x == kWarp) {
    *missing.number = *missing.number_full = *missing.any_chosen = *missing.any_reference = 0;
    *missing.samples_ids = any_enabled ? 1 : 0;
  }
  if (!counts) return;
  for (int32_t f = threadIdx.x - kWarp; f < batch.num_features; f += kThreads - kWarp) {
    const int64_t ids = batch.feature_start(f + 1) - batch.feature_start(f);
    if (ids > 0) count(tables[batch.feature_tables[f]], kLookups, ids);
  }
}

// deduplicated: every missing id is missing at one position only. kPacked: as in place.cuh, one
// table.
template <NewRows kRows, bool kOneTable, bool kPacked>
__global__ void __launch_bounds__(kThreads, kInsertBlocks)
    insert_kernel(const __grid_constant__ TableView only, const TableView* __restrict__ tables,
                  const Batch batch, const CallContext context, int64_t* slots, bool* writer,
                  const MissingLists missing, bool deduplicated) {
  let_next_kernel_start();
  wait_for_kernel_before();
  __shared__ RowToWrite rows_of_block[kThreads];
  RowToWrite* const rows = rows_of_block + threadIdx.x / kWarp * kWarp;
  const uint32_t number = *missing.number;
  if (number == 0) return;
  if (kOneTable && blockIdx.x == 0 && threadIdx.x == 0) {
    count(only, kMisses, number);
  }
  WarpCounter<kOneTable, kInserted> inserted;
  for (WarpEvenShare even_share(number, even_lanes(number, 1)); even_share.more();
       even_share.next()) {
    const bool absent = static_cast<int>(threadIdx.x % kWarp) < even_share.busy();
    const int64_t position = absent ? missing.listed(false, even_share.at()) : 0;
    const int64_t was = absent ? slots[position] : 0;
    const bool missed = absent && is_missing(was);
    const TableView* lane_table = kOneTable ? &only : tables;
    if (!kOneTable && absent) lane_table = &table_at(tables, batch, position);
    const TableView& table = kOneTable ? only : *lane_table;
    if (!kOneTable) count_warp(lane_table, kMisses, absent);
    bool busy = missed;  // the thread has an id to place
    int64_t id = 0, slot = kNoSlot;
    uint16_t mark = 1, seen = 0;  // the mark of the id if it returns, and the stored mark
    if (missed) {
      id = batch.ids[position];
      const BucketChoice choice = choose_buckets(id, table.num_buckets);
      if (missing.counts_returning && table.evicted.marks != nullptr) {
        const EvictedMemory::MarkPosition entry = table.evicted.mark_position(id);
        mark = entry.mark;
        seen = table.evicted.marks[entry.entry];
      }
      // If new ids are few relative to the slots, first buckets hardly exceed their share before
      // second ones are used. The maximal step (clock.h) can't be distinguished from that of a slot
      // that is being written.
      const bool may_find = missing.may_find_or_claim && !deduplicated &&
                            was == kMissingFromFirst && table.scores == nullptr &&
                            number <= table.num_slots / 16 && context.now() != kFreeStep;
      if (may_find) {
        const FoundOrClaimed joined =
            find_or_claim_first<kPacked>(table, choice, id, context.now());
        if (joined.claimed) slot = joined.slot;
        busy = joined.claimed || joined.slot == kNoSlot;
        if (!busy) slots[position] = table.first_slot + joined.slot;
      } else if (was != kMissingFromFull) {
        prefetch_l2(digest_line(table, choice.first), kBucketDigests * sizeof(uint16_t));
      }
      if (busy && slot == kNoSlot) {
        if (!deduplicated) {
          busy = is_representative<kOneTable>(missing, tables, table, batch, slots, position, id);
        }
        if (busy && was != kMissingFromFull) {
          slot = claim_free_slot<kPacked>(table, choice, id, context.now());
        }
      }
    }
    const bool placed = slot != kNoSlot;
    const bool full = busy && !placed;
    if (placed) {
      slots[position] = table.first_slot + slot;
      if (writer != nullptr) writer[position] = true;
      if (missing.placed != nullptr) missing.placed[position] = true;
      if (table.scores != nullptr) {
        table.scores[slot] =
            first_score(table.eviction, context.now(), context.epoch(), context.given(position));
      }
    } else if (busy) {
      slots[position] = seen == mark ? kReturningToFull : kChosenFromFull;
    }
    if (full && load_l2(missing.any_chosen) == 0) *missing.any_chosen = 1;
    inserted.add(lane_table, placed);
    if (missing.counts_returning) count_warp(lane_table, kReturned, placed && seen == mark);
    write_rows_of_warp<kRows, kOneTable>(rows, lane_table, placed, id, slot);
  }
  inserted.finish(only);
}

// Positions of a list that refer to another position get its slot.
__device__ __forceinline__ void resolve_list(const TableView* tables, const Batch& batch,
                                             const CallContext& context, const Placement& placement,
                                             int64_t* slots, const MissingLists& missing,
                                             bool second) {
  for (WarpEvenShare even_share(second ? *missing.number_full : *missing.number); even_share.more();
       even_share.next()) {
    const bool listed = static_cast<int>(threadIdx.x % kWarp) < even_share.busy();
    const int64_t position = listed ? missing.listed(second, even_share.at()) : 0;
    const bool waiting = listed && is_reference(slots[position]);
    const TableView* table = nullptr;
    int64_t slot = kNoSlot;
    if (waiting) {
      table = &table_at(tables, batch, position);
      slot = slots[decode_reference(slots[position])];
      slots[position] = slot;
    }
    const bool refused = waiting && slot == kNoSlot;
    const bool placed = waiting && !refused;
    const unsigned all = __ballot_sync(kAllLanes, placed);
    if (placed) touch(all, *table, slot - table->first_slot, context, context.given(position));
    if (!__ballot_sync(kAllLanes, refused)) continue;
    count_warp(table, kRefused, refused);
    // Returns the other positions of a refused id, too.
    if (!refused || placement.evicted_entries.number == nullptr) continue;
    return_refused(placement, *table, tables, batch, context, position);
  }
}

// kSimulates: also lists the ids that miniatures see.
template <bool kSimulates>
__global__ void __launch_bounds__(kThreads)
    resolve_kernel(const TableView* __restrict__ tables, const Batch batch,
                   const CallContext context, const Placement placement,
                   int64_t* __restrict__ slots, const MissingLists missing,
                   const SampleLists sampled) {
  if (kSimulates) let_next_kernel_start();
  wait_for_kernel_before();
  if (*missing.any_reference != 0) {  // an id is missing at several positions
    for (const bool second : {false, true}) {
      resolve_list(tables, batch, context, placement, slots, missing, second);
    }
  }
  if constexpr (kSimulates) {
    // Only a call with missing ids can evict for the first time.
    if (*missing.samples_ids == 0 && *missing.number == 0 && *missing.number_full == 0) return;
    __shared__ SampleAggregator may_find;
    list_sampled(may_find, tables, batch, context, sampled);
  }
}

using InsertKernel = void (*)(const TableView, const TableView*, const Batch, const CallContext,
                              int64_t*, bool*, const MissingLists, bool);

template <NewRows kRows>
InsertKernel choose_insert_kernel(const TableView* only) {
  if (only == nullptr) return insert_kernel<kRows, false, false>;
  return only->entries.words != nullptr ? insert_kernel<kRows, true, true>
                                        : insert_kernel<kRows, true, false>;
}
InsertKernel choose_insert_kernel(NewRows rows, const TableView* only) {
  switch (rows) {
    case NewRows::kUntouched:
      return choose_insert_kernel<NewRows::kUntouched>(only);
    case NewRows::kUniform:
      return choose_insert_kernel<NewRows::kUniform>(only);
    case NewRows::kInitialAny:
      return choose_insert_kernel<NewRows::kInitialAny>(only);
    default:
      return choose_insert_kernel<NewRows::kInitial>(only);
  }
}

// Whether to store the positions whose ids were placed.
bool stores_placed(const Placement& placement) {
  return placement.moving.any() || (placement.remembers && placement.ordered);
}

// The ids that miniatures see are listed in MissingLists::table, when that is no longer needed.
MissingLists missing_lists_of(int64_t num_ids, const Placement& placement, char* memory) {
  return missing_layout(num_ids, placement.simulates ? num_ids * sizeof(SampleEntry) : 0, memory);
}

// Offsets of the parts of the scratch after those of Missing.
struct ScratchLayout {
  size_t admission;
  size_t order;    // for an insertion in the order of the batch
  size_t placed;   // positions whose ids were placed
  size_t moves;    // for rows that move into frames
  size_t numbers;  // for miniatures: of the ids that they see, by table
  size_t bytes;

  ScratchLayout(int64_t num_ids, const Placement& placement, bool scored) {
    const Admissions* const admissions = placement.admissions;
    admission = aligned(missing_lists_of(num_ids, placement, nullptr).bytes);
    order = admission + (admissions != nullptr
                             ? aligned(admission_scratch(*admissions, num_ids, placement.ordered))
                             : 0);
    placed = order;
    if (placement.ordered) {
      placed += aligned(insertion_order(num_ids, placement, scored, nullptr).bytes);
    }
    moves = placed + (stores_placed(placement) ? aligned(num_ids * sizeof(bool)) : 0);
    numbers = moves + aligned(frames_scratch(num_ids, placement.moving));
    bytes = numbers + (placement.simulates ? sample_number_bytes(kMaxTables) : 0);
  }
};

}  // namespace

size_t find_or_insert_scratch(int64_t num_ids, const Placement& placement, bool scored) {
  return ScratchLayout(num_ids, placement, scored).bytes;
}

void find_or_insert(const TableView* tables, const TableView* only, const Batch& batch,
                    Clock* clock, const Tick& tick, const Aging& aging, const uint64_t* scores,
                    const Placement& placement, int64_t* slots, bool* present, bool* writer,
                    void* scratch, cudaStream_t stream) {
  const CallContext context{clock, scores};
  if (batch.num_ids == 0) {
    cuda::tick(clock, tick, stream);
    age(tables, aging, context, stream);
    return;
  }
  const bool by_score = context.scores != nullptr;
  char* const memory = static_cast<char*>(scratch);
  const ScratchLayout layout(batch.num_ids, placement, by_score);
  MissingLists missing = missing_lists_of(batch.num_ids, placement, memory);
  missing.counts_returning = placement.remembers && !placement.ordered;
  missing.may_find_or_claim = placement.admissions == nullptr;
  missing.sorts_full = !placement.ordered && !placement.moving.any() && !placement.remembers &&
                       placement.admissions == nullptr;
  if (stores_placed(placement)) {
    missing.placed = reinterpret_cast<bool*>(memory + layout.placed);
    HKV_CUDA_CHECK(cudaMemsetAsync(missing.placed, 0, batch.num_ids * sizeof(bool), stream));
  }
  const SampleLists sampled{reinterpret_cast<SampleEntry*>(missing.table),
                            reinterpret_cast<uint32_t*>(memory + layout.numbers),
                            min(aging.num_tables, kMaxTables)};
  begin_kernel<<<1, kThreads, 0, stream>>>(
      clock, tick, missing, tables, batch, !placement.ordered,
      aging.ages_counts ? aging.num_tables : 0, sampled.numbers,
      placement.simulates ? sample_number_bytes(aging.num_tables) : 0);
  HKV_CUDA_CHECK_LAUNCH();
  age(tables, aging, context, stream);
  const unsigned grid = grid_for(batch.num_ids);
  if (placement.expected_present == nullptr) {
    find_and_touch(tables, only, batch, context, slots, Found{present, writer}, missing,
                   placement.mostly_unique, placement.scores,
                   /*begun=*/aging.expire_after == nullptr, stream);
  } else {
    find(tables, only, batch, slots, stream);
    touch_expected(tables, batch, context, placement.expected_present, slots, present, missing,
                   stream);
  }
  if (placement.admissions != nullptr) {
    // After the scratch of insertions, which the find has prepared.
    admit(tables, batch, context, *placement.admissions, placement.ordered, slots,
          memory + layout.admission, stream);
  }
  Placement rest = placement;  // work after the placement
  InsertionOrder order{};
  if (placement.ordered) {
    order = insertion_order(batch.num_ids, placement, by_score, memory + layout.order);
    insert_in_order(tables, batch, context, placement, slots, missing, &order, stream);
    if (placement.remembers) {
      count_returned(tables, batch, context, slots, missing.placed, missing.number, stream);
      remember_in_order(tables, batch, missing, order, stream);
    }
    rest.evicted_entries = {};
  } else {
    if (by_score) choose_by_score(tables, batch, context, slots, missing, stream);
    const InsertKernel insert = choose_insert_kernel(placement.rows, only);
    launch_dependent(insert, min(grid, resident_blocks(insert)), kThreads, stream,
                     only != nullptr ? *only : TableView{}, tables, batch, context, slots, writer,
                     missing, by_score);
    evict_for_missing(tables, only, batch, context, placement, slots, writer, missing, by_score,
                      stream);
  }
  const auto resolve = placement.simulates ? resolve_kernel<true> : resolve_kernel<false>;
  launch_dependent(resolve, min(grid, resident_blocks(resolve)), kThreads, stream, tables, batch,
                   context, rest, slots, missing, sampled);
  if (placement.ordered && placement.evicted_entries.number != nullptr) {
    write_evicted_in_order(tables, batch, context, placement, slots, order, stream);
  }
  if (placement.admissions != nullptr) {
    finish_admission(tables, batch, context, rest, slots, stream);
  }
  if (placement.moving.any()) {
    place_rows_in_frames(tables, batch, context, placement.rows, slots, missing.placed,
                         missing.number, placement.moving, memory + layout.moves, stream);
  }
  if (placement.simulates) {
    simulate(tables, batch, context, sampled, stream);
  }
}

}  // namespace torchrec_hkv::hash_table::cuda
