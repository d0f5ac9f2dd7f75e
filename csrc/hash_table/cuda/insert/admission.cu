// Admission on the GPU. Up to three kernels pass over the positions of a call. They count all
// occurrences before they decide the first id by its count, as on the CPU.
//   1. tally decides ids that are drawn by probability, and adds ids of sketched tables to the
//      sketch. Ids of tables that count in cells are deduplicated in a scratch table: an entry
//      holds the first position of its id (the owner) and the number of positions with the id. Each
//      position stores its entry.
//   2. count, if a table counts in cells: owners add to the counts of their ids. A cell is taken by
//      a compare-and-swap of its meta, which then holds the present step. Other owners skip a cell
//      with the present step, so the new owner writes its id without a lock. In deterministic mode,
//      ids of one set are counted in the order of the batch (admission_ordered.cu).
//   3. mark, if something was counted: each position reads its entry, or the sketch.
#include "common/cuda_check.h"
#include "hash_table/admission_kernels.h"
#include "hash_table/cuda/bucket.cuh"
#include "hash_table/cuda/insert/admission.cuh"
#include "hash_table/cuda/insert/missing_lists.cuh"
#include "hash_table/cuda/insert/return_refused.cuh"

namespace torchrec_hkv::hash_table::cuda {
namespace {

// Returns the entry of a position's id. After all positions have called this, it holds the first
// position of the id.
__device__ uint32_t find_entry(const Batch& batch, const AdmissionScratch& scratch, int32_t table,
                               int64_t position) {
  const int64_t id = batch.ids[position];
  const auto claim = static_cast<uint32_t>(position + 1);
  auto at = static_cast<uint32_t>(
      mix64(static_cast<uint64_t>(id) + static_cast<uint64_t>(table) * 0x9e3779b97f4a7c15ull));
  for (;; ++at) {
    const uint32_t entry = at & scratch.mask;
    uint32_t occupant = load_l2(&scratch.owners[entry]);
    if (occupant == 0) occupant = atomicCAS(&scratch.owners[entry], 0u, claim);
    if (occupant == 0) return entry;
    const int64_t other = static_cast<int64_t>(occupant) - 1;
    if (batch.ids[other] == id && batch.feature_tables[batch.feature_of(other)] == table) {
      if (claim < occupant) atomicMin(&scratch.owners[entry], claim);
      return entry;
    }
  }
}

__device__ void add_to_sketch(const Admission& admission, int64_t id, uint32_t times) {
  for (int row = 0; row < kSketchRows; ++row) {
    const uint64_t cell = sketch_cell(admission, id, row);
    const int shift = sketch_shift(admission, cell);
    uint32_t* word = &admission.sketch[sketch_word(admission, cell)];
    for (uint32_t old = load_l2(word);;) {
      const uint32_t next = sketch_sum(admission, old, shift, times);
      if (next == old) break;
      const uint32_t seen = atomicCAS(word, old, next);
      if (seen == old) break;
      old = seen;
    }
  }
}

__global__ void __launch_bounds__(kThreads)
    count_occurrences_kernel(const TableView* __restrict__ tables, const Batch batch,
                             const CallContext context, const Admission* __restrict__ admissions,
                             int64_t* __restrict__ slots, const AdmissionScratch scratch) {
  const int64_t position = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const bool missing = position < batch.num_ids && is_missing(slots[position]);
  if (!__ballot_sync(kAllLanes, missing)) return;
  const int lane = threadIdx.x % kWarp;
  const int32_t table = missing ? batch.feature_tables[batch.feature_of(position)] : 0;
  const AdmissionKind kind = missing ? admissions[table].kind : AdmissionKind::kEvery;
  const int64_t id = missing ? batch.ids[position] : 0;

  const bool counted = kind == AdmissionKind::kCounted;
  if (const unsigned all = __ballot_sync(kAllLanes, counted); counted) {
    const uint32_t entry = find_entry(batch, scratch, table, position);
    slots[position] = encode_reference(entry);
    // Equal neighbours are counted together, so that a hot id does not cost one atomic for each
    // position.
    const unsigned equal = __match_any_sync(all, entry);
    if (lane == __ffs(static_cast<int>(equal)) - 1) atomicAdd(&scratch.times[entry], __popc(equal));
  }
  const bool sketched = kind == AdmissionKind::kSketched;
  if (const unsigned all = __ballot_sync(kAllLanes, sketched); sketched) {
    const unsigned equal = __match_any_sync(all, static_cast<unsigned long long>(id)) &
                           __match_any_sync(all, static_cast<uint32_t>(table));
    if (lane == __ffs(static_cast<int>(equal)) - 1) {
      add_to_sketch(admissions[table], id, static_cast<uint32_t>(__popc(equal)));
    }
  }
  const bool unadmitted =
      kind == AdmissionKind::kProbability && !drawn(admissions[table], id, context.now());
  if (unadmitted) slots[position] = kNotAdmitted;
  __syncwarp();
  count_warp(tables + table, kUnadmitted, unadmitted);
}

__global__ void __launch_bounds__(kThreads)
    count_kernel(const Batch batch, const CallContext context,
                 const Admission* __restrict__ admissions, const int64_t* __restrict__ slots,
                 const AdmissionScratch scratch) {
  const int64_t position = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (position >= batch.num_ids || !is_owner(scratch, slots, position)) return;
  const Admission& admission = admissions[batch.feature_tables[batch.feature_of(position)]];
  uint32_t* const times = &scratch.times[decode_reference(slots[position])];
  *times = count_in_cell(admission, batch.ids[position], *times, context.now());
}

__global__ void __launch_bounds__(kThreads)
    mark_kernel(const TableView* __restrict__ tables, const Batch batch,
                const Admission* __restrict__ admissions, int64_t* __restrict__ slots,
                const AdmissionScratch scratch) {
  const int64_t position = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const int64_t slot = position < batch.num_ids ? slots[position] : 0;
  const bool undecided = is_missing(slot) || is_reference(slot);
  if (!__ballot_sync(kAllLanes, undecided)) return;
  const int32_t table = undecided ? batch.feature_tables[batch.feature_of(position)] : 0;
  bool admitted = true;
  if (is_reference(slot)) {
    admitted = scratch.times[decode_reference(slot)] != 0;
    slots[position] = admitted ? kNoSlot : kNotAdmitted;
  } else if (undecided && admissions[table].kind == AdmissionKind::kSketched) {
    admitted = sketch_admits(admissions[table], batch.ids[position]);
    if (!admitted) slots[position] = kNotAdmitted;
  }
  __syncwarp();
  count_warp(tables + table, kUnadmitted, !admitted);
}

__global__ void __launch_bounds__(kThreads)
    finish_kernel(const TableView* __restrict__ tables, const Batch batch,
                  const CallContext context, const Placement placement,
                  int64_t* __restrict__ slots) {
  const int64_t position = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (position >= batch.num_ids || slots[position] != kNotAdmitted) return;
  slots[position] = kNoSlot;
  const EvictedEntries& evicted = placement.evicted_entries;
  if (evicted.number == nullptr) return;
  return_refused(placement, table_at(tables, batch, position), tables, batch, context, position);
}

__global__ void __launch_bounds__(kThreads)
    halve_kernel(const Admission* __restrict__ admissions, int32_t num_tables,
                 const CallContext context) {
  for (int32_t t = 0; t < num_tables; ++t) {
    const Admission& admission = admissions[t];
    if (admission.halve_every == 0 || context.now() % admission.halve_every != 0) continue;
    const int64_t parts = halved_parts(admission);
    for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < parts;
         i += static_cast<int64_t>(gridDim.x) * kThreads) {
      halve_part(admission, i);
    }
  }
}

}  // namespace

size_t admission_scratch(const Admissions& admissions, int64_t num_ids, bool ordered) {
  return admissions.counted ? admission_layout(num_ids, ordered, nullptr).bytes : 0;
}

void admit(const TableView* tables, const Batch& batch, const CallContext& context,
           const Admissions& admissions, bool ordered, int64_t* slots, void* memory,
           cudaStream_t stream) {
  if (batch.num_ids == 0) return;
  const Admission* of_tables = admissions.of_tables;
  AdmissionScratch scratch{};
  if (admissions.counted) {
    scratch = admission_layout(batch.num_ids, ordered, static_cast<char*>(memory));
    HKV_CUDA_CHECK(cudaMemsetAsync(memory, 0, scratch.zero_bytes, stream));
  }
  const unsigned grid = grid_for(batch.num_ids);
  count_occurrences_kernel<<<grid, kThreads, 0, stream>>>(tables, batch, context, of_tables, slots,
                                                          scratch);
  HKV_CUDA_CHECK_LAUNCH();
  if (admissions.counted && ordered) {
    count_in_order(batch, context, of_tables, slots, scratch, stream);
  } else if (admissions.counted) {
    count_kernel<<<grid, kThreads, 0, stream>>>(batch, context, of_tables, slots, scratch);
    HKV_CUDA_CHECK_LAUNCH();
  }
  if (admissions.counted || admissions.sketched) {
    mark_kernel<<<grid, kThreads, 0, stream>>>(tables, batch, of_tables, slots, scratch);
    HKV_CUDA_CHECK_LAUNCH();
  }
}

void finish_admission(const TableView* tables, const Batch& batch, const CallContext& context,
                      const Placement& placement, int64_t* slots, cudaStream_t stream) {
  if (batch.num_ids == 0) return;
  finish_kernel<<<grid_for(batch.num_ids), kThreads, 0, stream>>>(tables, batch, context, placement,
                                                                  slots);
  HKV_CUDA_CHECK_LAUNCH();
}

void halve_counts(const Admissions& admissions, const CallContext& context, cudaStream_t stream) {
  constexpr unsigned kBlocks = 1024;
  halve_kernel<<<kBlocks, kThreads, 0, stream>>>(admissions.of_tables, admissions.num_tables,
                                                 context);
  HKV_CUDA_CHECK_LAUNCH();
}

}  // namespace torchrec_hkv::hash_table::cuda
