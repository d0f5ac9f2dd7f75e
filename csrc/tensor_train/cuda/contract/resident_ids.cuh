// Processes the distinct ids of one prefix if each block keeps the last core, or its gradient, in
// shared memory. Computes the gradient of the prefix from the rows' gradients and the last core,
// and gradients of the last core from the rows' gradients and the prefix. Four ids are processed at
// a time; loads of eight more are in flight.
#pragma once

#include "tensor_train/cuda/contract/prefetched_ids.cuh"

namespace torchrec_hkv::tensor_train::cuda {

// Gradients of the rows of four distinct ids; after `limit` the last id repeats. A lane has (head
// column, middle column) by row, for the id of its column.
struct FourRowsByColumn {
  float4 low, high;

  template <typename Config>
  __device__ __forceinline__ void read(const TileInput& in, const BlockTask<Config>& task,
                                       const IdLane& id, int from, int limit) {
    const int column = threadIdx.x % 4;
    const uint32_t source = __shfl_sync(kAllLanes, id.source, min(from + column, limit - 1));
    const RowOffsets<Config> place(task);
    const int32_t last_q = task.last_q();
    const float* const at = unit_row(in, source) + place.first;
    low = load_row<Config>(at, place.width, place.has_first ? last_q : 0);
    high = load_row<Config>(at + place.step, place.width, place.has_second ? last_q : 0);
  }
  // Zeroes ids that do not exist: `remaining` exist. first: the first of the four distinct ids.
  __device__ __forceinline__ void finish(const float* factors, int first, int remaining) {
    const int column = threadIdx.x % 4;
    if (remaining < 4 && column >= remaining) low = high = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    if (factors == nullptr) return;
    const float factor = factors[first + min(column, remaining - 1)];
    low = scaled(low, factor);
    high = scaled(high, factor);
  }
};

// The same, but a lane has two columns of the id of row / 2, middle column by column.
struct FourRowsByRow {
  float2 other[4];

  template <typename Config>
  __device__ __forceinline__ void read(const TileInput& in, const BlockTask<Config>& task,
                                       const IdLane& id, int from, int limit) {
    const int lane = threadIdx.x % 32, row = lane / 4, column = lane % 4;
    const uint32_t source = __shfl_sync(kAllLanes, id.source, min(from + row / 2, limit - 1));
    const float* const at = unit_row(in, source) + (column * task.middle_step() + row % 2 * 2);
    const int remaining = task.has_middle(column) ? task.last_q() - row % 2 * 2 : 0;
    const int width = Config::kWholeLasts ? 4 : task.row_width;
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      other[e] =
          load_row_pair<Config>(at + e * task.head_step(), width, task.has_head(e) ? remaining : 0);
    }
  }
  __device__ __forceinline__ void finish(const float* factors, int first, int remaining) {
    const int row = threadIdx.x % 32 / 4;
    if (remaining < 4 && row / 2 >= remaining) {
#pragma unroll
      for (int e = 0; e < 4; ++e) other[e] = make_float2(0.0f, 0.0f);
    }
    if (factors == nullptr) return;
    const float factor = factors[first + min(row / 2, remaining - 1)];
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      other[e].x *= factor;
      other[e].y *= factor;
    }
  }
};

// Loads the distinct ids of a prefix eight ahead.
template <typename Config, typename Rows>
struct PrefetchedRows {
  const BlockTask<Config>& task;
  Rows first, second;

  __device__ __forceinline__ explicit PrefetchedRows(const BlockTask<Config>& of) : task(of) {}

  // count: number of ids of the prefix, of which the first 32 are in `id`.
  __device__ __forceinline__ void start(const TileInput& in, const IdLane& id, int count) {
    const int limit = min(32, count);
    if (limit > 0) first.read(in, task, id, 0, limit);
    if (limit > 4) second.read(in, task, id, 4, limit);
  }

  // After start, calls use(rows, ids, from, limit) for the distinct ids [begin, end), four at a
  // time: those from `from` on, of the `limit` in `ids`.
  template <typename Use>
  __device__ __forceinline__ void each_four(const TileInput& in, IdLane id, int begin, int end,
                                            const Use& use) {
    const int lane = threadIdx.x % 32;
#pragma unroll 1
    for (int base = begin; base < end; base += 32) {
      const int limit = min(32, end - base);
      if (base > begin) {
        id.read(in, UnstagedIds{}, base + lane, lane < limit);
        start(in, id, limit);
      }
#pragma unroll 1
      for (int from = 0; from < limit; from += 8) {
        first.finish(in.factors, base + from, limit - from);
        use(first, id, from, limit);
        if (from + 8 < limit) first.read(in, task, id, from + 8, limit);
        if (from + 4 >= limit) break;
        second.finish(in.factors, base + from + 4, limit - from - 4);
        use(second, id, from + 4, limit);
        if (from + 12 < limit) second.read(in, task, id, from + 12, limit);
      }
    }
  }
};

// A slice of ranks of the last core in shared memory, [lasts][4][32]. Columns that do not exist are
// 0. 16-byte units are swizzled by the last column, and lanes of different columns read different
// last columns at a time, so that they read different banks for any ids.
template <typename Config>
struct LastSlice {
  static constexpr int kUnits = Config::kSlice;  // units of 4 values in a slice of the core
  const float* values;
  int32_t count;  // number of ranks in the slice

  __device__ __forceinline__ static int place_of(int unit) {
    return unit ^ (unit / (Config::kSlice / 4) % 4 * 2);
  }
  // to[e]: four ranks by row of last column e ^ column.
  __device__ __forceinline__ void read(int32_t slice, float4 (&to)[4]) const {
    static_assert(Config::kSlice == 32);
    const int lane = threadIdx.x % 32, row = lane / 4, column = lane % 4;
    const int at = slice * 128 + (column * 32 | (row ^ column * 2) * 4);
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      to[e] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      if (Config::kExact || 4 * row < count) {
        to[e] = *reinterpret_cast<const float4*>(values + (at ^ (e * 32 | e * 8)));
      }
    }
  }
};

// Moves v[e ^ column] to v[e].
__device__ __forceinline__ float4 by_column(float4 v) {
  const int column = threadIdx.x % 4;
  if (column % 2 != 0) v = make_float4(v.y, v.x, v.w, v.z);
  if (column / 2 != 0) v = make_float4(v.z, v.w, v.x, v.y);
  return v;
}

// Computes the gradient of a prefix, [4 head columns][4 middle columns][32], from its ids, in
// shared memory.
template <typename Config>
__device__ __forceinline__ void prefix_grad(const TileInput& in, const IdLane& id, int begin,
                                            int end, const LastSlice<Config>& last,
                                            PrefetchedRows<Config, FourRowsByColumn>& rows,
                                            float* prefix) {
  constexpr int kProducts = Config::kProducts;
  const int column = threadIdx.x % 4;
  float sums[4][4] = {};
  rows.each_four(in, id, begin, end,
                 [&](const FourRowsByColumn& four, const IdLane& ids, int from, int limit) {
                   float4 lasts[4];
                   last.read(__shfl_sync(kAllLanes, ids.last, min(from + column, limit - 1)),
                             lasts);
                   const float4 low = by_column(four.low), high = by_column(four.high);
                   add_prefix_grad<kProducts>(sums, low, high, lasts);
                 });
  store_prefix_grad<Config>(sums, prefix);
}

// Adds the gradients of the last core's slices of a prefix's ids.
template <typename Config, typename LastGrad>
__device__ __forceinline__ void last_grads(const TileInput& in, const IdLane& id, int begin,
                                           int end, const float* prefix,
                                           PrefetchedRows<Config, FourRowsByRow>& rows,
                                           const LastGrad& last_grad) {
  constexpr int kProducts = Config::kProducts;
  const int row = threadIdx.x % 32 / 4;
  float4 values[4];
  read_columns<Config>(prefix, values);
  rows.each_four(in, id, begin, end,
                 [&](const FourRowsByRow& four, const IdLane& ids, int from, int limit) {
                   float d[4][4] = {};
                   last_grad_of<kProducts>(d, four.other, values);
                   const int at = from + row / 2;
                   last_grad.add(at < limit, __shfl_sync(kAllLanes, ids.last, at), row % 2 * 2, d);
                 });
}

}  // namespace torchrec_hkv::tensor_train::cuda
