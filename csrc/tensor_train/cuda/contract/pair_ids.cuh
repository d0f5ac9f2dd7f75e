// One warp processes the distinct ids of one prefix, two at a time. If most prefixes have one or
// two ids, processing four at a time would waste half of the work. For ranks up to 32 and q of at
// most 4. half_pairs.cuh does the same in single precision.
#pragma once

#include "tensor_train/cuda/contract/prefetched_ids.cuh"

namespace torchrec_hkv::tensor_train::cuda {

// Slices of the last core of two distinct ids. A lane has eight ranks of column row % 4 of id row /
// 4.
struct LastPair {
  float4 low, high;

  // Reads ids from `from` on, of the `limit` ids in the lanes. Beyond them, the last id repeats.
  template <typename Config>
  __device__ __forceinline__ void read(const BlockTask<Config>& task, const IdLane& id, int from,
                                       int limit) {
    const int lane = threadIdx.x % 32, row = lane / 4, column = lane % 4;
    const int32_t slice = __shfl_sync(kAllLanes, id.last, min(from + row / 4, limit - 1));
    const int32_t last_q = task.last_q(), last_r = task.last_r();
    const auto* const at = reinterpret_cast<const float4*>(
        static_cast<const float*>(task.table->last) +
        static_cast<size_t>(static_cast<uint32_t>(slice)) * static_cast<uint32_t>(last_q * last_r) +
        (row % 4 * last_r + column * 8));
    const bool whole = Config::kKnownQ && Config::kKnownRanks;
    const int remaining = whole ? 8 : row % 4 < last_q ? last_r - column * 8 : 0;
    low = high = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    if (remaining > 0) low = __ldg(at);
    if (remaining > 4) high = __ldg(at + 1);
  }
};

// Writes two columns of a distinct id's row, of which `count` exist, like put_rows.
template <typename Config>
__device__ __forceinline__ void put_pair(const TileInput& in, const RowOffsets<Config>& place,
                                         int32_t last_column, int count, int32_t distinct,
                                         uint32_t source, bool gather, float2 first,
                                         float2 second) {
  const int first_count = Config::kExact ? 2 : place.has_first ? count : 0;
  const int second_count = Config::kExact ? 2 : place.has_second ? count : 0;
  const bool slot = gather || (source & kSlotBit) != 0;
  float* to;
  if (slot) {
    const uint32_t number = gather ? static_cast<uint32_t>(distinct) : source & ~kSlotBit;
    to = in.slot_rows + static_cast<size_t>(number) * in.widest;
  } else {
    to = in.out + static_cast<size_t>(source) * in.unit;
    if (in.factors != nullptr) {
      const float factor = in.factors[distinct];
      first = make_float2(first.x * factor, first.y * factor);
      second = make_float2(second.x * factor, second.y * factor);
    }
  }
  to += place.first + last_column;
  if (slot || in.store) {
    store_row_pair<Config>(to, first, place.width, first_count);
    store_row_pair<Config>(to + place.step, second, place.width, second_count);
  } else {
    add_row_pair<Config>(to, first, place.width, first_count);
    add_row_pair<Config>(to + place.step, second, place.width, second_count);
  }
}

// Like lookup_ids_ahead.
template <typename Config>
__device__ __forceinline__ void lookup_pairs(const TileInput& in, IdLane id,
                                             const BlockTask<Config>& task, const float* prefix,
                                             int begin, int end, bool gather, LastPair& values) {
  static_assert(Config::kRank == 32 && Config::kProducts == 1);
  const int lane = threadIdx.x % 32, row = lane / 4, column = lane % 4;
  const RowOffsets<Config> place(task);
  float4 low[2], high[2];  // values of the prefix
  {
    const float* const from =
        prefix + row / 4 * Config::kRowStep + row % 4 * Config::kColumnStep + column * 8;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      low[i] = *reinterpret_cast<const float4*>(from + 4 * i);
      high[i] = *reinterpret_cast<const float4*>(from + 2 * Config::kRowStep + 4 * i);
    }
  }
#pragma unroll 1
  for (int base = begin; base < end; base += 32) {
    const int limit = min(32, end - base);
    if (base > begin) {
      id.read(in, UnstagedIds{}, base + lane, lane < limit);
      values.read(task, id, 0, limit);
    }
#pragma unroll 1
    for (int from = 0; from < limit; from += 2) {
      const int id_index = from + column / 2;
      const uint32_t source = __shfl_sync(kAllLanes, id.source, min(id_index, limit - 1));
      float sums[2][4] = {};
#pragma unroll
      for (int s = 0; s < 4; ++s) {
        const float4 b = s < 2 ? values.low : values.high;
        const int first = s % 2 * 2;
        multiply_add(sums[s % 2], operand<1>(part(low[s / 2], first)),
                     operand<1>(part(high[s / 2], first)), operand<1>(part(low[s / 2], first + 1)),
                     operand<1>(part(high[s / 2], first + 1)), rounded_operand<1>(part(b, first)),
                     rounded_operand<1>(part(b, first + 1)));
      }
      if (from + 2 < limit) values.read(task, id, from + 2, limit);
#pragma unroll
      for (int i = 0; i < 4; ++i) sums[0][i] += sums[1][i];
      if (id_index < limit) {
        put_pair<Config>(in, place, column % 2 * 2, task.last_q() - column % 2 * 2, base + id_index,
                         source, gather, make_float2(sums[0][0], sums[0][1]),
                         make_float2(sums[0][2], sums[0][3]));
      }
    }
  }
}

// Gradients of the rows of two distinct ids and their slices of the last core.
template <typename Config>
struct TwoIds {
  static_assert(Config::kRank == 32);
  float low[2], high[2];  // for each id: (head column, middle column) by row, last column by column
  float other[4];         // for the id of row / 4: middle column by column, last column by row % 4
  float4 lasts[2];        // for each id: last column by column, four ranks by row

  // Like LastPair::read.
  __device__ __forceinline__ void read(const TileInput& in, const BlockTask<Config>& task,
                                       const IdLane& id, int from, int limit) {
    const int lane = threadIdx.x % 32, row = lane / 4, column = lane % 4;
    const int numbers[2] = {from, min(from + 1, limit - 1)};
    const RowOffsets<Config> place(task);
    const int32_t last_q = task.last_q(), last_r = task.last_r();
    const float* const core = static_cast<const float*>(task.table->last);
    const float* rows[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      rows[i] = unit_row(in, __shfl_sync(kAllLanes, id.source, numbers[i]));
      const int32_t slice = __shfl_sync(kAllLanes, id.last, numbers[i]);
      const float* const at = rows[i] + (place.first + column);
      const bool has_column = Config::kKnownQ || column < last_q;
      low[i] = high[i] = 0.0f;
      if (Config::kExact || (has_column && place.has_first)) low[i] = at[0];
      if (Config::kExact || (has_column && place.has_second)) high[i] = at[place.step];
      lasts[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      if (has_column && (Config::kKnownRanks || row * 4 < last_r)) {
        lasts[i] = __ldg(
            reinterpret_cast<const float4*>(core +
                                            static_cast<size_t>(static_cast<uint32_t>(slice)) *
                                                static_cast<uint32_t>(last_q * last_r) +
                                            (column * last_r + row * 4)));
      }
    }
    const float* const line =
        (row / 4 == 0 ? rows[0] : rows[1]) + (column * task.middle_step() + row % 4);
    const bool has_line = Config::kExact || (task.has_middle(column) && row % 4 < last_q);
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      other[e] = 0.0f;
      if (has_line && task.has_head(e)) other[e] = line[e * task.head_step()];
    }
  }

  // `remaining` distinct ids from `first` on exist. If it is only one, zeroes the second of the
  // pair, so that it adds nothing to the sum over ids.
  __device__ __forceinline__ void finish(const float* factors, int first, int remaining) {
    if (remaining == 1) low[1] = high[1] = 0.0f;
    if (factors == nullptr) return;
    const float by[2] = {factors[first], factors[first + min(1, remaining - 1)]};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      low[i] *= by[i];
      high[i] *= by[i];
    }
    const float of_row = threadIdx.x % 32 < 16 ? by[0] : by[1];
#pragma unroll
    for (int e = 0; e < 4; ++e) other[e] *= of_row;
  }
};

// Adds the gradients of two slices of the last core. The rows of d are ranks, of which a lane has
// four neighbours from first_r on; its columns are (id, last column).
template <typename Config>
__device__ __forceinline__ void add_last_pair(const BlockTask<Config>& task, int32_t slice,
                                              int first_r, const float (&d)[2][4]) {
  const int column = threadIdx.x % 4;
  const int32_t last_q = task.last_q(), last_r = task.last_r();
  if (!Config::kKnownRanks && first_r >= last_r) return;
  float* const to =
      task.table->last_grad +
      static_cast<size_t>(static_cast<uint32_t>(slice)) * static_cast<uint32_t>(last_q * last_r) +
      (column % 2 * 2 * last_r + first_r);
  if (Config::kKnownQ || column % 2 * 2 < last_q) {
    add_four(to, make_float4(d[0][0], d[0][2], d[1][0], d[1][2]));
  }
  if (Config::kKnownQ || column % 2 * 2 + 1 < last_q) {
    add_four(to + last_r, make_float4(d[0][1], d[0][3], d[1][1], d[1][3]));
  }
}

// Like gradient_ids_ahead; adds gradients of the last core in memory.
template <typename Config>
__device__ __forceinline__ void gradient_pairs(const TileInput& in, const BlockTask<Config>& task,
                                               IdLane id, float* prefix, int begin, int end,
                                               TwoIds<Config>& two) {
  static_assert(Config::kProducts == 1);
  const int lane = threadIdx.x % 32, row = lane / 4, column = lane % 4;
  float sums[4][4] = {};
  float4 values[4];
  read_columns<Config>(prefix, values);
#pragma unroll 1
  for (int base = begin; base < end; base += 32) {
    const int limit = min(32, end - base);
    if (base > begin) {
      id.read(in, UnstagedIds{}, base + lane, lane < limit);
      two.read(in, task, id, 0, limit);
    }
#pragma unroll 1
    for (int from = 0; from < limit; from += 2) {
      two.finish(in.factors, base + from, limit - from);
      {  // depth (id, last column)
        const auto a0 = rounded_operand<1>(two.low[0]), a1 = rounded_operand<1>(two.high[0]);
        const auto a2 = rounded_operand<1>(two.low[1]), a3 = rounded_operand<1>(two.high[1]);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          multiply_add(sums[j], a0, a1, a2, a3, rounded_operand<1>(part(two.lasts[0], j)),
                       rounded_operand<1>(part(two.lasts[1], j)));
        }
      }
      float d[2][4] = {};  // depth (head column, middle column)
#pragma unroll
      for (int s = 0; s < 2; ++s) {
        const auto b0 = rounded_operand<1>(two.other[2 * s]);
        const auto b1 = rounded_operand<1>(two.other[2 * s + 1]);
        const float4 low = values[2 * s], high = values[2 * s + 1];
#pragma unroll
        for (int t = 0; t < 2; ++t) {
          multiply_add(d[t], operand<1>(part(low, 2 * t)), operand<1>(part(low, 2 * t + 1)),
                       operand<1>(part(high, 2 * t)), operand<1>(part(high, 2 * t + 1)), b0, b1);
        }
      }
      const int id_index = from + column / 2;
      const int32_t slice = __shfl_sync(kAllLanes, id.last, min(id_index, limit - 1));
      if (from + 2 < limit) two.read(in, task, id, from + 2, limit);
      if (id_index < limit) add_last_pair(task, slice, row / 2 * 4 + row % 2 * 16, d);
    }
  }
  __syncwarp();  // all lanes have read the prefix
  store_prefix_grad<Config>(sums, prefix);
}

}  // namespace torchrec_hkv::tensor_train::cuda
