// The layout of a thread block that processes a tile: several prefixes of one middle slice.
//
// The columns of a row are split into blocks of 4 head x 4 middle x 4 last columns. A thread block
// processes one block of head and middle columns, and all last columns. For it, a prefix is a
// matrix of 16 rows, (head column, middle column), and last_r columns. Ranks are padded to kRank; a
// large last_r is split into slices of kSlice.
#pragma once

#include <cstddef>
#include <cstdint>

#include "common/dtypes.h"
#include "tensor_train/cuda/contract/tensor_core.cuh"
#include "tensor_train/cuda/index/index.cuh"
#include "tensor_train/cuda/kernels.h"

namespace torchrec_hkv::tensor_train::cuda {

// What a kernel assumes of shapes; known shapes save registers and bounds checks.
// kAny: nothing.
// kVectors: float32 cores, and ranks that are multiples of 4, at most kRank. Reads 4 at a time.
// kQuads: kVectors, and all q are 4.
// kRanks: kVectors, and head_r = last_r = kRank.
// kLasts: kRanks, and the last q is a multiple of 4.
// kNarrow: kLasts, and q = 4, 2, 4 (32 columns).
// kWhole: head_r = last_r = kRank, all q are multiples of 4, cores are of type kType. No bounds.
// kFours: kWhole, and all q are 4.
enum class Fit { kAny, kVectors, kQuads, kRanks, kLasts, kNarrow, kWhole, kFours };

template <int kRank_, int kSlice_, int kPrefixes_, int kWarps_, int kProducts_, Fit kFit_,
          RowType kType_, int kMinBlocks_, bool kFixedPoint_ = false>
struct TileConfig {
  static constexpr int kRank = kRank_;
  static constexpr int kSlice = kSlice_;
  static constexpr int kPrefixes = kPrefixes_;  // per tile
  static constexpr int kWarps = kWarps_;
  static constexpr int kProducts = kProducts_;  // per multiply-add, see tensor_core.cuh
  static constexpr bool kVectors = kFit_ != Fit::kAny;
  static constexpr bool kFours = kFit_ == Fit::kFours;
  static constexpr bool kNarrow = kFit_ == Fit::kNarrow;
  static constexpr bool kExact = kFours || kFit_ == Fit::kWhole;
  static constexpr bool kKnownRanks =
      kExact || kNarrow || kFit_ == Fit::kLasts || kFit_ == Fit::kRanks;
  static constexpr bool kKnownQ = kFours || kNarrow || kFit_ == Fit::kQuads;  // q = 4, kMiddleQ, 4
  // Whether the last q is a multiple of 4.
  static constexpr bool kWholeLasts = kExact || kKnownQ || kFit_ == Fit::kLasts;
  static constexpr int kMiddleQ = kNarrow ? 2 : 4;
  static constexpr RowType kType = kType_;
  static constexpr int kMinBlocks = kMinBlocks_;  // per multiprocessor
  // Sums gradients as integers, which gives the same bits in any order; see FixedPoint.
  static constexpr bool kFixedPoint = kFixedPoint_;

  static constexpr int kThreads = kWarps * 32;
  static constexpr int kSlices = kRank / kSlice;
  static constexpr int kRows = kPrefixes * 4;  // (prefix, head column)
  static constexpr int kColumns = 4 * kSlice;  // (middle column, r) of a slice
  // Strides in shared memory, in values. The padding avoids bank conflicts of fragments.
  static constexpr int kMiddleStep = kColumns + 4;  // between r_1 of the middle
  static constexpr int kHeadStep = kRank + 4;       // between rows of heads
  static constexpr int kColumnStep = kSlice + 4;    // between middle columns
  static constexpr int kRowStep = 4 * kColumnStep + (kSlice == 32 ? 4 : 20);  // between rows
  static constexpr int kPrefixStep = 4 * kRowStep;
  static constexpr int kSliceStep = kRows * kRowStep;  // between slices of the prefixes

  static constexpr int kMiddleValues = kRank * kMiddleStep;
  static constexpr int kHeadValues = kRows * kHeadStep;
  // A lookup keeps all slices of its prefixes; gradients keep one at a time.
  static constexpr size_t shared_bytes(bool backward) {
    return sizeof(float) * (kMiddleValues + kHeadValues + kSliceStep * (backward ? 1 : kSlices));
  }

  static_assert(kRank % kSlice == 0 && (kSlice == 32 || kSlice == 64));
  static_assert(kPrefixes % 4 == 0 && kPrefixes <= 16);
};

// Gradients in deterministic mode: the gradient at grads + i is sums[i] / scale.
struct FixedPoint {
  const float* grads;
  unsigned long long* sums;  // as int64
  const double* scales;      // [tables][3]: head, middle, last; null: adds floats
};
enum Part { kHeadPart, kMiddlePart, kLastPart };

struct TileInput {
  const TableCuda* tables;
  bool one_table;
  int32_t kernel;  // only tables of this class are processed
  const IndexCounts* counts;
  const int4* prefixes;
  int64_t max_prefixes;  // `prefixes` has room for one more
  const int32_t* lasts;
  const uint32_t* sources;
  const float* factors;  // null: all 1
  int32_t unit;
  int32_t widest;           // stride of slot rows
  bool store;               // stores rows, one for each id, instead of adding them to the output
  float* out;               // lookup: the output,
  float* slot_rows;         // and rows by slot, or by distinct id
  bool always_gather;       // stores rows by number of the distinct id, for bags to gather
  bool early;               // the previous kernel does not write the index
  bool leaves_dense;        // skips batches with many ids per prefix: a resident kernel runs
  const float* grad;        // gradients: of the output,
  const float* slot_grads;  // and by slot
  FixedPoint fixed_point;
};

// The table and the block of columns that a thread block processes.
template <typename Config>
struct BlockTask {
  const TableCuda* table;
  const FixedPoint* fixed_point;  // only with kFixedPoint
  int32_t number;                 // of the table; only with kFixedPoint
  int32_t middle;
  int32_t first_head_column;    // of four
  int32_t first_middle_column;  // of four
  // How many neighbouring values of a row can be accessed as one aligned vector: 4, 2 or 1.
  int32_t row_width;

  // rows_unit: TileInput::unit.
  __device__ __forceinline__ void find_row_width(int32_t rows_unit) {
    const int32_t last_q = table->last_q;
    row_width = rows_unit == 1 ? 1 : last_q % 4 == 0 ? 4 : last_q % 2 == 0 ? 2 : 1;
  }
  __device__ __forceinline__ int32_t head_q() const { return Config::kKnownQ ? 4 : table->head_q; }
  __device__ __forceinline__ int32_t middle_q() const {
    return Config::kKnownQ ? Config::kMiddleQ : table->middle_q;
  }
  __device__ __forceinline__ int32_t last_q() const { return Config::kKnownQ ? 4 : table->last_q; }
  __device__ __forceinline__ int32_t head_r() const {
    return Config::kKnownRanks ? Config::kRank : table->head_r;
  }
  __device__ __forceinline__ int32_t last_r() const {
    return Config::kKnownRanks ? Config::kRank : table->last_r;
  }
  // head_r rounded up to a multiple of 8; heads and the middle are not read beyond.
  __device__ __forceinline__ int32_t head_depth() const {
    return Config::kKnownRanks ? Config::kRank : (table->head_r + 7) / 8 * 8;
  }
  __device__ __forceinline__ int32_t head_column() const {
    return Config::kKnownQ ? 0 : first_head_column;
  }
  __device__ __forceinline__ int32_t middle_column() const {
    return Config::kKnownQ ? 0 : first_middle_column;
  }
  // Strides of head columns and of middle columns in a row of the table, in values.
  __device__ __forceinline__ int32_t head_step() const { return middle_q() * last_q(); }
  __device__ __forceinline__ int32_t middle_step() const { return last_q(); }
  __device__ __forceinline__ bool has_head(int32_t column) const {
    return Config::kExact || Config::kKnownQ || head_column() + column < head_q();
  }
  __device__ __forceinline__ bool has_middle(int32_t column) const {
    return Config::kExact || middle_column() + column < middle_q();
  }
};

// Four neighbouring values of a core, of which `count` exist; the others are 0.
template <typename Config>
__device__ __forceinline__ float4 load_four(const void* core, RowType type, size_t index,
                                            int count) {
  if constexpr (Config::kVectors) {
    if (!Config::kExact && count <= 0) return make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    if constexpr (Config::kType == RowType::kFloat32) {
      return __ldg(reinterpret_cast<const float4*>(static_cast<const float*>(core) + index));
    } else {
      const uint2 raw =
          __ldg(reinterpret_cast<const uint2*>(static_cast<const uint16_t*>(core) + index));
      return make_float4(__uint_as_float(raw.x << 16), __uint_as_float(raw.x & 0xffff0000u),
                         __uint_as_float(raw.y << 16), __uint_as_float(raw.y & 0xffff0000u));
    }
  } else {
    const char* values = in_global(static_cast<const char*>(core));
    const char* first = values + index * sizeof(float);
    if (type == RowType::kFloat32 && count >= 4 && reinterpret_cast<uintptr_t>(first) % 16 == 0) {
      return __ldg(reinterpret_cast<const float4*>(first));
    }
    float v[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      v[i] = i < count ? load_element(type, values, static_cast<int64_t>(index) + i) : 0.0f;
    }
    return make_float4(v[0], v[1], v[2], v[3]);
  }
}

// Adds to four neighbouring values of the gradient of a core, of which `count` exist.
template <typename Config>
__device__ __forceinline__ void add_to_core(float* to, float4 v, int count) {
  if constexpr (Config::kVectors) {
    if (Config::kExact || count > 0) add_four(to, v);
  } else {
    if (count >= 4 && reinterpret_cast<uintptr_t>(to) % 16 == 0) {
      add_four(to, v);
      return;
    }
    if (count > 0) add_one(to, v.x);
    if (count > 1) add_one(to + 1, v.y);
    if (count > 2) add_one(to + 2, v.z);
    if (count > 3) add_one(to + 3, v.w);
  }
}

// Adds to a value of the gradient of a part.
template <typename Config>
__device__ __forceinline__ void add_fixed(const BlockTask<Config>& task, Part part, const float* to,
                                          float value) {
  const FixedPoint& fixed = *task.fixed_point;
  const double scaled = static_cast<double>(value) * fixed.scales[3 * task.number + part];
  atomicAdd(in_global(fixed.sums) + (to - fixed.grads),
            static_cast<unsigned long long>(__double2ll_rn(scaled)));
}

// Adds to four neighbouring values of the gradient of a part, of which `count` exist.
template <typename Config>
__device__ __forceinline__ void add_to_four([[maybe_unused]] const BlockTask<Config>& task,
                                            [[maybe_unused]] Part part, float* to, float4 v,
                                            int count) {
  if constexpr (Config::kFixedPoint) {
    if (count > 0) add_fixed(task, part, to, v.x);
    if (count > 1) add_fixed(task, part, to + 1, v.y);
    if (count > 2) add_fixed(task, part, to + 2, v.z);
    if (count > 3) add_fixed(task, part, to + 3, v.w);
  } else {
    add_to_core<Config>(to, v, count);
  }
}
template <typename Config>
__device__ __forceinline__ void add_to_two([[maybe_unused]] const BlockTask<Config>& task,
                                           [[maybe_unused]] Part part, float* to, float a, float b,
                                           int count) {
  if constexpr (Config::kFixedPoint) {
    if (count > 0) add_fixed(task, part, to, a);
    if (count > 1) add_fixed(task, part, to + 1, b);
  } else if constexpr (Config::kVectors) {
    if (Config::kExact || count > 0) add_two(to, a, b);
  } else {
    if (count > 0) add_one(to, a);
    if (count > 1) add_one(to + 1, b);
  }
}

// Four neighbouring values of the output's gradient, or of a row, of which `count` exist; the
// others are 0. width: Piece::row_width. Where it is 2, count is even.
template <typename Config>
__device__ __forceinline__ float4 load_row(const float* from, int width, int count) {
  if constexpr (Config::kExact) return *reinterpret_cast<const float4*>(from);
  float4 v = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  if (width == 4) {
    if (count > 0) v = *reinterpret_cast<const float4*>(from);
  } else if (width == 2) {
    if (count > 0) *reinterpret_cast<float2*>(&v.x) = *reinterpret_cast<const float2*>(from);
    if (count > 2) *reinterpret_cast<float2*>(&v.z) = *reinterpret_cast<const float2*>(from + 2);
  } else {
    if (count > 0) v.x = from[0];
    if (count > 1) v.y = from[1];
    if (count > 2) v.z = from[2];
    if (count > 3) v.w = from[3];
  }
  return v;
}
template <typename Config>
__device__ __forceinline__ float2 load_row_pair(const float* from, int width, int count) {
  if constexpr (Config::kExact) return *reinterpret_cast<const float2*>(from);
  float2 v = make_float2(0.0f, 0.0f);
  if (width >= 2) {
    if (count > 0) v = *reinterpret_cast<const float2*>(from);
  } else {
    if (count > 0) v.x = from[0];
    if (count > 1) v.y = from[1];
  }
  return v;
}
template <typename Config>
__device__ __forceinline__ void store_row(float* to, float4 v, int width, int count) {
  if (Config::kExact || width == 4) {
    if (Config::kExact || count > 0) *reinterpret_cast<float4*>(to) = v;
  } else if (width == 2) {
    if (count > 0) *reinterpret_cast<float2*>(to) = make_float2(v.x, v.y);
    if (count > 2) *reinterpret_cast<float2*>(to + 2) = make_float2(v.z, v.w);
  } else {
    if (count > 0) to[0] = v.x;
    if (count > 1) to[1] = v.y;
    if (count > 2) to[2] = v.z;
    if (count > 3) to[3] = v.w;
  }
}
template <typename Config>
__device__ __forceinline__ void store_row_pair(float* to, float2 v, int width, int count) {
  if (Config::kExact || width >= 2) {
    if (count > 0) *reinterpret_cast<float2*>(to) = v;
  } else {
    if (count > 0) to[0] = v.x;
    if (count > 1) to[1] = v.y;
  }
}
// Adds to values of the output.
template <typename Config>
__device__ __forceinline__ void add_row_pair(float* to, float2 v, int width, int count) {
  if (Config::kExact || width >= 2) {
    if (count > 0) add_two(to, v.x, v.y);
  } else {
    if (count > 0) add_one(to, v.x);
    if (count > 1) add_one(to + 1, v.y);
  }
}
template <typename Config>
__device__ __forceinline__ void add_row(float* to, float4 v, int width, int count) {
  if (Config::kExact || width == 4) {
    if (Config::kExact || count > 0) add_four(to, v);
  } else if (width == 2) {
    if (count > 0) add_two(to, v.x, v.y);
    if (count > 2) add_two(to + 2, v.z, v.w);
  } else {
    if (count > 0) add_one(to, v.x);
    if (count > 1) add_one(to + 1, v.y);
    if (count > 2) add_one(to + 2, v.z);
    if (count > 3) add_one(to + 3, v.w);
  }
}

}  // namespace torchrec_hkv::tensor_train::cuda
