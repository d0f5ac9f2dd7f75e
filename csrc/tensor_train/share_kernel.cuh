// Lookup and gradients where prefixes have few ids: each block has an equal share of the sorted
// prefixes, so that all blocks run at the same time and a middle slice is read, and its gradient
// added in memory, once for each block that has it. A warp has a prefix of a tile. What the next
// tile needs is read while this one is worked on: what takes the time of a tile is a chain of reads
// and products, not their number.
#pragma once

#include "tensor_train/ids_ahead.cuh"
#include "tensor_train/resident_kernel.cuh"

namespace torchrec_hkv::tensor_train::cuda {

// A flag that is set where it is not yet: read here, looked at when other work is done.
struct LateFlag {
  uint32_t value = 1;

  __device__ __forceinline__ void read(const uint8_t* flag) { value = __ldcg(flag); }
  // flag: the one that was read, if one was.
  __device__ __forceinline__ void finish(uint8_t* flag) {
    asm volatile("" : "+r"(value));  // not earlier
    if (value == 0) *flag = 1;
  }
};

// The word that a flag lies in, and the flag in it.
__device__ __forceinline__ const uint32_t* word_of(const uint8_t* flag) {
  return reinterpret_cast<const uint32_t*>(reinterpret_cast<uintptr_t>(flag) & ~uintptr_t{3});
}
__device__ __forceinline__ uint32_t byte_of(uint32_t word, const uint8_t* flag) {
  return word >> (reinterpret_cast<uintptr_t>(flag) % 4 * 8) & 0xffu;
}

// As LastGradInMemory, with flags that are looked at when other work is done.
template <typename Config>
struct LastGradLate : LastGradInMemory<Config, false> {
  __device__ __forceinline__ LateFlag begin(const Piece<Config>& piece, int32_t slice,
                                            bool exists) const {
    LateFlag flag;
    uint8_t* const flags = piece.table->last_touched;
    if (flags != nullptr && exists) flag.read(flags + slice);
    return flag;
  }
  __device__ __forceinline__ void end(const Piece<Config>& piece, int32_t slice,
                                      LateFlag flag) const {
    flag.finish(piece.table->last_touched + slice);
  }
};

// All tables are of the class. Gradients follow sum_repeated_grads, which lets them start when the
// index is there: they wait for sums of repeated ids when their first prefixes are multiplied.
template <typename Config, bool kBackward>
__global__ void __launch_bounds__(Config::kThreads, Config::kMinBlocks) share_kernel(TileInput in) {
  static_assert(Config::kKnown && Config::kRank == 32 && Config::kSlices == 1);
  static_assert(Config::kPrefixes == Config::kWarps);
  static_assert(MiddleGrad<Config>::kTiles == MiddleGrad<Config>::kAllTiles);
  extern __shared__ float4 memory[];
  __shared__ int4 both_prefixes[2][Config::kPrefixes + 1];
  __shared__ NextIds<Config::kWarps> next_ids;
  __shared__ uint32_t head_flags[Config::kPrefixes];
  __shared__ TableView table;
  __shared__ int bounds[2];
  float* middle = reinterpret_cast<float*>(memory);
  float* heads = middle + Config::kMiddleValues;
  float* products = heads + Config::kHeadValues;
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;

  copy_view(in.tables[0], &table);
  let_next_kernel_start();
  bool waits = kBackward;
  if (!waits) wait_for_kernel_before();
  const Counts counts = *in.counts;
  if (counts.prefixes == 0 || (in.leaves_dense && counts.dense != 0)) {
    if (waits) wait_for_kernel_before();
    return;
  }
  const bool gather = in.always_gather || counts.gather != 0;
  find_share<Config>(in, counts, blockIdx.x, gridDim.x, thread, bounds);
  __syncthreads();
  const int end = bounds[1];
  int first = bounds[0];
  if (first >= end) {
    if (waits) wait_for_kernel_before();
    return;
  }
  int4* prefixes = both_prefixes[0];
  int4* other = both_prefixes[1];
  int count = min(Config::kPrefixes, end - first);
  if (thread <= count) prefixes[thread] = in.prefixes[first + thread];
  __syncthreads();

  Piece<Config> piece;
  piece.table = &table;
  piece.middle = -1;
  piece.first_head_column = 0;
  piece.first_middle_column = 0;
  MiddleGrad<Config> middle_grad;
  if constexpr (kBackward) middle_grad.clear();
  int number = 0;  // of the table whose view is here
  int run = run_length(prefixes, 0, count);
  HeadLoad<Config> head_load;
  auto read_ids = [&](const int4* of) {
    if (warp < run) next_ids.start(in, warp, of[warp].x, of[warp + 1].x);
  };
#pragma unroll 1
  for (;;) {
    if (prefixes[0].y != number) {  // the same in all threads, as what follows
      if constexpr (kBackward) {
        if (piece.middle >= 0) middle_grad.flush(thread, piece, 0, 0);
        middle_grad.clear();
      }
      piece.middle = -1;
      number = prefixes[0].y;
      __syncthreads();
      copy_view(in.tables[number], &table);
      __syncthreads();
      head_load.read(thread, piece, prefixes, run);
      read_ids(prefixes);
    } else if (piece.middle < 0) {
      head_load.read(thread, piece, prefixes, run);
      read_ids(prefixes);
    }
    if (prefixes[0].z != piece.middle) {
      if constexpr (kBackward) {
        if (piece.middle >= 0) {
          middle_grad.flush(thread, piece, 0, 0);
          middle_grad.clear();
        }
      }
      piece.middle = prefixes[0].z;
      load_middle<Config>(thread, piece, 0, middle);
      if (kBackward && thread == 0 && table.middle_touched != nullptr) {
        table.middle_touched[piece.middle] = 1;
      }
    }
    head_load.store(thread, heads);
    wait_for_copies();
    __syncthreads();
    // The next prefixes, and this warp's first ids, are on their way while prefixes are multiplied.
    const int next = first + run;
    const int next_count = min(Config::kPrefixes, end - next);
    if (next_count > 0 && thread <= next_count) {
      start_copy(other + thread, in.prefixes + next + thread);
    }
    const bool mine = warp < run;
    const int begin = prefixes[warp].x, stop = mine ? prefixes[warp + 1].x : begin;
    const IdLane id = next_ids.get(warp);
    if constexpr (kBackward) {
      FourIds<Config> four;
      const float* const core = static_cast<const float*>(table.last) + lane / 4 * 4;
      auto read = [&] {
        if (mine) four.read(in, id, core, 0, min(32, stop - begin));
      };
      if (!waits) read();
      multiply_prefixes<Config>(thread, heads, middle, products);
      wait_for_copies();
      if (waits) {
        wait_for_kernel_before();
        waits = false;
        read();
      }
      const bool flags = thread < run && table.head_touched != nullptr;
      if (flags) start_copy(head_flags + thread, word_of(table.head_touched + prefixes[thread].w));
      __syncthreads();
      if (mine) {
        gradient_ids_ahead(in, piece, core, id, products + warp * Config::kPrefixStep, begin, stop,
                           LastGradLate<Config>{}, 0, four);
      }
      if (flags) {
        wait_for_copies();
        uint8_t* const flag = table.head_touched + prefixes[thread].w;
        if (byte_of(head_flags[thread], flag) == 0) *flag = 1;
      }
      const int this_run = run;
      if (next_count > 0) {
        run = run_length(other, 0, next_count);
        if (other[0].y == number) head_load.read(thread, piece, other, run);
        read_ids(other);
      }
      __syncthreads();
      middle_grad.add(thread, 0, heads, products, this_run);
      add_head_grad<Config, 2>(thread, piece, prefixes, this_run, middle, products);
      if (next_count <= 0) break;
      __syncthreads();
    } else {
      LastValues values;
      const LastInMemory<Config> last;
      if (mine) {
        last.read(piece, begin + lane / 8 < stop, __shfl_sync(kAllLanes, id.last, lane / 8), 0, 0,
                  &values);
      }
      multiply_prefixes<Config>(thread, heads, middle, products);
      wait_for_copies();
      __syncthreads();
      if (next_count > 0) {
        run = run_length(other, 0, next_count);
        if (other[0].y == number) head_load.read(thread, piece, other, run);
        read_ids(other);
      }
      if (mine) {
        lookup_ids_ahead(in, id, piece, products + warp * Config::kPrefixStep, begin, stop, gather,
                         last, values);
      }
      if (next_count <= 0) break;
    }
    int4* const done = prefixes;
    prefixes = other;
    other = done;
    first = next;
    count = next_count;
  }
  if constexpr (kBackward) {
    if (piece.middle >= 0) middle_grad.flush(thread, piece, 0, 0);
  }
}

// As many blocks as run at the same time.
template <typename Config, bool kBackward>
void launch_shares(const TileRun& run, const TileInput& in) {
  auto kernel = share_kernel<Config, kBackward>;
  constexpr size_t kBytes = Config::shared_bytes(kBackward);
  HKV_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                      static_cast<int>(kBytes)));
  const auto blocks = static_cast<unsigned>(run.multiprocessors * Config::kMinBlocks);
  launch_chained(kernel, {dim3(blocks), Config::kThreads, kBytes}, run.stream, in);
}

}  // namespace torchrec_hkv::tensor_train::cuda
