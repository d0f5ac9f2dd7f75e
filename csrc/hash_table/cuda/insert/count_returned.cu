// Counts new ids that their table remembers as evicted (evicted_memory.h), after an insertion in
// the order of the batch, and restores half of their counts. Other insertions count them when they
// place them, and restore no counts.
//
// Few positions of a batch have a new id, and the check is a chain of dependent reads: table, id,
// mark. So a block first lists these positions of a part of the batch, and then distributes them to
// all lanes.
#include "common/cuda_check.h"
#include "hash_table/cuda/insert/insert.cuh"
#include "hash_table/kernels.h"

namespace torchrec_hkv::hash_table::cuda {
namespace {

constexpr int kFlagsAThread = 8;  // bytes of one load
constexpr int kPart = kThreads * kFlagsAThread;

// Packs a thread's flags into bits.
__device__ __forceinline__ unsigned set_flags(const bool* placed, int64_t first, int64_t n) {
  if (first >= n) return 0;
  const uint2 flags = *reinterpret_cast<const uint2*>(placed + first);
  unsigned set = 0;
  // Flags are bytes of 0 or 1. The multiplication collects the four flags of a word in its highest
  // byte.
  const auto add = [&](uint32_t word, int at) { set |= (word * 0x01020408u >> 24 & 15u) << at; };
  add(flags.x, 0);
  add(flags.y, 4);
  return n - first < kFlagsAThread ? set & ((1u << (n - first)) - 1) : set;
}

__global__ void __launch_bounds__(kThreads)
    returned_kernel(const TableView* __restrict__ tables, const Batch batch,
                    const CallContext context, const int64_t* __restrict__ slots,
                    const bool* __restrict__ placed, const uint32_t* __restrict__ any_missing) {
  if (*any_missing == 0) return;
  __shared__ uint16_t listed[kPart];
  __shared__ int number;
  for (int64_t begin = static_cast<int64_t>(blockIdx.x) * kPart; begin < batch.num_ids;
       begin += static_cast<int64_t>(gridDim.x) * kPart) {
    __syncthreads();  // the previous part is finished
    if (threadIdx.x == 0) number = 0;
    __syncthreads();
    const int first = static_cast<int>(threadIdx.x) * kFlagsAThread;
    unsigned set = set_flags(placed, begin + first, batch.num_ids);
    int at = set ? atomicAdd(&number, __popc(set)) : 0;
    for (; set; set &= set - 1) {
      listed[at++] = static_cast<uint16_t>(first + __ffs(static_cast<int>(set)) - 1);
    }
    __syncthreads();
    const int all = number;
    for (int base = 0; base < all; base += kThreads) {
      const int mine = base + static_cast<int>(threadIdx.x);
      const TableView* table = tables;
      bool returned = false;
      if (mine < all) {
        const int64_t position = begin + listed[mine];
        table = &table_at(tables, batch, position);
        if (table->evicted.marks != nullptr) {
          const EvictedMemory::MarkPosition mark =
              table->evicted.mark_position(batch.ids[position]);
          returned = table->evicted.marks[mark.entry] == mark.mark;
          if (returned && table->evicted.half_counts != nullptr) {
            uint64_t& score = table->scores[slots[position] - table->first_slot];
            score = next_score(table->eviction, score, context.now(), context.epoch(),
                               table->evicted.half_counts[mark.entry]);
          }
        }
      }
      count_warp(table, kReturned, returned);
    }
  }
}

}  // namespace

void count_returned(const TableView* tables, const Batch& batch, const CallContext& context,
                    const int64_t* slots, const bool* placed, const uint32_t* any_missing,
                    cudaStream_t stream) {
  const auto parts = static_cast<unsigned>((batch.num_ids + kPart - 1) / kPart);
  returned_kernel<<<min(parts, resident_blocks(returned_kernel)), kThreads, 0, stream>>>(
      tables, batch, context, slots, placed, any_missing);
  HKV_CUDA_CHECK_LAUNCH();
}

}  // namespace torchrec_hkv::hash_table::cuda
