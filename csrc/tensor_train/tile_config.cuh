// How a block of threads is laid out that works on a tile: prefixes of one middle slice.
//
// The columns of a row are cut into blocks of 4 x 4 x 4, of head, middle and last columns; a block
// of threads has one block of head and middle columns and all of the last ones. A prefix is then a
// matrix of 16 rows, (head column, middle column), and last_r columns. Ranks are padded to kRank;
// where last_r is large it is cut into slices of kSlice.
#pragma once

#include <cstddef>
#include <cstdint>

#include "common/dtypes.h"
#include "tensor_train/cuda_kernels.h"
#include "tensor_train/index.cuh"
#include "tensor_train/tensor_core.cuh"

namespace torchrec_hkv::tensor_train::cuda {

// What a kernel takes for granted. kRanks: head_r = last_r = kRank, last_q is a multiple of 4 and
// all cores are of type kType; what exists is read 4 values at a time. kNarrow: also q = 4, 2, 4,
// which is what 32 columns have. kWhole: as kRanks, and the other q are multiples of 4 too, so that
// nothing is checked. kFours: also all q are 4. Known q save registers.
enum class Fit { kAny, kRanks, kNarrow, kWhole, kFours };

template <int kRank_, int kSlice_, int kPrefixes_, int kWarps_, int kProducts_, Fit kFit_,
          RowType kType_, int kMinBlocks_, bool kFixedPoint_ = false>
struct TileConfig {
  static constexpr int kRank = kRank_;
  static constexpr int kSlice = kSlice_;
  static constexpr int kPrefixes = kPrefixes_;  // of a tile
  static constexpr int kWarps = kWarps_;
  static constexpr int kProducts = kProducts_;  // of a multiply-add, see tensor_core.cuh
  static constexpr bool kVectors = kFit_ != Fit::kAny;
  static constexpr bool kFours = kFit_ == Fit::kFours;
  static constexpr bool kExact = kFours || kFit_ == Fit::kWhole;
  // Whether q is known: 4, kMiddleQ, 4. Rows are then one block of columns.
  static constexpr bool kKnown = kFours || kFit_ == Fit::kNarrow;
  static constexpr int kMiddleQ = kFours ? 4 : 2;
  static constexpr RowType kType = kType_;
  static constexpr int kMinBlocks = kMinBlocks_;  // of a multiprocessor
  // Gradients are added up as integers, which gives the same bits in any order: see FixedPoint.
  static constexpr bool kFixedPoint = kFixedPoint_;

  static constexpr int kThreads = kWarps * 32;
  static constexpr int kSlices = kRank / kSlice;
  static constexpr int kRows = kPrefixes * 4;  // (prefix, head column)
  static constexpr int kColumns = 4 * kSlice;  // (middle column, r) of a slice
  // Steps in shared memory, in values: chosen so that fragments touch different banks.
  static constexpr int kMiddleStep = kColumns + 4;  // of r_1 in the middle
  static constexpr int kHeadStep = kRank + 4;       // of a row of heads
  static constexpr int kColumnStep = kSlice + 4;    // of a middle column
  static constexpr int kRowStep = 4 * kColumnStep + (kSlice == 32 ? 4 : 20);  // of a row
  static constexpr int kPrefixStep = 4 * kRowStep;
  static constexpr int kSliceStep = kRows * kRowStep;  // of a slice of the prefixes

  static constexpr int kMiddleValues = kRank * kMiddleStep;
  static constexpr int kHeadValues = kRows * kHeadStep;
  // A lookup keeps all slices of its prefixes, gradients one at a time.
  static constexpr size_t shared_bytes(bool backward) {
    return sizeof(float) * (kMiddleValues + kHeadValues + kSliceStep * (backward ? 1 : kSlices));
  }

  static_assert(kRank % kSlice == 0 && (kSlice == 32 || kSlice == 64));
  static_assert(kPrefixes % 4 == 0 && kPrefixes <= 16);
};

// Gradients in deterministic mode: an element at grads + i is sums[i] over its scale.
struct FixedPoint {
  const float* grads;
  unsigned long long* sums;  // as int64
  const double* scales;      // [tables][3] of heads, middles and lasts; null: floats are added
};
enum Part { kHeadPart, kMiddlePart, kLastPart };

struct TileInput {
  const TableView* tables;
  bool one_table;
  int32_t kernel;  // class whose tables are run
  const Counts* counts;
  const int4* prefixes;
  int64_t most_prefixes;  // room is for one more
  const int32_t* lasts;
  const uint32_t* sources;
  const float* factors;  // null: all 1
  int32_t unit;
  int32_t widest;           // step of slots
  bool store;               // rows into the output, which has a row an id, instead of adding them
  float* out;               // of a lookup: output,
  float* slot_rows;         // and rows of slots, or of distinct ids
  bool always_gather;       // rows of distinct ids are stored by number, for bags to gather
  bool early;               // the index is there before the kernel before has ended
  bool leaves_dense;        // batches with many ids a prefix to a resident kernel
  const float* grad;        // of gradients: of the output,
  const float* slot_grads;  // and of slots
  FixedPoint fixed_point;
};

// The table and the block of columns that threads work on.
template <typename Config>
struct Piece {
  const TableView* table;
  const FixedPoint* fixed_point;  // of a configuration that adds so,
  int32_t number;                 // with the table's number
  int32_t middle;
  int32_t first_head_column;    // of 4
  int32_t first_middle_column;  // likewise

  __device__ __forceinline__ int32_t head_q() const { return Config::kKnown ? 4 : table->head_q; }
  __device__ __forceinline__ int32_t middle_q() const {
    return Config::kKnown ? Config::kMiddleQ : table->middle_q;
  }
  __device__ __forceinline__ int32_t last_q() const { return Config::kKnown ? 4 : table->last_q; }
  __device__ __forceinline__ int32_t head_r() const {
    return Config::kVectors ? Config::kRank : table->head_r;
  }
  __device__ __forceinline__ int32_t last_r() const {
    return Config::kVectors ? Config::kRank : table->last_r;
  }
  __device__ __forceinline__ int32_t head_column() const {
    return Config::kKnown ? 0 : first_head_column;
  }
  __device__ __forceinline__ int32_t middle_column() const {
    return Config::kKnown ? 0 : first_middle_column;
  }
  // Values between neighbouring head columns, and middle columns, in a row of the table.
  __device__ __forceinline__ int32_t head_step() const { return middle_q() * last_q(); }
  __device__ __forceinline__ int32_t middle_step() const { return last_q(); }
  __device__ __forceinline__ bool has_head(int32_t column) const {
    return Config::kExact || Config::kKnown || head_column() + column < head_q();
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
    const char* values = static_cast<const char*>(core);
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

// Adds to four neighbouring values, of which `count` exist.
template <typename Config>
__device__ __forceinline__ void add_row(float* to, float4 v, int count) {
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
__device__ __forceinline__ void add_fixed(const Piece<Config>& piece, Part part, const float* to,
                                          float value) {
  const FixedPoint& fixed = *piece.fixed_point;
  const double scaled = static_cast<double>(value) * fixed.scales[3 * piece.number + part];
  atomicAdd(fixed.sums + (to - fixed.grads),
            static_cast<unsigned long long>(__double2ll_rn(scaled)));
}

// Adds to four neighbouring values of the gradient of a part, of which `count` exist.
template <typename Config>
__device__ __forceinline__ void add_to_four([[maybe_unused]] const Piece<Config>& piece,
                                            [[maybe_unused]] Part part, float* to, float4 v,
                                            int count) {
  if constexpr (Config::kFixedPoint) {
    if (count > 0) add_fixed(piece, part, to, v.x);
    if (count > 1) add_fixed(piece, part, to + 1, v.y);
    if (count > 2) add_fixed(piece, part, to + 2, v.z);
    if (count > 3) add_fixed(piece, part, to + 3, v.w);
  } else {
    add_row<Config>(to, v, count);
  }
}
template <typename Config>
__device__ __forceinline__ void add_to_two([[maybe_unused]] const Piece<Config>& piece,
                                           [[maybe_unused]] Part part, float* to, float a, float b,
                                           int count) {
  if constexpr (Config::kFixedPoint) {
    if (count > 0) add_fixed(piece, part, to, a);
    if (count > 1) add_fixed(piece, part, to + 1, b);
  } else if constexpr (Config::kVectors) {
    if (Config::kExact || count > 0) add_two(to, a, b);
  } else {
    if (count > 0) add_one(to, a);
    if (count > 1) add_one(to + 1, b);
  }
}

// Four neighbouring values of the output's gradient, or of a row, of which `count` exist.
template <typename Config>
__device__ __forceinline__ float4 load_row(const float* from, int count) {
  if constexpr (Config::kVectors) {
    if (!Config::kExact && count <= 0) return make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    return *reinterpret_cast<const float4*>(from);
  } else {
    return make_float4(count > 0 ? from[0] : 0.0f, count > 1 ? from[1] : 0.0f,
                       count > 2 ? from[2] : 0.0f, count > 3 ? from[3] : 0.0f);
  }
}
template <typename Config>
__device__ __forceinline__ void store_row(float* to, float4 v, int count) {
  if constexpr (Config::kVectors) {
    if (Config::kExact || count > 0) *reinterpret_cast<float4*>(to) = v;
  } else {
    if (count > 0) to[0] = v.x;
    if (count > 1) to[1] = v.y;
    if (count > 2) to[2] = v.z;
    if (count > 3) to[3] = v.w;
  }
}

}  // namespace torchrec_hkv::tensor_train::cuda
