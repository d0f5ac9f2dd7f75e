// Flags of the slices of cores that have a gradient in a batch.
#pragma once

#include "common/global_pointer.h"
#include "tensor_train/cuda/index/index.cuh"

namespace torchrec_hkv::tensor_train::cuda {

struct TouchInput {
  const TableCuda* tables;
  const IndexCounts* counts;
  const int4* prefixes;
  const int32_t* lasts;
  bool leaves_dense;  // leaves batches with many ids per prefix to the kernel of their gradients
};

// Sets flags of slices. The flags are in a few sectors of memory, for which all multiprocessors
// would wait if every prefix and id wrote its flags. So a block first marks the slices of its part
// of the prefixes in shared memory.
class TouchedSlices {
 public:
  // Called by all threads of `block` of `blocks`.
  __device__ __forceinline__ void set(const TouchInput& in, int block, int blocks) {
    const IndexCounts counts = *in.counts;
    const int64_t count = in.leaves_dense && counts.dense != 0 ? 0 : counts.prefixes;
    const int end = static_cast<int>(count * (block + 1) / blocks);
    for (int i = threadIdx.x; i < kMax; i += blockDim.x) heads_[i] = lasts_[i] = 0;
    for (int first = static_cast<int>(count * block / blocks); first < end; first = behind_) {
      set_of_table(in, first, end);
    }
  }

 private:
  static constexpr int kMax = 1024;  // slices of a core that are marked in shared memory

  // Sets flags for the prefixes from `first` on that belong to the same table.
  __device__ __forceinline__ void set_of_table(const TouchInput& in, int first, int end) {
    const int4 begin = in.prefixes[first];
    const TableCuda& table = in.tables[begin.y];
    uint8_t* const of_heads = table.head_touched;
    uint8_t* const of_middles = table.middle_touched;
    uint8_t* const of_lasts = table.last_touched;
    const int heads = of_heads == nullptr ? 0 : static_cast<int>(table.heads);
    const int lasts = of_lasts == nullptr ? 0 : static_cast<int>(table.lasts);
    __syncthreads();  // the previous table is done
    if (threadIdx.x == 0) behind_ = end;
    __syncthreads();
    for (int at = first + static_cast<int>(threadIdx.x); at < end;
         at += static_cast<int>(blockDim.x)) {
      const int4 prefix = in.prefixes[at];
      if (prefix.y != begin.y) {
        atomicMin(&behind_, at);
        break;
      }
      mark(heads_, of_heads, heads, prefix.w);
      if (of_middles == nullptr) continue;
      if (at == first || in.prefixes[at - 1].z != prefix.z) of_middles[prefix.z] = 1;
    }
    __syncthreads();
    const int ids_end = in.prefixes[behind_].x;
#pragma unroll 4
    for (int id = begin.x + static_cast<int>(threadIdx.x); id < ids_end;
         id += static_cast<int>(blockDim.x)) {
      mark(lasts_, of_lasts, lasts, in.lasts[id]);
    }
    __syncthreads();
    flush(heads_, of_heads, heads);
    flush(lasts_, of_lasts, lasts);
  }

  static __device__ __forceinline__ void mark(uint8_t* marks, uint8_t* flags, int slices,
                                              int slice) {
    if (slices > kMax) {
      in_global(flags)[slice] = 1;
    } else if (slices > 0) {
      marks[slice] = 1;
    }
  }
  // Writes marks to memory, and clears them.
  static __device__ __forceinline__ void flush(uint8_t* marks, uint8_t* flags, int slices) {
    if (slices > kMax) return;
    for (int i = threadIdx.x; i < slices; i += static_cast<int>(blockDim.x)) {
      if (marks[i] != 0) in_global(flags)[i] = 1;
      marks[i] = 0;
    }
  }

  uint8_t heads_[kMax];
  uint8_t lasts_[kMax];
  int behind_;  // first prefix of the next table
};

}  // namespace torchrec_hkv::tensor_train::cuda
