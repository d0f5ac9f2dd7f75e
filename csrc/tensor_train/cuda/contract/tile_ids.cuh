// One warp processes the distinct ids of one prefix, four at a time. It computes rows from the
// prefix and slices of the last core, and gradients of both from gradients of rows. Columns are
// permuted so that all reads and writes in memory are of 16 bytes.
#pragma once

#include "tensor_train/cuda/contract/id_products.cuh"
#include "tensor_train/cuda/contract/staged_ids.cuh"
#include "tensor_train/cuda/contract/tensor_core.cuh"
#include "tensor_train/cuda/contract/tile_config.cuh"
#include "tensor_train/cuda/index/index.cuh"

namespace torchrec_hkv::tensor_train::cuda {

// 32 columns of a prefix as an operand: 16 rows (head column, middle column), 32 values deep.
template <int kProducts>
struct PrefixOperand {
  Operand<kProducts> a[4][4];

  // from: the first of the columns.
  template <typename Config>
  __device__ __forceinline__ void read(const float* from) {
    const int row = threadIdx.x % 32 / 4, column = threadIdx.x % 4;
    from += row / 4 * Config::kRowStep + row % 4 * Config::kColumnStep + column * 4;
    float low[8], high[8];
    *reinterpret_cast<float4*>(low) = *reinterpret_cast<const float4*>(from);
    *reinterpret_cast<float4*>(low + 4) = *reinterpret_cast<const float4*>(from + 16);
    from += 2 * Config::kRowStep;
    *reinterpret_cast<float4*>(high) = *reinterpret_cast<const float4*>(from);
    *reinterpret_cast<float4*>(high + 4) = *reinterpret_cast<const float4*>(from + 16);
#pragma unroll
    for (int s = 0; s < 4; ++s) {
      a[s][0] = operand<kProducts>(low[2 * s]);
      a[s][1] = operand<kProducts>(high[2 * s]);
      a[s][2] = operand<kProducts>(low[2 * s + 1]);
      a[s][3] = operand<kProducts>(high[2 * s + 1]);
    }
  }
};

// 32 ranks of four slices of the last core, with 4 columns each. A lane has the slice of the id of
// row / 2, of column last_column + row % 2 and, in the second part, two columns further: four ranks
// from 4 * column on, and four ranks 16 further.
struct LastValues {
  float b[2][8];
};

// The last core in memory.
template <typename Config>
struct LastInMemory {
  // slice: slice of the id of this lane's row / 2, which is not read if it does not exist. r: the
  // first rank.
  __device__ __forceinline__ void read(const BlockTask<Config>& task, bool exists, int32_t slice,
                                       int32_t last_column, int r, LastValues* to) const {
    const int row = threadIdx.x % 32 / 4, column = threadIdx.x % 4;
    const TableCuda& table = *task.table;
    const int32_t last_r = task.last_r();
    const int within = r + column * 4;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int at = last_column + half * 2 + row % 2;
      if (!exists || !(Config::kWholeLasts || at < task.last_q())) {
        *reinterpret_cast<float4*>(to->b[half]) = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        *reinterpret_cast<float4*>(to->b[half] + 4) = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        continue;
      }
      const size_t first =
          static_cast<size_t>(slice) * (task.last_q() * last_r) + at * last_r + within;
      const int count = last_r - within;
      *reinterpret_cast<float4*>(to->b[half]) =
          load_four<Config>(table.last, table.last_type, first, count);
      *reinterpret_cast<float4*>(to->b[half] + 4) =
          load_four<Config>(table.last, table.last_type, first + 16, count - 16);
    }
  }
};

// more_columns: whether there are more than two last columns; more_ranks: whether there are more
// than 16 ranks.
template <int kProducts>
__device__ __forceinline__ void add_rows(float (&sums)[2][4],
                                         const PrefixOperand<kProducts>& prefix,
                                         const LastValues& last, bool more_columns,
                                         bool more_ranks) {
  float more[2][4] = {};
#pragma unroll
  for (int s = 0; s < 4; ++s) {
    if (s >= 2 && !more_ranks) break;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (half > 0 && !more_columns) break;
      float (&to)[4] = kProducts == 1 && s % 2 != 0 ? more[half] : sums[half];
      multiply_add(to, more[half], prefix.a[s][0], prefix.a[s][1], prefix.a[s][2], prefix.a[s][3],
                   rounded_operand<kProducts>(last.b[half][2 * s]),
                   rounded_operand<kProducts>(last.b[half][2 * s + 1]));
    }
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int i = 0; i < 4; ++i) sums[half][i] += more[half][i];
  }
}

// The offsets in a row of a lane's values at its (head column, middle column), and of its values
// two head columns further.
template <typename Config>
struct RowOffsets {
  int32_t first;
  int32_t step;   // distance of the second offset
  int32_t width;  // number of aligned values
  bool has_first;
  bool has_second;

  __device__ __forceinline__ explicit RowOffsets(const BlockTask<Config>& task) {
    const int row = threadIdx.x % 32 / 4;
    first = (task.head_column() + row / 4) * task.head_step() +
            (task.middle_column() + row % 4) * task.middle_step();
    step = 2 * task.head_step();
    width = Config::kWholeLasts ? 4 : task.row_width;
    has_first = task.has_head(row / 4) && task.has_middle(row % 4);
    has_second = task.has_head(row / 4 + 2) && task.has_middle(row % 4);
  }
};

__device__ __forceinline__ float4 scaled(float4 v, float factor) {
  return make_float4(v.x * factor, v.y * factor, v.z * factor, v.w * factor);
}

template <typename Config>
__device__ __forceinline__ void put_rows(const TileInput& in, const RowOffsets<Config>& place,
                                         int32_t last_column, int count, int32_t distinct,
                                         uint32_t source, bool gather, const float (&sums)[2][4]) {
  const int first_count = Config::kExact || place.has_first ? count : 0;
  const int second_count = Config::kExact || place.has_second ? count : 0;
  float4 first = make_float4(sums[0][0], sums[0][1], sums[1][0], sums[1][1]);
  float4 second = make_float4(sums[0][2], sums[0][3], sums[1][2], sums[1][3]);
  if (gather || (source & kSlotBit) != 0) {
    const uint32_t slot = gather ? static_cast<uint32_t>(distinct) : source & ~kSlotBit;
    float* to = in.slot_rows + static_cast<size_t>(slot) * in.widest + place.first + last_column;
    store_row<Config>(to, first, place.width, first_count);
    store_row<Config>(to + place.step, second, place.width, second_count);
  } else {
    float* to = in.out + static_cast<size_t>(source) * in.unit + place.first + last_column;
    if (in.factors != nullptr) {
      const float factor = in.factors[distinct];
      first = scaled(first, factor);
      second = scaled(second, factor);
    }
    if (in.store) {
      store_row<Config>(to, first, place.width, first_count);
      store_row<Config>(to + place.step, second, place.width, second_count);
    } else {
      add_row<Config>(to, first, place.width, first_count);
      add_row<Config>(to + place.step, second, place.width, second_count);
    }
  }
}

// Computes the rows of distinct ids [begin, end) of a prefix. Adds rows of ids that occur once to
// the output, and stores others by slot; if bags gather, stores all by number. chunks: number of
// chunks of 32 ranks.
template <typename Config, typename Ids, typename Last>
__device__ __forceinline__ void lookup_ids(const TileInput& in, const Ids& ids,
                                           const BlockTask<Config>& task, const float* prefix,
                                           int chunks, int begin, int end, bool gather,
                                           const Last& last) {
  constexpr int kProducts = Config::kProducts;
  constexpr int kChunks = Config::kRank / 32;
  // The prefix, and the last values of the next four ids, are kept in registers if they fit.
  constexpr bool kHolds = kChunks <= 2;
  constexpr int kHeld = kHolds ? kChunks : 1;
  const int lane = threadIdx.x % 32, row = lane / 4, column = lane % 4;
  const RowOffsets<Config> place(task);
  PrefixOperand<kProducts> operands[kHeld];
  LastValues values[kHeld];
  if constexpr (kHolds) {
#pragma unroll
    for (int c = 0; c < kChunks; ++c) operands[c].template read<Config>(prefix + c * 32);
  }
#pragma unroll 1
  for (int32_t last_column = 0; last_column < task.last_q(); last_column += 4) {
    const int count = task.last_q() - last_column;
    const bool more_columns = Config::kWholeLasts || count > 2;
    const auto more_ranks = [&](int chunk) {
      return Config::kKnownRanks || task.last_r() > chunk * 32 + 16;
    };
    for (int base = begin; base < end; base += 32) {
      IdLane id;
      id.read(in, ids, base + lane, base + lane < end);
      const int limit = min(32, end - base);
      auto read = [&](int from) {
        const int32_t slice = __shfl_sync(kAllLanes, id.last, from + row / 2);
#pragma unroll
        for (int c = 0; c < kHeld; ++c) {
          last.read(task, from + row / 2 < limit, slice, last_column, c * 32, values + c);
        }
      };
      if constexpr (kHolds) read(0);
      for (int from = 0; from < limit; from += 4) {
        const uint32_t source = __shfl_sync(kAllLanes, id.source, from + column);
        float sums[2][4] = {};
        if constexpr (kHolds) {
#pragma unroll
          for (int c = 0; c < kChunks; ++c) {
            add_rows(sums, operands[c], values[c], more_columns, more_ranks(c));
          }
          if (from + 4 < limit) read(from + 4);
        } else {
          const int32_t slice = __shfl_sync(kAllLanes, id.last, from + row / 2);
#pragma unroll 2
          for (int c = 0; c < chunks; ++c) {
            constexpr int kInSlice = Config::kSlice / 32;
            operands[0].template read<Config>(prefix + c / kInSlice * Config::kSliceStep +
                                              c % kInSlice * 32);
            last.read(task, from + row / 2 < limit, slice, last_column, c * 32, values);
            add_rows(sums, operands[0], values[0], more_columns, more_ranks(c));
          }
        }
        if (from + column < limit) {
          put_rows<Config>(in, place, last_column, count, base + from + column, source, gather,
                           sums);
        }
      }
    }
  }
}

// The gradient of the row of a distinct id.
template <typename Config>
__device__ __forceinline__ const float* grad_row(const TileInput& in, uint32_t source) {
  const bool slot = (source & kSlotBit) != 0;
  const size_t step = slot ? in.widest : Config::kKnownRanks ? 4 : in.unit;
  return (slot ? in.slot_grads : in.grad) + static_cast<size_t>(source & ~kSlotBit) * step;
}

// Adds gradients of the last core in memory.
template <typename Config>
struct LastGradInMemory {
  // Adds this lane's values of d: four ranks from r on and four from r + 16 on, of two columns of a
  // slice of the last core.
  __device__ __forceinline__ void add(const BlockTask<Config>& task, bool exists, int32_t slice,
                                      int32_t last_column, int r, const float (&d)[4][4]) const {
    if (!exists) return;
    const int32_t last_r = task.last_r();
    float* to = task.table->last_grad + static_cast<size_t>(slice) * (task.last_q() * last_r) +
                last_column * last_r + r;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int remaining =
          Config::kWholeLasts || last_column + half < task.last_q() ? last_r - r : 0;
      float* line = to + half * last_r;
      add_to_four<Config>(
          task, kLastPart, line,
          make_float4(d[0][2 * half], d[1][2 * half], d[2][2 * half], d[3][2 * half]), remaining);
      add_to_four<Config>(task, kLastPart, line + 16,
                          make_float4(d[0][2 * half + 1], d[1][2 * half + 1], d[2][2 * half + 1],
                                      d[3][2 * half + 1]),
                          remaining - 16);
    }
  }
};

// Four columns of the gradients of four distinct ids, in the layouts of both products.
template <typename Config>
struct FourGrads {
  float4 low, high;  // for the id of this lane's column: (head column, middle column) by row
  float2 other[4];   // for the id of row / 2: two columns; middle column by column

  // Reads ids from base + from on, of which those below base + limit exist.
  __device__ __forceinline__ void read(const TileInput& in, const BlockTask<Config>& task,
                                       const RowOffsets<Config>& place, const IdLane& id,
                                       int32_t last_column, int base, int from, int limit) {
    const int row = threadIdx.x % 32 / 4, column = threadIdx.x % 4;
    const int count = task.last_q() - last_column;
    const bool has_low = from + column < limit, has_other = from + row / 2 < limit;
    const uint32_t source = __shfl_sync(kAllLanes, id.source, from + column);
    const uint32_t other_source = __shfl_sync(kAllLanes, id.source, from + row / 2);
    low = high = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    if (has_low) {
      const float* at = grad_row<Config>(in, source) + last_column + place.first;
      low = load_row<Config>(at, place.width, place.has_first ? count : 0);
      high = load_row<Config>(at + place.step, place.width, place.has_second ? count : 0);
    }
    const float* line = grad_row<Config>(in, other_source) + last_column +
                        task.head_column() * task.head_step() +
                        (task.middle_column() + column) * task.middle_step() + row % 2 * 2;
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const float* at = line + e * task.head_step();
      other[e] = make_float2(0.0f, 0.0f);
      if (has_other) {
        const int remaining = task.has_head(e) && task.has_middle(column) ? count - row % 2 * 2 : 0;
        other[e] = load_row_pair<Config>(at, place.width, remaining);
      }
    }
    if (in.factors == nullptr) return;
    const float factor = has_low ? in.factors[base + from + column] : 0.0f;
    const float other_factor = has_other ? in.factors[base + from + row / 2] : 0.0f;
    low = scaled(low, factor);
    high = scaled(high, factor);
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      other[e].x *= other_factor;
      other[e].y *= other_factor;
    }
  }
};

// Four columns of the last core's slices of four distinct ids: 32 ranks, four per lane, by row.
template <typename Config>
struct FourLasts {
  float4 b[4];

  __device__ __forceinline__ void read(const BlockTask<Config>& task, const IdLane& id,
                                       int32_t last_column, int first_r, int from) {
    const int row = threadIdx.x % 32 / 4, column = threadIdx.x % 4;
    const TableCuda& table = *task.table;
    const int32_t last_q = task.last_q(), last_r = task.last_r();
    const size_t at =
        static_cast<size_t>(__shfl_sync(kAllLanes, id.last, from + column)) * (last_q * last_r) +
        last_column * last_r + first_r + row * 4;
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const bool exists = Config::kWholeLasts || last_column + e < last_q;
      b[e] = load_four<Config>(table.last, table.last_type, at + e * last_r,
                               exists ? last_r - first_r - row * 4 : 0);
    }
  }
};

// Processes gradients of the distinct ids [begin, end) of a prefix, for one slice of ranks. The
// gradient of the prefix replaces the prefix in shared memory; gradients of the last core go to
// last_grad.
template <typename Config, typename Ids, typename LastGrad>
__device__ __forceinline__ void gradient_ids(const TileInput& in, const Ids& ids,
                                             const BlockTask<Config>& task, int slice,
                                             float* prefix, int begin, int end,
                                             const LastGrad& last_grad) {
  static_assert(Config::kSlice == 32);
  constexpr int kProducts = Config::kProducts;
  const int32_t last_q = task.last_q();
  const int lane = threadIdx.x % 32, row = lane / 4, column = lane % 4;
  const int first_r = slice * Config::kSlice;
  const RowOffsets<Config> place(task);
  float sums[4][4] = {};
#pragma unroll 1
  for (int32_t last_column = 0; last_column < last_q; last_column += 4) {
    const bool more_columns = Config::kWholeLasts || last_q - last_column > 2;
#pragma unroll 1
    for (int base = begin; base < end; base += 32) {
      IdLane id;
      id.read(in, ids, base + lane, base + lane < end);
      const int limit = min(32, end - base);
      FourGrads<Config> grads;
      FourLasts<Config> lasts;
#pragma unroll 1
      for (int from = 0; from < limit; from += 4) {
        grads.read(in, task, place, id, last_column, base, from, limit);
        lasts.read(task, id, last_column, first_r, from);
        add_prefix_grad<kProducts>(sums, grads.low, grads.high, lasts.b, more_columns);
        // The prefix is reloaded for every four ids, to save registers.
        float4 values[4];
        read_columns<Config>(prefix, values);
        float d[4][4] = {};
        last_grad_of<kProducts>(d, grads.other, values);
        const bool has_other = from + row / 2 < limit;
        const int32_t other_last = __shfl_sync(kAllLanes, id.last, from + row / 2);
        last_grad.add(task, has_other, other_last, last_column + row % 2 * 2, first_r + 4 * column,
                      d);
      }
    }
  }
  __syncwarp();  // all lanes have read the prefix
  store_prefix_grad<Config>(sums, prefix);
}

}  // namespace torchrec_hkv::tensor_train::cuda
