// One warp processes the distinct ids of one prefix, four at a time, for q of at most 4. The next
// four are loaded while results are stored. tile_ids.cuh has the same products for any shape.
//
// Loaded values stay in the registers of the load until they are used: a copy, or a product with a
// factor, would wait for the load too early.
#pragma once

#include "tensor_train/cuda/contract/tile_ids.cuh"

namespace torchrec_hkv::tensor_train::cuda {

// Copies the first 32 ids of each warp's next prefix to shared memory during the current prefix. A
// lane reads only the ids that it has copied.
template <int kWarps>
struct NextIds {
  int32_t lasts[kWarps][32];
  uint32_t sources[kWarps][32];

  // Starts copies for a prefix with the distinct ids [begin, end).
  __device__ __forceinline__ void start(const TileInput& in, int warp, int32_t begin, int32_t end) {
    const int lane = threadIdx.x % 32;
    if (begin + lane >= end) return;
    start_copy(&lasts[warp][lane], in.lasts + begin + lane);
    start_copy(&sources[warp][lane], in.sources + begin + lane);
  }
  // Called after wait_for_copies. Values of lanes without an id are not used.
  __device__ __forceinline__ IdLane get(int warp) const {
    IdLane id;
    id.last = lasts[warp][threadIdx.x % 32];
    id.source = sources[warp][threadIdx.x % 32];
    return id;
  }
};

// The gradient of a distinct id's row if places are in units of four values.
__device__ __forceinline__ const float* unit_row(const TileInput& in, uint32_t source) {
  const bool slot = (source & kSlotBit) != 0;
  const char* const base = reinterpret_cast<const char*>(slot ? in.slot_grads : in.grad);
  const uint32_t bytes = (slot ? static_cast<uint32_t>(in.widest) : 4u) * 4u;
  return reinterpret_cast<const float*>(base + static_cast<uint64_t>(source & ~kSlotBit) * bytes);
}

// Gradients of the rows of four distinct ids and their slices of the last core.
template <typename Config>
struct FourIds {
  static_assert(Config::kSlice == 32);
  float4 low, high;  // for the id of this lane's column: (head column, middle column) by row
  float2 other[4];   // for the id of row / 2: two columns; middle column by column
  float4 lasts[4];   // for the id of column: four ranks by row

  // Reads ids from `from` on, of the `limit` ids in the lanes. Beyond them, the last id repeats.
  __device__ __forceinline__ void read(const TileInput& in, const BlockTask<Config>& task,
                                       const IdLane& id, int from, int limit) {
    const int lane = threadIdx.x % 32, row = lane / 4, column = lane % 4;
    const int of_column = min(from + column, limit - 1), of_row = min(from + row / 2, limit - 1);
    const uint32_t source = __shfl_sync(kAllLanes, id.source, of_column);
    const uint32_t other_source = __shfl_sync(kAllLanes, id.source, of_row);
    const int32_t last = __shfl_sync(kAllLanes, id.last, of_column);
    const RowOffsets<Config> place(task);
    const int32_t last_q = task.last_q(), last_r = task.last_r();
    const float* const at = unit_row(in, source) + place.first;
    low = load_row<Config>(at, place.width, place.has_first ? last_q : 0);
    high = load_row<Config>(at + place.step, place.width, place.has_second ? last_q : 0);
    const float* const line =
        unit_row(in, other_source) + (column * task.middle_step() + row % 2 * 2);
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int remaining = task.has_head(e) && task.has_middle(column) ? last_q - row % 2 * 2 : 0;
      other[e] = load_row_pair<Config>(line + e * task.head_step(), place.width, remaining);
    }
    const float* const slice =
        static_cast<const float*>(task.table->last) +
        (static_cast<size_t>(static_cast<uint32_t>(last)) * static_cast<uint32_t>(last_q * last_r) +
         row * 4);
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const bool exists =
          (Config::kKnownQ || e < last_q) && (Config::kKnownRanks || row * 4 < last_r);
      lasts[e] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      if (exists) lasts[e] = __ldg(reinterpret_cast<const float4*>(slice + e * last_r));
    }
  }

  // Zeroes ids from `remaining` on, which do not exist.
  __device__ __forceinline__ void cut(int remaining) {
    const int lane = threadIdx.x % 32, row = lane / 4, column = lane % 4;
    if (column >= remaining) low = high = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    if (row / 2 >= remaining) {
#pragma unroll
      for (int e = 0; e < 4; ++e) other[e] = make_float2(0.0f, 0.0f);
    }
  }

  // first: the first of the four distinct ids, of which `remaining` exist.
  __device__ __forceinline__ void scale(const float* factors, int first, int remaining) {
    const int lane = threadIdx.x % 32, row = lane / 4, column = lane % 4;
    const float factor = factors[first + min(column, remaining - 1)];
    const float other_factor = factors[first + min(row / 2, remaining - 1)];
    low = scaled(low, factor);
    high = scaled(high, factor);
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      other[e].x *= other_factor;
      other[e].y *= other_factor;
    }
  }
};

// Like lookup_ids, for a prefix whose first 32 ids are in `id` and whose first four slices of the
// last core are already in `values`.
template <typename Config, typename Last>
__device__ __forceinline__ void lookup_ids_ahead(const TileInput& in, IdLane id,
                                                 const BlockTask<Config>& task, const float* prefix,
                                                 int begin, int end, bool gather, const Last& last,
                                                 LastValues& values) {
  constexpr int kProducts = Config::kProducts;
  const int lane = threadIdx.x % 32, row = lane / 4, column = lane % 4;
  const RowOffsets<Config> place(task);
  const bool more_columns = Config::kWholeLasts || task.last_q() > 2;
  const bool more_ranks = Config::kKnownRanks || task.last_r() > 16;
  PrefixOperand<kProducts> operands;
  operands.template read<Config>(prefix);
#pragma unroll 1
  for (int base = begin; base < end; base += 32) {
    const int limit = min(32, end - base);
    auto read = [&](int from) {
      const int at = min(from + row / 2, limit - 1);  // beyond the ids, the last id repeats
      last.read(task, from + row / 2 < limit, __shfl_sync(kAllLanes, id.last, at), 0, 0, &values);
    };
    if (base > begin) {
      id.read(in, UnstagedIds{}, base + lane, lane < limit);
      read(0);
    }
#pragma unroll 1
    for (int from = 0; from < limit; from += 4) {
      const uint32_t source = __shfl_sync(kAllLanes, id.source, from + column);
      float sums[2][4] = {};
      add_rows(sums, operands, values, more_columns, more_ranks);
      if (from + 4 < limit) read(from + 4);
      if (from + column < limit) {
        put_rows<Config>(in, place, 0, task.last_q(), base + from + column, source, gather, sums);
      }
    }
  }
}

// Processes gradients of the distinct ids [begin, end) of a prefix, for one slice of ranks. The
// first 32 ids are in `id`, and the first four have been loaded. The gradient of the prefix
// replaces the prefix in shared memory; gradients of the last core go to last_grad.
template <typename Config, typename LastGrad>
__device__ __forceinline__ void gradient_ids_ahead(const TileInput& in,
                                                   const BlockTask<Config>& task, IdLane id,
                                                   float* prefix, int begin, int end,
                                                   const LastGrad& last_grad, int first_r,
                                                   FourIds<Config>& four) {
  constexpr int kProducts = Config::kProducts;
  const int lane = threadIdx.x % 32, row = lane / 4, column = lane % 4;
  const bool more_columns = Config::kWholeLasts || task.last_q() > 2;
  float sums[4][4] = {};
#pragma unroll 1
  for (int base = begin; base < end; base += 32) {
    const int limit = min(32, end - base);
    if (base > begin) {
      if (lane < limit) {
        id.last = in.lasts[base + lane];
        id.source = in.sources[base + lane];
      }
      four.read(in, task, id, 0, limit);
    }
#pragma unroll 1
    for (int from = 0; from < limit; from += 4) {
      if (from + 4 > limit) four.cut(limit - from);
      if (in.factors != nullptr) four.scale(in.factors, base + from, limit - from);
      add_prefix_grad<kProducts>(sums, four.low, four.high, four.lasts, more_columns);
      float4 values[4];
      read_columns<Config>(prefix, values);
      float d[4][4] = {};
      last_grad_of<kProducts>(d, four.other, values);
      const int32_t other_last = __shfl_sync(kAllLanes, id.last, from + row / 2);
      if (from + 4 < limit) four.read(in, task, id, from + 4, limit);
      last_grad.add(task, from + row / 2 < limit, other_last, row % 2 * 2, first_r + 4 * column, d);
    }
  }
  __syncwarp();  // all lanes have read the prefix
  store_prefix_grad<Config>(sums, prefix);
}

}  // namespace torchrec_hkv::tensor_train::cuda
