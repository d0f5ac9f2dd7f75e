// The operands of a tile's products: slices of cores in shared memory.
#pragma once

#include "tensor_train/cuda/contract/tensor_core.cuh"
#include "tensor_train/cuda/contract/tile_config.cuh"

namespace torchrec_hkv::tensor_train::cuda {

// Loads a slice of the middle core, [kRank][4 middle columns][kSlice], to shared memory.
template <typename Config>
__device__ __forceinline__ void load_middle(int thread, const BlockTask<Config>& task, int slice,
                                            float* to) {
  constexpr int kQuads = Config::kRank * Config::kSlice;  // number of groups of 4 values
  constexpr int kMine = kQuads / Config::kThreads;
  static_assert(kQuads % Config::kThreads == 0);
  // All loads come before the first store: in a loop of loads and stores each load would wait,
  // because the compiler cannot know that the stores do not change the addresses of the loads.
  constexpr int kTogether = kMine < 4 ? kMine : 4;
  static_assert(kMine % kTogether == 0);
  const TableCuda& table = *task.table;
  const void* const core = table.middle;
  const RowType type = table.middle_type;
  const int32_t head_r = task.head_r();
  const int32_t last_r = task.last_r();
  const int32_t middle_q = task.middle_q();
  const size_t first =
      (static_cast<size_t>(task.middle) * head_r * middle_q + task.middle_column()) * last_r +
      slice * Config::kSlice;
  const int quads = task.head_depth() * Config::kSlice;
#pragma unroll 1
  for (int base = 0; base < kMine && base * Config::kThreads < quads; base += kTogether) {
    float4 values[kTogether];
#pragma unroll
    for (int k = 0; k < kTogether; ++k) {
      const unsigned i = thread + (base + k) * Config::kThreads;
      const int r = i / Config::kSlice;
      const int quad = i % Config::kSlice;
      const int column = quad / (Config::kSlice / 4);
      const int within = quad % (Config::kSlice / 4) * 4;
      const bool exists = (Config::kKnownRanks || r < head_r) && task.has_middle(column);
      const int count = exists ? last_r - slice * Config::kSlice - within : 0;
      values[k] = load_four<Config>(
          core, type, first + (static_cast<size_t>(r) * middle_q + column) * last_r + within,
          count);
    }
#pragma unroll
    for (int k = 0; k < kTogether; ++k) {
      const unsigned i = thread + (base + k) * Config::kThreads;
      const int at =
          static_cast<int>(i / Config::kSlice * Config::kMiddleStep + i % Config::kSlice * 4);
      *reinterpret_cast<float4*>(to + at) = prepared<Config::kProducts>(values[k]);
    }
  }
}

// Loads the heads of `count` prefixes to shared memory, [prefix][4 head columns][kRank]; other rows
// are 0. Loads and stores are separate, so that other loads overlap.
template <typename Config>
struct HeadLoad {
  static constexpr int kQuads = Config::kPrefixes * Config::kRank;  // number of groups of 4 values
  static constexpr int kMine = (kQuads + Config::kThreads - 1) / Config::kThreads;
  static_assert(kQuads % Config::kThreads == 0);
  // Whether there are enough registers to hold the heads while the middle is loaded.
  static constexpr bool kEarly = Config::kVectors && Config::kSlices == 1 && kMine <= 2;
  float4 values[kMine];

  __device__ __forceinline__ void read(int thread, const BlockTask<Config>& task,
                                       const int4* prefixes, int count) {
    const TableCuda& table = *task.table;
    const int32_t head_r = task.head_r();
#pragma unroll
    for (int k = 0; k < kMine; ++k) {
      const int i = thread + k * Config::kThreads;
      const int prefix = i / Config::kRank;
      const int column = i % Config::kRank / (Config::kRank / 4);
      const int within = i % (Config::kRank / 4) * 4;
      values[k] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      if (prefix < count && task.has_head(column)) {
        const size_t row =
            static_cast<size_t>(prefixes[prefix].w) * task.head_q() + task.head_column() + column;
        values[k] =
            load_four<Config>(table.head, table.head_type, row * head_r + within, head_r - within);
      }
    }
  }

  // Of eight neighbouring ranks, the even ranks come first; see multiply_prefixes.
  __device__ __forceinline__ void store(int thread, float* to) const {
#pragma unroll
    for (int k = 0; k < kMine; ++k) {
      const int i = thread + k * Config::kThreads;
      const int line = i / (Config::kRank / 4);  // (prefix, head column)
      const int within = i % (Config::kRank / 4) * 4;
      const float4 v = prepared<Config::kProducts>(values[k]);
      float* const at = to + line * Config::kHeadStep + within / 8 * 8 + within % 8 / 2;
      *reinterpret_cast<float2*>(at) = make_float2(v.x, v.z);
      *reinterpret_cast<float2*>(at + 4) = make_float2(v.y, v.w);
    }
  }
};

// The prefixes of a table of two cores, which are its head slices.
template <typename Config>
struct HeadPrefixes {
  static constexpr int kLine = Config::kSlice / 4;  // units of 4 values
  static constexpr int kUnits = 16 * kLine;         // units per prefix

  // Calls use(element of the head, offset in the prefixes in shared memory, number of existing
  // values) for the units of `count` prefixes.
  template <typename Use>
  static __device__ __forceinline__ void each(int thread, const BlockTask<Config>& task, int slice,
                                              const int4* prefixes, int count, const Use& use) {
    const int32_t last_r = task.last_r();
    for (int i = thread; i < count * kUnits; i += Config::kThreads) {
      const int prefix = i / kUnits, row = i % kUnits / kLine, within = i % kLine * 4;
      const int head_column = row / 4, middle_column = row % 4;
      const size_t line = (static_cast<size_t>(prefixes[prefix].w) * task.head_q() +
                           task.head_column() + head_column) *
                              task.middle_q() +
                          task.middle_column() + middle_column;
      const bool exists = task.has_head(head_column) && task.has_middle(middle_column);
      const int r = slice * Config::kSlice + within;
      use(line * last_r + r,
          prefix * Config::kPrefixStep + head_column * Config::kRowStep +
              middle_column * Config::kColumnStep + within,
          exists ? last_r - r : 0);
    }
  }
  static __device__ __forceinline__ void load(int thread, const BlockTask<Config>& task, int slice,
                                              const int4* prefixes, int count, float* to) {
    const TableCuda& table = *task.table;
    each(thread, task, slice, prefixes, count, [&](size_t element, int at, int remaining) {
      *reinterpret_cast<float4*>(to + at) = prepared<Config::kProducts>(
          load_four<Config>(table.head, table.head_type, element, remaining));
    });
  }
  static __device__ __forceinline__ void add_grads(int thread, const BlockTask<Config>& task,
                                                   int slice, const int4* prefixes, int count,
                                                   const float* grads) {
    float* const head_grad = task.table->head_grad;
    each(thread, task, slice, prefixes, count, [&](size_t element, int at, int remaining) {
      add_to_four<Config>(task, kHeadPart, head_grad + element,
                          *reinterpret_cast<const float4*>(grads + at), remaining);
    });
  }
};

}  // namespace torchrec_hkv::tensor_train::cuda
