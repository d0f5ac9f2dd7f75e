// Which slots of a batch stand at several of its positions: marks tell.
//
// Where the lookup has noted which positions met a slot that another one had touched already, only
// those are marked, few of them: an atomic for each position, spread over the marks, would take as
// long as the lookup itself, and bandwidth of the second-level cache that the pooling beside needs.
#include <algorithm>

#include "common/chain.cuh"
#include "common/cuda_check.h"
#include "hash_table/cuda/offsets.cuh"
#include "hash_table/cuda/update/update.cuh"

namespace torchrec_hkv::hash_table::cuda {
namespace {

constexpr int kNotedOfThread = 8;  // positions whose notes a thread looks at
constexpr unsigned kClearBlocks = 528;

// What must be zeros before the grouping in batch order.
__global__ void __launch_bounds__(kThreads) clear_kernel(const __grid_constant__ Scratch scratch) {
  let_next_kernel_start();  // it reads nothing before it waits
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  constexpr int64_t kVector = sizeof(uint4);
  const uint4 zeros{0, 0, 0, 0};
  const auto clear = [&](void* memory, size_t bytes) {
    const auto vectors = static_cast<int64_t>(bytes) / kVector;
    for (int64_t i = first; i < vectors; i += static_cast<int64_t>(gridDim.x) * kThreads) {
      static_cast<uint4*>(memory)[i] = zeros;
    }
  };
  clear(scratch.words, scratch.word_bytes);
  clear(scratch.zeros, scratch.zero_bytes);
}

// A slot stands at a position, or at several.
__device__ __forceinline__ void mark_slot(const Repeats& repeats, uint32_t mark, bool several) {
  uint32_t* const word = &repeats.marks[mark / Repeats::kOfWord];
  const uint32_t shift = mark % Repeats::kOfWord * 2;
  const uint32_t seen = Repeats::kSeen << shift, twice = Repeats::kTwice << shift;
  // A hot one has had both bits for long.
  if (several && (load_l2(word) & twice)) return;
  const uint32_t before = atomicOr(word, several ? seen | twice : seen);
  if (!several && (before & (seen | twice)) == seen) atomicOr(word, twice);
}

// The first kernel of an update to read offsets. All positions.
__global__ void __launch_bounds__(kThreads)
    mark_kernel(const Batch batch, const int64_t* __restrict__ slots, const Repeats repeats,
                int64_t* __restrict__ bad_bag) {
  enter_chain();
  note_bad_bag(batch, bad_bag);
  const int64_t position = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const int64_t slot = position < batch.num_ids ? slots[position] : kNoSlot;
  const unsigned given = __ballot_sync(kAllLanes, slot != kNoSlot);
  if (slot == kNoSlot) return;
  const uint32_t mark = repeats.mark_of(slot);
  // One lane a mark, so that a hot row's lanes don't queue at one address.
  const unsigned peers = __match_any_sync(given, mark);
  if (peers & ((1u << threadIdx.x % kWarp) - 1)) return;
  mark_slot(repeats, mark, peers & (peers - 1));
}

// The same where the lookup has noted what it knows. Of a repeated slot that was there before, all
// positions but the first are noted; of ids that were not, all positions are.
__global__ void __launch_bounds__(kThreads)
    mark_noted_kernel(const Batch batch, const int64_t* __restrict__ slots,
                      const TouchNotes* __restrict__ notes, const Repeats repeats,
                      int64_t* __restrict__ bad_bag) {
  enter_chain();
  note_bad_bag(batch, bad_bag);
  const int64_t group = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const int64_t first = group * kNotedOfThread;
  if (first >= batch.num_ids) return;
  constexpr uint32_t kOwn = (1u << kNotedOfThread) - 1;
  const TouchNotes note = notes[first / kWarp];
  const uint32_t again = note.again >> (first % kWarp) & kOwn;
  for (uint32_t left = again | (note.absent >> (first % kWarp) & kOwn); left; left &= left - 1) {
    const int bit = __ffs(static_cast<int>(left)) - 1;
    const int64_t slot = slots[first + bit];
    if (slot != kNoSlot) mark_slot(repeats, repeats.mark_of(slot), again >> bit & 1);
  }
}

}  // namespace

void mark_repeats(const Batch& batch, const int64_t* slots, const TouchNotes* notes,
                  const Scratch& scratch, cudaStream_t stream) {
  const unsigned vectors = grid_for(static_cast<int64_t>(scratch.zero_bytes / sizeof(uint4)));
  clear_kernel<<<std::min(kClearBlocks, vectors), kThreads, 0, stream>>>(scratch);
  HKV_CUDA_CHECK_LAUNCH();
  if (notes == nullptr) {
    launch_chained(mark_kernel, grid_for(batch.num_ids), kThreads, stream, batch, slots,
                   scratch.repeats, scratch.bad_bag);
    return;
  }
  // So many that none looks at many offsets, one after the other.
  const int64_t lookers = std::min<int64_t>(batch.num_bags, kClearBlocks * kThreads);
  const int64_t threads = std::max((batch.num_ids + kNotedOfThread - 1) / kNotedOfThread, lookers);
  launch_chained(mark_noted_kernel, grid_for(threads), kThreads, stream, batch, slots, notes,
                 scratch.repeats, scratch.bad_bag);
}

}  // namespace torchrec_hkv::hash_table::cuda
