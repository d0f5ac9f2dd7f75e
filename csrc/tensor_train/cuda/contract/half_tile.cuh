// The products of a tile like in tile_gemm.cuh, but with three products in half precision. For
// ranks up to 32, each q at most 4, and eight prefixes and warps.
//
// Matrices are in shared memory as halves: the high parts of 32 values, then their low parts. Heads
// are [prefix, head column][32]; the middle is [r_1][middle column][32]; prefixes and their
// gradients are [prefix, head column][middle column][32]. In the middle, prefixes and gradients,
// rank r_2 is at 8 (r_2 % 4) + r_2 / 4, so that a lane has four neighbouring values of memory.
#pragma once

#include "tensor_train/cuda/contract/half_core.cuh"
#include "tensor_train/cuda/contract/tile_operands.cuh"

namespace torchrec_hkv::tensor_train::cuda {

template <typename Config>
struct HalfTile {
  static_assert(Config::kRank == 32 && Config::kSlice == 32);
  static_assert(Config::kPrefixes == 8 && Config::kWarps == 8);
  // Steps in halves, with which eight neighbouring rows of one column, and the columns of two rows,
  // are in different banks.
  static constexpr int kHeadStep = 72;
  static constexpr int kColumnStep = 80;
  static constexpr int kRowStep = 4 * kColumnStep + 8;
  static constexpr int kPrefixStep = 4 * kRowStep;
  static constexpr int kMiddleHalves = Config::kRank * kRowStep;
  static constexpr int kHeadHalves = Config::kRows * kHeadStep;
  static constexpr int kProductHalves = Config::kRows * kRowStep;
  static constexpr size_t kBytes = sizeof(__half) * (kMiddleHalves + kHeadHalves + kProductHalves);

  // Sums of 32 products of values below 2^15 are below 2^35; sums of 8 products are below 2^33.
  static constexpr int kPrefixShift = -20;
  static constexpr int kGradShift = -18;

  // In shared memory: exponents of the values of each prefix, and the largest values of the middle.
  struct Scales {
    alignas(16) uint32_t middle[Config::kWarps];
    int heads[Config::kPrefixes];
    int grads[Config::kPrefixes];
  };

  // All threads call this after they have used the previous contents. Returns the exponent.
  static __device__ __forceinline__ int load_middle(int thread, const BlockTask<Config>& task,
                                                    Scales& scales, __half* to) {
    constexpr int kLines = Config::kRank * 4 / (Config::kThreads / 4);  // of this thread
    const int within = thread % 4;                                      // eight ranks
    const int32_t head_r = task.head_r(), middle_q = task.middle_q(), last_r = task.last_r();
    const float* const from =
        static_cast<const float*>(task.table->middle) +
        static_cast<size_t>(task.middle) * static_cast<uint32_t>(head_r * middle_q * last_r) +
        within * 8;
    float4 low[kLines], high[kLines];
#pragma unroll
    for (int k = 0; k < kLines; ++k) {
      const int line = thread / 4 + k * (Config::kThreads / 4);
      low[k] = high[k] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      if ((Config::kKnownRanks || line / 4 < head_r) && line % 4 < middle_q) {
        const auto* const at =
            reinterpret_cast<const float4*>(from + (line / 4 * middle_q + line % 4) * last_r);
        if (Config::kKnownRanks || within * 8 < last_r) low[k] = __ldg(at);
        if (Config::kKnownRanks || within * 8 + 4 < last_r) high[k] = __ldg(at + 1);
      }
    }
    float most = 0.0f;
#pragma unroll
    for (int k = 0; k < kLines; ++k) most = fmaxf(most, fmaxf(largest(low[k]), largest(high[k])));
    const uint32_t of_warp = largest_of_warp(most);
    if (thread % 32 == 0) scales.middle[thread / 32] = of_warp;
    __syncthreads();
    uint32_t all = 0;
#pragma unroll
    for (int w = 0; w < Config::kWarps; ++w) all = max(all, scales.middle[w]);
    const int e = exponent_for(all);
    const float scale = power_of_two(e);
#pragma unroll
    for (int k = 0; k < kLines; ++k) {
      const int line = thread / 4 + k * (Config::kThreads / 4);
      __half* const at = to + line / 4 * kRowStep + line % 4 * kColumnStep + within * 2;
      const float a[4] = {low[k].x, low[k].y, low[k].z, low[k].w};
      const float b[4] = {high[k].x, high[k].y, high[k].z, high[k].w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const HalfPair pair = half_pair(a[i] * scale, b[i] * scale);
        *reinterpret_cast<uint32_t*>(at + 8 * i) = pair.high;
        *reinterpret_cast<uint32_t*>(at + 8 * i + kLow) = pair.low;
      }
    }
    return e;
  }

  // A warp stores the heads of a prefix, a thread four values of a row.
  static __device__ __forceinline__ void store_heads(int thread, const HeadLoad<Config>& load,
                                                     Scales& scales, __half* to) {
    static_assert(HeadLoad<Config>::kMine == 1);
    const float4 v = load.values[0];
    const int e = exponent_for(largest_of_warp(largest(v)));
    if (thread % 32 == 0) scales.heads[thread / 32] = e;
    const float scale = power_of_two(e);
    const HalfPair a = half_pair(v.x * scale, v.y * scale);
    const HalfPair b = half_pair(v.z * scale, v.w * scale);
    __half* const at = to + thread / 8 * kHeadStep + thread % 8 * 4;
    *reinterpret_cast<uint2*>(at) = make_uint2(a.high, b.high);
    *reinterpret_cast<uint2*>(at + kLow) = make_uint2(a.low, b.low);
  }

  // The exponent of a prefix from multiply_prefixes.
  static __device__ __forceinline__ int prefix_exponent(const Scales& scales, int prefix,
                                                        int middle_exponent) {
    return scales.heads[prefix] + middle_exponent + kPrefixShift;
  }

  // prefixes = heads x middle, for `count` prefixes. A warp computes 16 rows of a middle column.
  static __device__ __forceinline__ void multiply_prefixes(int thread, const __half* heads,
                                                           const __half* middle, __half* prefixes,
                                                           int count) {
    const int warp = thread / 32, lane = thread % 32;
    const int first_row = warp / 4 * 16, middle_column = warp % 4;
    if (first_row >= 4 * count) return;
    uint32_t high[2][4], low[2][4];
    const __half* const head_values = heads + (first_row + lane % 16) * kHeadStep + lane / 16 * 8;
#pragma unroll
    for (int s = 0; s < 2; ++s) {
      load_halves<false>(head_values + 16 * s, high[s]);
      load_halves<false>(head_values + 16 * s + kLow, low[s]);
    }
    const __half* const middle_values = middle + lane * kRowStep + middle_column * kColumnStep;
    float sums[4][4] = {};
#pragma unroll
    for (int q = 0; q < 4; ++q) {
      uint32_t b[4], b_low[4];
      load_halves<true>(middle_values + 8 * q, b);
      load_halves<true>(middle_values + 8 * q + kLow, b_low);
#pragma unroll
      for (int s = 0; s < 2; ++s) {
        mma_half(sums[q], low[s], b[2 * s], b[2 * s + 1]);
        mma_half(sums[q], high[s], b_low[2 * s], b_low[2 * s + 1]);
        mma_half(sums[q], high[s], b[2 * s], b[2 * s + 1]);
      }
    }
    store_rows(sums, power_of_two(kPrefixShift),
               prefixes + (first_row + lane % 8) * kRowStep + middle_column * kColumnStep,
               8 * kRowStep);
  }

  // Stores scaled sums of 16 rows and 32 columns as halves. row: row lane % 8; step: offset of the
  // row eight below.
  static __device__ __forceinline__ void store_rows(const float (&sums)[4][4], float scale,
                                                    __half* row, int step) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint32_t high[4], low[4];
#pragma unroll
      for (int q = 0; q < 4; ++q) {
        const HalfPair pair = half_pair(sums[q][2 * half] * scale, sums[q][2 * half + 1] * scale);
        high[q] = pair.high;
        low[q] = pair.low;
      }
      store_halves(row + half * step + lane / 8 * 8, high);
      store_halves(row + half * step + lane / 8 * 8 + kLow, low);
    }
  }

  // Part of the gradient of a middle slice in registers. A warp has 16 rows of a middle column.
  struct MiddleGrad {
    float sums[4][4];

    __device__ __forceinline__ void clear() {
#pragma unroll
      for (int q = 0; q < 4; ++q) {
#pragma unroll
        for (int i = 0; i < 4; ++i) sums[q][i] = 0.0f;
      }
    }

    // Adds the gradients of `count` prefixes. Because their exponents differ, heads of prefixes
    // with smaller gradients are scaled down.
    __device__ __forceinline__ void add(int thread, const Scales& scales, const __half* heads,
                                        const __half* grads, int count) {
      const int warp = thread / 32, lane = thread % 32, column = lane % 4;
      constexpr int kNone = -1024;
      const int exponent_sum = lane < count ? -scales.heads[lane] - scales.grads[lane] : kNone;
      const int top = __reduce_max_sync(kAllLanes, exponent_sum);
      const float factor = power_of_two(exponent_sum - top);
      const __half* const head_values =
          heads + (lane / 16 * 8 + lane % 8) * kHeadStep + warp / 4 * 16 + lane / 8 % 2 * 8;
      const __half* const grad_values = grads + lane * kRowStep + warp % 4 * kColumnStep;
      float added[4][4] = {};
      uint32_t high[2][4], low[2][4];
#pragma unroll
      for (int s = 0; s < 2; ++s) {
        load_halves<true>(head_values + 16 * s * kHeadStep, high[s]);
        load_halves<true>(head_values + 16 * s * kHeadStep + kLow, low[s]);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const __half2 by =
              __float2half2_rn(__shfl_sync(kAllLanes, factor, 4 * s + 2 * half + column / 2));
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            high[s][2 * half + i] = times(high[s][2 * half + i], by);
            low[s][2 * half + i] = times(low[s][2 * half + i], by);
          }
        }
      }
      const bool second = count > 4;
#pragma unroll
      for (int q = 0; q < 4; ++q) {
        uint32_t b[4], b_low[4];
        load_halves<true>(grad_values + 8 * q, b);
        load_halves<true>(grad_values + 8 * q + kLow, b_low);
        mma_half(added[q], low[0], b[0], b[1]);
        mma_half(added[q], high[0], b_low[0], b_low[1]);
        mma_half(added[q], high[0], b[0], b[1]);
        if (second) {
          mma_half(added[q], low[1], b[2], b[3]);
          mma_half(added[q], high[1], b_low[2], b_low[3]);
          mma_half(added[q], high[1], b[2], b[3]);
        }
      }
      const float unit = power_of_two(top);
#pragma unroll
      for (int q = 0; q < 4; ++q) {
#pragma unroll
        for (int i = 0; i < 4; ++i) sums[q][i] = fmaf(added[q][i], unit, sums[q][i]);
      }
    }

    // Adds the registers to the gradient in memory. Lanes first exchange groups of four values, so
    // that the four lanes of a row add 64 neighbouring bytes at a time.
    __device__ __forceinline__ void flush(int thread, const BlockTask<Config>& task, int,
                                          int) const {
      const int warp = thread / 32, lane = thread % 32, row = lane / 4, column = lane % 4;
      const int middle_column = warp % 4;
      if (!task.has_middle(middle_column)) return;
      const int32_t head_r = task.head_r(), last_r = task.last_r();
      const bool behind = column >= 2;
      const int first_row = warp / 4 * 16 + row, first_r = column % 2 * 8 + column / 2 * 4;
      const int32_t step = task.middle_q() * last_r;
      float* const to =
          task.table->middle_grad +
          (static_cast<size_t>(task.middle) * head_r + first_row) * static_cast<uint32_t>(step) +
          middle_column * last_r + first_r;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float first[4], second[4];
#pragma unroll
        for (int q = 0; q < 4; ++q) {
          const float a = sums[q][2 * half], b = sums[q][2 * half + 1];
          const float other = __shfl_xor_sync(kAllLanes, behind ? a : b, 2);
          first[q] = behind ? other : a;
          second[q] = behind ? b : other;
        }
        if (!Config::kKnownRanks && first_row + half * 8 >= head_r) continue;
        float* const line = to + half * 8 * step;
        if (Config::kKnownRanks || first_r < last_r) {
          add_four(line, make_float4(first[0], first[1], first[2], first[3]));
        }
        if (Config::kKnownRanks || first_r + 16 < last_r) {
          add_four(line + 16, make_float4(second[0], second[1], second[2], second[3]));
        }
      }
    }
  };

  // head_grad rows += grads middle^T, for `count` prefixes. A warp computes 16 rows, eight columns.
  static __device__ __forceinline__ void add_head_grad(int thread, const BlockTask<Config>& task,
                                                       const int4* prefixes, int count,
                                                       const Scales& scales, int middle_exponent,
                                                       const __half* middle, const __half* grads) {
    const int warp = thread / 32, lane = thread % 32, row = lane / 4, column = lane % 4;
    const int row_tile = warp % 2, first = warp / 2 * 8;
    const int32_t head_r = task.head_r();
    if (row_tile * 4 >= count || first >= head_r) return;
    float sums[3][4] = {};  // separate sums, for shorter chains of dependent products
    const __half* const grad_values =
        grads + (row_tile * 16 + lane % 16) * kRowStep + lane / 16 * 8;
    const __half* const middle_values = middle + (first + lane % 8) * kRowStep + lane / 8 * 8;
#pragma unroll 2
    for (int m = 0; m < task.middle_q(); ++m) {
      uint32_t b[4], b_low[4];
      load_halves<false>(middle_values + m * kColumnStep, b);
      load_halves<false>(middle_values + m * kColumnStep + kLow, b_low);
#pragma unroll
      for (int s = 0; s < 2; ++s) {
        uint32_t a[4], a_low[4];
        load_halves<false>(grad_values + m * kColumnStep + 16 * s, a);
        load_halves<false>(grad_values + m * kColumnStep + 16 * s + kLow, a_low);
        mma_half(sums[0], a_low, b[2 * s], b[2 * s + 1]);
        mma_half(sums[1], a, b_low[2 * s], b_low[2 * s + 1]);
        mma_half(sums[2], a, b[2 * s], b[2 * s + 1]);
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int at = row_tile * 4 + row / 4 + 2 * half;
      if (at >= count || !task.has_head(row % 4)) continue;
      const float unit = power_of_two(-scales.grads[at] - middle_exponent);
      const size_t line = static_cast<size_t>(prefixes[at].w) * task.head_q() + row % 4;
      float values[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int of = 2 * half + i;
        values[i] = (sums[2][of] + (sums[0][of] + sums[1][of])) * unit;
      }
      if (Config::kKnownRanks || first + 2 * column < head_r) {
        add_two(task.table->head_grad + line * head_r + first + 2 * column, values[0], values[1]);
      }
    }
  }
};

}  // namespace torchrec_hkv::tensor_train::cuda
