// Lookup and gradients where prefixes have few ids: each block has an equal share of the sorted
// prefixes, so that all blocks run at the same time and a middle slice is read, and its gradient
// added in memory, once for each block that has it. A warp has a prefix of a tile. What the next
// tile needs is read while this one is worked on: what takes the time of a tile is a chain of reads
// and products, not their number.
#pragma once

#include "tensor_train/resident_kernel.cuh"

namespace torchrec_hkv::tensor_train::cuda {

// The first 32 ids of a warp's prefix, an id a lane, that were read before; others in memory.
struct AheadIds {
  int32_t begin;
  int2 mine;

  __device__ __forceinline__ int2 read(const TileInput& in, int32_t distinct) const {
    if (distinct - begin < 32) return mine;
    return make_int2(in.lasts[distinct], static_cast<int>(in.sources[distinct]));
  }
};

// A flag that is set where it is not yet: read here, looked at when other work is done.
struct LateFlag {
  uint8_t* at = nullptr;
  uint32_t value = 1;

  __device__ __forceinline__ void read(uint8_t* flag) {
    at = flag;
    value = __ldcg(flag);
  }
  __device__ __forceinline__ void finish() {
    asm volatile("" : "+r"(value));  // not earlier
    if (value == 0) *at = 1;
  }
};

// As lookup_ids, for a prefix whose first four slices of the last core are in `values` already.
template <typename Config>
__device__ __forceinline__ void lookup_share(const TileInput& in, const AheadIds& ids,
                                             const Piece<Config>& piece, const float* prefix,
                                             int begin, int end, bool gather, LastValues& values) {
  constexpr int kProducts = Config::kProducts;
  const int lane = threadIdx.x % 32, row = lane / 4, column = lane % 4;
  const RowPlace<Config> place(piece);
  const LastInMemory<Config> last;
  PrefixOperand<kProducts> held;
  held.template read<Config>(prefix);
#pragma unroll 1
  for (int base = begin; base < end; base += 32) {
    IdLane id;
    id.read(in, ids, base + lane, base + lane < end);
    const int limit = min(32, end - base);
    auto read = [&](int from) {
      last.read(piece, from + row / 2 < limit, __shfl_sync(kAllLanes, id.last, from + row / 2), 0,
                0, &values);
    };
    if (base > begin) read(0);
#pragma unroll 1
    for (int from = 0; from < limit; from += 4) {
      const uint32_t source = __shfl_sync(kAllLanes, id.source, from + column);
      float sums[2][4] = {};
      add_rows(sums, held, values);
      if (from + 4 < limit) read(from + 4);
      if (from + column < limit) {
        put_rows<Config>(in, place, 0, 4, base + from + column, source, gather, sums);
      }
    }
  }
}

// As gradient_ids, for a prefix whose first four ids have been read already.
template <typename Config>
__device__ __forceinline__ void gradient_share(const TileInput& in, const AheadIds& ids,
                                               const Piece<Config>& piece, float* prefix, int begin,
                                               int end, FourGrads<Config>& grads,
                                               FourLasts<Config>& lasts) {
  constexpr int kProducts = Config::kProducts;
  const int lane = threadIdx.x % 32, row = lane / 4, column = lane % 4;
  const RowPlace<Config> place(piece);
  const LastGradInMemory<Config, false> last_grad;
  const float* const its_columns =
      prefix + column * Config::kColumnStep + row / 2 * 4 + row % 2 * 16;
  float sums[4][4] = {};
#pragma unroll 1
  for (int base = begin; base < end; base += 32) {
    IdLane id;
    id.read(in, ids, base + lane, base + lane < end);
    LateFlag flag;
    if (piece.table->last_touched != nullptr && base + lane < end) {
      flag.read(piece.table->last_touched + id.last);
    }
    const int limit = min(32, end - base);
#pragma unroll 1
    for (int from = 0; from < limit; from += 4) {
      if (base + from > begin) {
        grads.read(in, piece, place, id, 0, base, from, limit);
        lasts.read(piece, id, 0, 0, from);
      }
#pragma unroll
      for (int s = 0; s < 2; ++s) {
        const auto a0 = rounded_operand<kProducts>(grads.low[2 * s]);
        const auto a1 = rounded_operand<kProducts>(grads.high[2 * s]);
        const auto a2 = rounded_operand<kProducts>(grads.low[2 * s + 1]);
        const auto a3 = rounded_operand<kProducts>(grads.high[2 * s + 1]);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          multiply_add(sums[j], a0, a1, a2, a3, rounded_operand<kProducts>(lasts.b[2 * s][j]),
                       rounded_operand<kProducts>(lasts.b[2 * s + 1][j]));
        }
      }
      float values[4][4];
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        *reinterpret_cast<float4*>(values[e]) =
            *reinterpret_cast<const float4*>(its_columns + e * Config::kRowStep);
      }
      float d[4][4] = {};
#pragma unroll
      for (int s = 0; s < 2; ++s) {
        const auto a0 = rounded_operand<kProducts>(grads.other[2 * s].x);
        const auto a1 = rounded_operand<kProducts>(grads.other[2 * s].y);
        const auto a2 = rounded_operand<kProducts>(grads.other[2 * s + 1].x);
        const auto a3 = rounded_operand<kProducts>(grads.other[2 * s + 1].y);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          multiply_add(d[j], a0, a1, a2, a3, operand<kProducts>(values[2 * s][j]),
                       operand<kProducts>(values[2 * s + 1][j]));
        }
      }
      const int32_t other_last = __shfl_sync(kAllLanes, id.last, from + row / 2);
      last_grad.add(piece, from + row / 2 < limit, other_last, row % 2 * 2, 4 * column, d);
    }
    flag.finish();
  }
  __syncwarp();  // all lanes have read the prefix
  float* to = prefix + row / 4 * Config::kRowStep + row % 4 * Config::kColumnStep + 8 * column;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      *reinterpret_cast<float4*>(to + half * 2 * Config::kRowStep + 4 * i) =
          prepared<kProducts>(make_float4(sums[0][2 * half + i], sums[1][2 * half + i],
                                          sums[2][2 * half + i], sums[3][2 * half + i]));
    }
  }
}

// All tables are of the class. Gradients follow sum_repeated_grads, which lets them start when the
// index is there: they wait for sums of repeated ids when their first prefixes are multiplied.
template <typename Config, bool kBackward>
__global__ void __launch_bounds__(Config::kThreads, Config::kMinBlocks) share_kernel(TileInput in) {
  static_assert(Config::kKnown && Config::kRank == 32 && Config::kSlices == 1);
  static_assert(Config::kPrefixes == Config::kWarps);
  static_assert(MiddleGrad<Config>::kTiles == MiddleGrad<Config>::kAllTiles);
  extern __shared__ float4 memory[];
  __shared__ int4 both_prefixes[2][Config::kPrefixes + 1];
  __shared__ TableView table;
  __shared__ int bounds[2];
  float* middle = reinterpret_cast<float*>(memory);
  float* heads = middle + Config::kMiddleValues;
  float* products = heads + Config::kHeadValues;
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;

  copy_view(in.tables[0], &table);
  start_next();
  bool waits = kBackward;
  if (!waits) wait_for_earlier();
  const Counts counts = *in.counts;
  if (counts.prefixes == 0) {
    if (waits) wait_for_earlier();
    return;
  }
  const bool gather = in.always_gather || counts.gather != 0;
  find_share<Config>(in, counts, blockIdx.x, gridDim.x, thread, bounds);
  __syncthreads();
  const int end = bounds[1];
  int first = bounds[0];
  if (first >= end) {
    if (waits) wait_for_earlier();
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
  AheadIds ids = {};
  auto read_ids = [&](const int4* of) {
    ids.begin = of[warp].x;
    if (warp < run && lane < of[warp + 1].x - ids.begin) {
      ids.mine =
          make_int2(in.lasts[ids.begin + lane], static_cast<int>(in.sources[ids.begin + lane]));
    }
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
    }
    head_load.store(thread, heads);
    __syncthreads();
    // The next prefixes, and this warp's first ids, are on their way while prefixes are multiplied.
    const int next = first + run;
    const int next_count = min(Config::kPrefixes, end - next);
    int4 ahead = make_int4(0, 0, 0, 0);
    if (next_count > 0 && thread <= next_count) ahead = in.prefixes[next + thread];
    const bool mine = warp < run;
    const int begin = prefixes[warp].x, stop = mine ? prefixes[warp + 1].x : begin;
    IdLane id;
    id.read(in, ids, begin + lane, begin + lane < stop);
    if constexpr (kBackward) {
      FourGrads<Config> grads;
      FourLasts<Config> lasts;
      auto read = [&] {
        if (!mine) return;
        const RowPlace<Config> place(piece);
        grads.read(in, piece, place, id, 0, begin, 0, min(32, stop - begin));
        lasts.read(piece, id, 0, 0, 0);
      };
      if (!waits) read();
      multiply_prefixes<Config>(thread, heads, middle, products);
      if (next_count > 0 && thread <= next_count) other[thread] = ahead;
      if (waits) {
        wait_for_earlier();
        waits = false;
        read();
      }
      LateFlag head_flag, middle_flag;
      if (thread < run) {
        if (table.head_touched != nullptr) head_flag.read(table.head_touched + prefixes[thread].w);
        if (table.middle_touched != nullptr && thread == 0) {
          middle_flag.read(table.middle_touched + piece.middle);
        }
      }
      __syncthreads();
      if (mine) {
        gradient_share(in, ids, piece, products + warp * Config::kPrefixStep, begin, stop, grads,
                       lasts);
      }
      head_flag.finish();
      middle_flag.finish();
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
      if (mine) {
        const LastInMemory<Config> last;
        last.read(piece, begin + lane / 8 < stop, __shfl_sync(kAllLanes, id.last, lane / 8), 0, 0,
                  &values);
      }
      multiply_prefixes<Config>(thread, heads, middle, products);
      if (next_count > 0 && thread <= next_count) other[thread] = ahead;
      __syncthreads();
      const AheadIds these = ids;
      if (next_count > 0) {
        run = run_length(other, 0, next_count);
        if (other[0].y == number) head_load.read(thread, piece, other, run);
        read_ids(other);
      }
      if (mine) {
        lookup_share(in, these, piece, products + warp * Config::kPrefixStep, begin, stop, gather,
                     values);
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
