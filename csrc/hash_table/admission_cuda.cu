// Admission on the GPU, up to three passes over the positions of a call:
//   1. tally: ids drawn by probability are decided; those of a sketch are added to it; those of a
//      table that counts in cells are deduplicated in a scratch table: one position of each, its
//      owner, holds how often the call asks for it; all remember the owner.
//   2. count, where a table counts in cells: owners add to their ids' counts. As each id has one
//      owner, a cell is taken by a compare-and-swap of its meta, which then names the present step:
//      a cell of this step is nobody else's, so its id is written without a lock.
//   3. mark, where something was counted: every position asks its owner, or the sketch.
// What a call asks for is counted before the first id is decided, as on the CPU.
#include "common/cuda_check.h"
#include "hash_table/admission_kernels.h"
#include "hash_table/bucket_cuda.cuh"
#include "hash_table/leavers_cuda.cuh"
#include "hash_table/missing_cuda.cuh"

namespace torchrec_hkv::hash_table::cuda {
namespace {

struct TallyScratch {
  uint32_t* owners;  // [mask + 1] 1 + position, 0: free
  uint32_t mask;
  uint32_t*
      times;  // [num_ids] by owner: how often its id is asked for; then, whether it is admitted
  size_t bytes;
};

TallyScratch layout(int64_t n, char* base) {
  uint32_t size = 1024;
  while (size < 2 * n && size < (1u << 31)) size *= 2;
  TallyScratch scratch;
  scratch.owners = reinterpret_cast<uint32_t*>(base);
  scratch.mask = size - 1;
  scratch.times = scratch.owners + size;
  scratch.bytes = (static_cast<size_t>(size) + static_cast<size_t>(n)) * sizeof(uint32_t);
  return scratch;
}

// The position that owns the id of a position.
__device__ int64_t find_owner(const Batch& batch, const TallyScratch& scratch, int32_t table,
                              int64_t position) {
  const int64_t id = batch.ids[position];
  auto at = static_cast<uint32_t>(
      mix64(static_cast<uint64_t>(id) + static_cast<uint64_t>(table) * 0x9e3779b97f4a7c15ull));
  for (;; ++at) {
    uint32_t* place = &scratch.owners[at & scratch.mask];
    uint32_t there = load_l2(place);
    if (there == 0) there = atomicCAS(place, 0u, static_cast<uint32_t>(position + 1));
    if (there == 0) return position;
    const int64_t other = static_cast<int64_t>(there) - 1;
    if (batch.ids[other] == id && batch.feature_tables[batch.feature_of(other)] == table) {
      return other;
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
    tally_kernel(const TableView* __restrict__ tables, const Batch batch, const Visit visit,
                 const Admission* __restrict__ admissions, int64_t* __restrict__ slots,
                 const TallyScratch scratch) {
  const int64_t position = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const bool missing = position < batch.num_ids && is_missing(slots[position]);
  if (!__ballot_sync(kAllLanes, missing)) return;
  const int lane = threadIdx.x % kWarp;
  const int32_t table = missing ? batch.feature_tables[batch.feature_of(position)] : 0;
  const AdmissionKind kind = missing ? admissions[table].kind : AdmissionKind::kEvery;
  const int64_t id = missing ? batch.ids[position] : 0;

  const bool counted = kind == AdmissionKind::kCounted;
  if (const unsigned all = __ballot_sync(kAllLanes, counted); counted) {
    const int64_t owner = find_owner(batch, scratch, table, position);
    slots[position] = remember(owner);
    // Equal neighbours count together: a hot id is not one atomic a position.
    const unsigned equal = __match_any_sync(all, static_cast<uint32_t>(owner));
    if (lane == __ffs(static_cast<int>(equal)) - 1) atomicAdd(&scratch.times[owner], __popc(equal));
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
      kind == AdmissionKind::kProbability && !drawn(admissions[table], id, visit.now());
  if (unadmitted) slots[position] = kNotAdmitted;
  __syncwarp();
  count_warp(tables + table, kUnadmitted, unadmitted);
}

// Adds to an id's count; returns whether that admits it, which frees its cell. Nobody else does so
// for the same id in this call.
__device__ bool count_in_cell(const Admission& admission, int64_t id, uint32_t times,
                              uint32_t now) {
  CountCell* cells = admission.cells + set_of(admission, id) * kCellsOfSet;
  for (;;) {  // a failed compare-and-swap means that another id has got that cell
    int chosen = -1;
    bool is_own = false;
    uint64_t old = 0;
#pragma unroll
    for (int c = 0; c < kCellsOfSet; ++c) {
      const uint4 loaded = load_vector_l2(&cells[c]);
      const auto cell_id = static_cast<int64_t>(static_cast<uint64_t>(loaded.y) << 32 | loaded.x);
      const uint64_t meta = static_cast<uint64_t>(loaded.w) << 32 | loaded.z;
      // Whose cell names the present step has just got it, and its id may be still to be written.
      if (is_own || (meta != 0 && cell_step(meta) == now)) continue;
      is_own = meta != 0 && cell_id == id;
      if (is_own || chosen < 0 || replaced_before(meta, old)) {
        chosen = c;
        old = meta;
      }
    }
    const uint64_t sum = (is_own ? cell_count(old) : 0ull) + times;
    const bool admitted = sum >= admission.count;
    // Without a cell an id is admitted, or forgotten again.
    if (chosen < 0 || (admitted && !is_own)) return admitted;
    auto* meta = reinterpret_cast<unsigned long long*>(&cells[chosen].meta);
    const unsigned long long next = admitted ? 0ull : cell_meta(sum, now);
    const unsigned long long seen = atomicCAS(meta, static_cast<unsigned long long>(old), next);
    // An id that is admitted needs its cell no more, whoever has it.
    if (admitted) return true;
    if (seen == old) {
      if (!is_own) cells[chosen].id = id;
      return false;
    }
  }
}

__global__ void __launch_bounds__(kThreads)
    count_kernel(const Batch batch, const Visit visit, const Admission* __restrict__ admissions,
                 const int64_t* __restrict__ slots, const TallyScratch scratch) {
  const int64_t position = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (position >= batch.num_ids || slots[position] != remember(position)) return;
  const Admission& admission = admissions[batch.feature_tables[batch.feature_of(position)]];
  scratch.times[position] =
      count_in_cell(admission, batch.ids[position], scratch.times[position], visit.now());
}

__global__ void __launch_bounds__(kThreads)
    mark_kernel(const TableView* __restrict__ tables, const Batch batch,
                const Admission* __restrict__ admissions, int64_t* __restrict__ slots,
                const TallyScratch scratch) {
  const int64_t position = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const int64_t slot = position < batch.num_ids ? slots[position] : 0;
  const bool undecided = is_missing(slot) || is_remembered(slot);
  if (!__ballot_sync(kAllLanes, undecided)) return;
  const int32_t table = undecided ? batch.feature_tables[batch.feature_of(position)] : 0;
  bool admitted = true;
  if (is_remembered(slot)) {
    admitted = scratch.times[remembered(slot)] != 0;
    slots[position] = admitted ? kNoSlot : kNotAdmitted;
  } else if (undecided && admissions[table].kind == AdmissionKind::kSketched) {
    admitted = sketch_admits(admissions[table], batch.ids[position]);
    if (!admitted) slots[position] = kNotAdmitted;
  }
  __syncwarp();
  count_warp(tables + table, kUnadmitted, !admitted);
}

__global__ void __launch_bounds__(kThreads)
    finish_kernel(const TableView* __restrict__ tables, const Batch batch, const Visit visit,
                  const Placement placement, int64_t* __restrict__ slots) {
  const int64_t position = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (position >= batch.num_ids || slots[position] != kNotAdmitted) return;
  slots[position] = kNoSlot;
  const Leavers& leavers = placement.leavers;
  if (leavers.number == nullptr) return;
  give_back(placement, table_at(tables, batch, position), tables, batch, visit, position);
}

__global__ void __launch_bounds__(kThreads)
    halve_kernel(const Admission* __restrict__ admissions, int32_t num_tables, const Visit visit) {
  for (int32_t t = 0; t < num_tables; ++t) {
    const Admission& admission = admissions[t];
    if (admission.halve_every == 0 || visit.now() % admission.halve_every != 0) continue;
    const int64_t parts = halved_parts(admission);
    for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < parts;
         i += static_cast<int64_t>(gridDim.x) * kThreads) {
      halve_part(admission, i);
    }
  }
}

}  // namespace

size_t admission_scratch(const Admissions& admissions, int64_t num_ids) {
  return admissions.counted ? layout(num_ids, nullptr).bytes : 0;
}

void admit(const TableView* tables, const Batch& batch, const Visit& visit,
           const Admissions& admissions, int64_t* slots, void* memory, cudaStream_t stream) {
  if (batch.num_ids == 0) return;
  const Admission* of_tables = admissions.of_tables;
  TallyScratch scratch{};
  if (admissions.counted) {
    scratch = layout(batch.num_ids, static_cast<char*>(memory));
    HKV_CUDA_CHECK(cudaMemsetAsync(memory, 0, scratch.bytes, stream));
  }
  const unsigned grid = grid_for(batch.num_ids);
  tally_kernel<<<grid, kThreads, 0, stream>>>(tables, batch, visit, of_tables, slots, scratch);
  HKV_CUDA_CHECK_LAUNCH();
  if (admissions.counted) {
    count_kernel<<<grid, kThreads, 0, stream>>>(batch, visit, of_tables, slots, scratch);
    HKV_CUDA_CHECK_LAUNCH();
  }
  if (admissions.counted || admissions.sketched) {
    mark_kernel<<<grid, kThreads, 0, stream>>>(tables, batch, of_tables, slots, scratch);
    HKV_CUDA_CHECK_LAUNCH();
  }
}

void finish_admission(const TableView* tables, const Batch& batch, const Visit& visit,
                      const Placement& placement, int64_t* slots, cudaStream_t stream) {
  if (batch.num_ids == 0) return;
  finish_kernel<<<grid_for(batch.num_ids), kThreads, 0, stream>>>(tables, batch, visit, placement,
                                                                  slots);
  HKV_CUDA_CHECK_LAUNCH();
}

void halve_counts(const Admissions& admissions, const Visit& visit, cudaStream_t stream) {
  constexpr unsigned kBlocks = 1024;
  halve_kernel<<<kBlocks, kThreads, 0, stream>>>(admissions.of_tables, admissions.num_tables,
                                                 visit);
  HKV_CUDA_CHECK_LAUNCH();
}

}  // namespace torchrec_hkv::hash_table::cuda
