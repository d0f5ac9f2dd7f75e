// One warp processes the distinct ids of one prefix, two at a time, like in pair_ids.cuh, but with
// three products in half precision. Split values are scaled by the exponent of their id, so that
// the precision of a row does not depend on the other row.
#pragma once

#include "tensor_train/cuda/contract/half_tile.cuh"
#include "tensor_train/cuda/contract/pair_ids.cuh"

namespace torchrec_hkv::tensor_train::cuda {

// exponent: exponent of the prefix.
template <typename Config>
__device__ __forceinline__ void lookup_pairs(const TileInput& in, IdLane id,
                                             const BlockTask<Config>& task, const __half* prefix,
                                             int exponent, int begin, int end, bool gather,
                                             LastPair& values) {
  using Tile = HalfTile<Config>;
  const int lane = threadIdx.x % 32, column = lane % 4;
  const RowOffsets<Config> place(task);
  uint32_t high[2][4], low[2][4];
  {
    const __half* const from =
        prefix + lane % 16 / 4 * Tile::kRowStep + lane % 4 * Tile::kColumnStep + lane / 16 * 8;
#pragma unroll
    for (int s = 0; s < 2; ++s) {
      load_halves<false>(from + 16 * s, high[s]);
      load_halves<false>(from + 16 * s + kLow, low[s]);
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
      const float most = fmaxf(largest(values.low), largest(values.high));
      const int first = exponent_for(largest_of_warp(lane < 16 ? most : 0.0f));
      const int second = exponent_for(largest_of_warp(lane < 16 ? 0.0f : most));
      const float scale = power_of_two(lane < 16 ? first : second);
      HalfPair b[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        b[i] = half_pair(part(values.low, i) * scale, part(values.high, i) * scale);
      }
      float sums[3][4] = {};  // separate sums, for shorter chains of dependent products
#pragma unroll
      for (int s = 0; s < 2; ++s) {
        mma_half(sums[0], low[s], b[2 * s].high, b[2 * s + 1].high);
        mma_half(sums[1], high[s], b[2 * s].low, b[2 * s + 1].low);
        mma_half(sums[2], high[s], b[2 * s].high, b[2 * s + 1].high);
      }
      if (from + 2 < limit) values.read(task, id, from + 2, limit);
      const float unit = power_of_two(-exponent - (column < 2 ? first : second));
      float row[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) row[i] = (sums[2][i] + (sums[0][i] + sums[1][i])) * unit;
      if (id_index < limit) {
        put_pair<Config>(in, place, column % 2 * 2, task.last_q() - column % 2 * 2, base + id_index,
                         source, gather, make_float2(row[0], row[1]), make_float2(row[2], row[3]));
      }
    }
  }
}

// Sums of the gradient of a prefix, scaled by one exponent, the lowest of its ids so far.
struct ScaledSums {
  static constexpr int kNone = 1024;
  float sums[4][4] = {};
  int exponent = kNone;

  __device__ __forceinline__ void lower(int to) {
    if (to < exponent && exponent != kNone) {
      const float factor = power_of_two(to - exponent);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
#pragma unroll
        for (int i = 0; i < 4; ++i) sums[j][i] *= factor;
      }
    }
    exponent = to;
  }
  __device__ __forceinline__ float most() const {
    float value = 0.0f;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) value = fmaxf(value, fabsf(sums[j][i]));
    }
    return value;
  }
};

// exponent: exponent of the prefix. Returns the exponent of its gradient.
template <typename Config>
__device__ __forceinline__ int gradient_pairs(const TileInput& in, const BlockTask<Config>& task,
                                              IdLane id, __half* prefix, int exponent, int begin,
                                              int end, TwoIds<Config>& two) {
  using Tile = HalfTile<Config>;
  const int lane = threadIdx.x % 32, row = lane / 4, column = lane % 4;
  // The prefix as the left operand, transposed. Depth is (head column, middle column), in the order
  // of TwoIds::other.
  uint32_t high[2][4], low[2][4];
  {
    const __half* const from = prefix + (lane / 16 * 2 + lane % 2) * Tile::kRowStep +
                               lane % 8 / 2 * Tile::kColumnStep + lane / 8 % 2 * 8;
#pragma unroll
    for (int t = 0; t < 2; ++t) {
      load_halves<true>(from + 16 * t, high[t]);
      load_halves<true>(from + 16 * t + kLow, low[t]);
    }
  }
  ScaledSums grad;
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
      int of_grads[2];
      int least = grad.exponent;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        of_grads[i] = exponent_for(largest_of_warp(fmaxf(fabsf(two.low[i]), fabsf(two.high[i]))));
        least = min(least, of_grads[i] + exponent_for(largest_of_warp(largest(two.lasts[i]))));
      }
      grad.lower(least);
      const float scales[2] = {power_of_two(of_grads[0]), power_of_two(of_grads[1])};
      {  // depth (id, last column); the two exponents of an id add up to the exponent of the sums
        const float rest[2] = {power_of_two(least - of_grads[0]),
                               power_of_two(least - of_grads[1])};
        const HalfPair a0 = half_pair(two.low[0] * scales[0], two.low[1] * scales[1]);
        const HalfPair a1 = half_pair(two.high[0] * scales[0], two.high[1] * scales[1]);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const HalfPair b =
              half_pair(part(two.lasts[0], j) * rest[0], part(two.lasts[1], j) * rest[1]);
          mma_half(grad.sums[j], a0.low, a1.low, b.high);
          mma_half(grad.sums[j], a0.high, a1.high, b.low);
          mma_half(grad.sums[j], a0.high, a1.high, b.high);
        }
      }
      float d[2][4] = {};  // depth (head column, middle column)
      const float scale = lane < 16 ? scales[0] : scales[1];
      const HalfPair b0 = half_pair(two.other[0] * scale, two.other[1] * scale);
      const HalfPair b1 = half_pair(two.other[2] * scale, two.other[3] * scale);
      const float unit = power_of_two(-exponent - (column < 2 ? of_grads[0] : of_grads[1]));
#pragma unroll
      for (int t = 0; t < 2; ++t) {
        mma_half(d[t], low[t], b0.high, b1.high);
        mma_half(d[t], high[t], b0.low, b1.low);
        mma_half(d[t], high[t], b0.high, b1.high);
      }
      const int id_index = from + column / 2;
      const int32_t slice = __shfl_sync(kAllLanes, id.last, min(id_index, limit - 1));
      if (from + 2 < limit) two.read(in, task, id, from + 2, limit);
#pragma unroll
      for (int t = 0; t < 2; ++t) {
#pragma unroll
        for (int i = 0; i < 4; ++i) d[t][i] *= unit;
      }
      if (id_index < limit) add_last_pair(task, slice, 4 * row, d);
    }
  }
  // The sum of two ids is bounded, so its largest value is not needed.
  const int shift =
      end - begin <= 2 ? Tile::kGradShift : exponent_for(largest_of_warp(grad.most()));
  __syncwarp();  // all lanes have read the prefix
  Tile::store_rows(grad.sums, power_of_two(shift),
                   prefix + lane % 8 / 4 * Tile::kRowStep + lane % 4 * Tile::kColumnStep,
                   2 * Tile::kRowStep);
  return grad.exponent + shift;
}

}  // namespace torchrec_hkv::tensor_train::cuda
