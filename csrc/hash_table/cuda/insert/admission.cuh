// Data that the admission kernels on the GPU share.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "hash_table/admission.h"
#include "hash_table/cuda/bucket.cuh"
#include "hash_table/cuda/insert/missing_lists.cuh"
#include "hash_table/cuda/small_sort.cuh"
#include "hash_table/cuda/workspace.h"

namespace torchrec_hkv::hash_table::cuda {

// Scratch for ids that are counted in cells. Arrays that are zeroed come first.
struct AdmissionScratch {
  uint32_t* owners;  // [mask + 1] 1 + first position, 0: free
  uint32_t mask;
  uint32_t* times;  // [mask + 1] occurrences of the id; then whether it is admitted
  // If ids are counted in the order of the batch:
  uint32_t* number;  // of ids
  SmallSort sort;
  LookbackState blocks;
  SortedPairs pairs;  // keys: a hash of the id's set; values: the owner
  int queue_bits;
  size_t zero_bytes;
  size_t bytes;
};

inline AdmissionScratch admission_layout(int64_t n, bool ordered, char* base) {
  AdmissionScratch scratch{};
  WorkspaceAllocator workspace(base);
  uint32_t size = 1024;
  while (size < 2 * n && size < (1u << 31)) size *= 2;
  scratch.mask = size - 1;
  scratch.owners = workspace.take<uint32_t>(size);
  scratch.times = workspace.take<uint32_t>(size);
  scratch.zero_bytes = scratch.bytes = workspace.used();
  if (!ordered) return scratch;
  scratch.queue_bits = 1;
  while ((int64_t{2} << scratch.queue_bits) <= n) ++scratch.queue_bits;
  scratch.sort = SmallSort::of(n, scratch.queue_bits);
  scratch.number = workspace.take<uint32_t>(1);
  scratch.sort.digits = workspace.take<uint32_t>(scratch.sort.digit_bytes() / sizeof(uint32_t));
  scratch.blocks.ticket = workspace.take<uint32_t>(1);
  scratch.blocks.states = workspace.take<unsigned long long>(listing_blocks(n));
  scratch.zero_bytes = workspace.used();
  for (Pairs* const half : {&scratch.pairs.pairs, &scratch.pairs.other}) {
    half->keys = workspace.take<uint32_t>(n);
    half->values = workspace.take<uint32_t>(n);
  }
  scratch.bytes = workspace.used();
  return scratch;
}

// Whether the id of a position is counted in cells and the position owns it.
__device__ __forceinline__ bool is_owner(const AdmissionScratch& scratch, const int64_t* slots,
                                         int64_t position) {
  return is_reference(slots[position]) &&
         scratch.owners[decode_reference(slots[position])] == static_cast<uint32_t>(position + 1);
}

// Adds to an id's count. Returns whether the id is admitted; if so, frees its cell. Only one thread
// of a call may call this for an id.
__device__ inline bool count_in_cell(const Admission& admission, int64_t id, uint32_t times,
                                     uint32_t now) {
  CountCell* cells = admission.cells + set_of(admission, id) * kCellsOfSet;
  for (;;) {  // a compare-and-swap fails if another id has taken the cell
    int chosen = -1;
    bool is_same_id = false;
    uint64_t old = 0;
#pragma unroll
    for (int c = 0; c < kCellsOfSet; ++c) {
      const uint4 loaded = load_vector_l2(&cells[c]);
      const auto cell_id = static_cast<int64_t>(static_cast<uint64_t>(loaded.y) << 32 | loaded.x);
      const uint64_t meta = static_cast<uint64_t>(loaded.w) << 32 | loaded.z;
      // A cell with the present step was taken in this call, and its id may not be written yet.
      if (is_same_id || (meta != 0 && cell_step(meta) == now)) continue;
      is_same_id = meta != 0 && cell_id == id;
      if (is_same_id || chosen < 0 || replaced_before(meta, old)) {
        chosen = c;
        old = meta;
      }
    }
    const uint64_t sum = (is_same_id ? cell_count(old) : 0ull) + times;
    const bool admitted = sum >= admission.count;
    // An id that gets no cell is admitted at once or not counted.
    if (chosen < 0 || (admitted && !is_same_id)) return admitted;
    auto* meta = reinterpret_cast<unsigned long long*>(&cells[chosen].meta);
    const unsigned long long next = admitted ? 0ull : cell_meta(sum, now);
    const unsigned long long seen = atomicCAS(meta, static_cast<unsigned long long>(old), next);
    // An admitted id no longer needs its cell.
    if (admitted) return true;
    if (seen == old) {
      if (!is_same_id) cells[chosen].id = id;
      return false;
    }
  }
}

// Adds to the counts of ids, in the order of the batch within a set (admission_ordered.cu).
void count_in_order(const Batch& batch, const CallContext& context, const Admission* admissions,
                    const int64_t* slots, const AdmissionScratch& scratch, cudaStream_t stream);

}  // namespace torchrec_hkv::hash_table::cuda
