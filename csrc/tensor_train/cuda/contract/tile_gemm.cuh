// The products of a tile in shared memory: prefixes = heads x middle, and the gradients of the
// middle and of the heads from the gradients of the prefixes.
#pragma once

#include "tensor_train/cuda/contract/tensor_core.cuh"
#include "tensor_train/cuda/contract/tile_config.cuh"

namespace torchrec_hkv::tensor_train::cuda {

// A slice of the middle core: [kRank][4 middle columns][kSlice] -> shared memory.
template <typename Config>
__device__ __forceinline__ void load_middle(int thread, const Piece<Config>& piece, int slice,
                                            float* to) {
  constexpr int kQuads = Config::kRank * Config::kSlice;  // of 4 values
  constexpr int kMine = kQuads / Config::kThreads;
  static_assert(kQuads % Config::kThreads == 0);
  // All loads come before the first store: in a loop of loads and stores each load would wait,
  // because the compiler cannot know that the stores do not change the addresses of the loads.
  constexpr int kTogether = kMine < 4 ? kMine : 4;
  static_assert(kMine % kTogether == 0);
  const TableView& table = *piece.table;
  const void* const core = table.middle;
  const RowType type = table.middle_type;
  const int32_t head_r = piece.head_r();
  const int32_t last_r = piece.last_r();
  const int32_t middle_q = piece.middle_q();
  const size_t first =
      (static_cast<size_t>(piece.middle) * head_r * middle_q + piece.middle_column()) * last_r +
      slice * Config::kSlice;
  const int quads = piece.head_depth() * Config::kSlice;
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
      const bool exists = (Config::kKnownRanks || r < head_r) && piece.has_middle(column);
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

// Heads of `count` prefixes for shared memory, [prefix][4 head columns][kRank]; other rows are 0.
// Loads and stores are separate, so that other loads overlap.
template <typename Config>
struct HeadLoad {
  static constexpr int kQuads = Config::kPrefixes * Config::kRank;  // of 4 values
  static constexpr int kMine = (kQuads + Config::kThreads - 1) / Config::kThreads;
  static_assert(kQuads % Config::kThreads == 0);
  // Whether there are registers to hold them while the middle is loaded.
  static constexpr bool kEarly = Config::kVectors && Config::kSlices == 1 && kMine <= 2;
  float4 values[kMine];

  __device__ __forceinline__ void read(int thread, const Piece<Config>& piece, const int4* prefixes,
                                       int count) {
    const TableView& table = *piece.table;
    const int32_t head_r = piece.head_r();
#pragma unroll
    for (int k = 0; k < kMine; ++k) {
      const int i = thread + k * Config::kThreads;
      const int prefix = i / Config::kRank;
      const int column = i % Config::kRank / (Config::kRank / 4);
      const int within = i % (Config::kRank / 4) * 4;
      values[k] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      if (prefix < count && piece.has_head(column)) {
        const size_t row =
            static_cast<size_t>(prefixes[prefix].w) * piece.head_q() + piece.head_column() + column;
        values[k] =
            load_four<Config>(table.head, table.head_type, row * head_r + within, head_r - within);
      }
    }
  }

  // Of eight neighbouring ranks the even ones come first, see multiply_prefixes.
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

// prefixes[kRows][kColumns] = heads[kRows][kRank] middle[kRank][kColumns].
//
// Of eight ranks the even ones are the first four of the depth of a product, the odd ones the other
// four, and a lane's columns of kVector products are neighbours: so a fragment of the heads is one
// load of matrices, those of the middle and what is stored are vectors, and no two lanes of a load
// want different lines of one bank. For `count` prefixes; results of others are not used.
template <typename Config>
__device__ __forceinline__ void multiply_prefixes(int thread, const Piece<Config>& piece,
                                                  const float* heads, const float* middle,
                                                  float* prefixes, int count) {
  constexpr int kProducts = Config::kProducts;
  constexpr int kRowTiles = Config::kRows / 16;
  constexpr int kRowGroups = kRowTiles >= 4 && Config::kWarps >= 8 ? 2 : 1;
  constexpr int kMine = kRowTiles / kRowGroups;
  constexpr int kMyColumns = Config::kColumns / (Config::kWarps / kRowGroups) / 8;
  static_assert(kMyColumns >= 1 && kMine >= 1);
  // Vectors of operands that are not split would have to be moved to adjacent registers.
  constexpr int kVector = kProducts == 1 ? 1 : kMyColumns < 4 ? kMyColumns : 4;
  static_assert(kMyColumns % kVector == 0);
  const int warp = thread / 32 / kRowGroups;
  const int first = thread / 32 % kRowGroups * kMine;
  const int lane = thread % 32, row = lane / 4, column = lane % 4;
  if (kRowGroups > 1 && first * 4 >= count) return;
  const float* const its_heads =
      heads + (first * 16 + lane % 16) * Config::kHeadStep + lane / 16 * 4;
  const float* const its_middle =
      middle + 2 * column * Config::kMiddleStep + warp * kMyColumns * 8 + kVector * row;
  float sums[kMine][kMyColumns][4] = {};
  const int depth = piece.head_depth();
#pragma unroll 4
  for (int k = 0; k < depth; k += 8) {
    Operand<kProducts> b[kMyColumns][2];
#pragma unroll
    for (int j = 0; j < kMyColumns; j += kVector) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float values[kVector];
        load_neighbours(its_middle + (k + half) * Config::kMiddleStep + 8 * j, values);
#pragma unroll
        for (int v = 0; v < kVector; ++v) b[j + v][half] = operand<kProducts>(values[v]);
      }
    }
#pragma unroll
    for (int m = 0; m < kMine; ++m) {
      float a[4];
      load_matrices(its_heads + m * 16 * Config::kHeadStep + k, a);
      const auto a0 = operand<kProducts>(a[0]), a1 = operand<kProducts>(a[1]);
      const auto a2 = operand<kProducts>(a[2]), a3 = operand<kProducts>(a[3]);
#pragma unroll
      for (int j = 0; j < kMyColumns; ++j) {
        multiply_add(sums[m][j], a0, a1, a2, a3, b[j][0], b[j][1]);
      }
    }
  }
#pragma unroll
  for (int m = 0; m < kMine; ++m) {
#pragma unroll
    for (int j = 0; j < kMyColumns; j += kVector) {
      const int at = (warp * kMyColumns + j) * 8 + 2 * kVector * column;
      float* const to = prefixes + ((first + m) * 16 + row) * Config::kRowStep +
                        at / Config::kSlice * Config::kColumnStep + at % Config::kSlice;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float values[2 * kVector];  // of neighbouring columns
#pragma unroll
        for (int v = 0; v < kVector; ++v) {
          values[v] = prepared<kProducts>(sums[m][j + v][2 * half]);
          values[kVector + v] = prepared<kProducts>(sums[m][j + v][2 * half + 1]);
        }
        float* const line = to + half * 8 * Config::kRowStep;
        if constexpr (kVector == 1) {
          *reinterpret_cast<float2*>(line) = make_float2(values[0], values[1]);
        } else {
#pragma unroll
          for (int v = 0; v < 2 * kVector; v += 4) {
            *reinterpret_cast<float4*>(line + v) =
                make_float4(values[v], values[v + 1], values[v + 2], values[v + 3]);
          }
        }
      }
    }
  }
}

// The prefixes of a table of two cores, which are its head slices.
template <typename Config>
struct HeadPrefixes {
  static constexpr int kLine = Config::kSlice / 4;  // units of 4 values
  static constexpr int kUnits = 16 * kLine;         // of a prefix

  // Calls use(element of the head, offset in the prefixes in shared memory, number of existing
  // values) for the units of `count` prefixes.
  template <typename Use>
  static __device__ __forceinline__ void each(int thread, const Piece<Config>& piece, int slice,
                                              const int4* prefixes, int count, const Use& use) {
    const int32_t last_r = piece.last_r();
    for (int i = thread; i < count * kUnits; i += Config::kThreads) {
      const int prefix = i / kUnits, row = i % kUnits / kLine, within = i % kLine * 4;
      const int head_column = row / 4, middle_column = row % 4;
      const size_t line = (static_cast<size_t>(prefixes[prefix].w) * piece.head_q() +
                           piece.head_column() + head_column) *
                              piece.middle_q() +
                          piece.middle_column() + middle_column;
      const bool exists = piece.has_head(head_column) && piece.has_middle(middle_column);
      const int r = slice * Config::kSlice + within;
      use(line * last_r + r,
          prefix * Config::kPrefixStep + head_column * Config::kRowStep +
              middle_column * Config::kColumnStep + within,
          exists ? last_r - r : 0);
    }
  }
  static __device__ __forceinline__ void load(int thread, const Piece<Config>& piece, int slice,
                                              const int4* prefixes, int count, float* to) {
    const TableView& table = *piece.table;
    each(thread, piece, slice, prefixes, count, [&](size_t element, int at, int left) {
      *reinterpret_cast<float4*>(to + at) = prepared<Config::kProducts>(
          load_four<Config>(table.head, table.head_type, element, left));
    });
  }
  static __device__ __forceinline__ void add_grads(int thread, const Piece<Config>& piece,
                                                   int slice, const int4* prefixes, int count,
                                                   const float* grads) {
    float* const head_grad = piece.table->head_grad;
    each(thread, piece, slice, prefixes, count, [&](size_t element, int at, int left) {
      add_to_four<Config>(piece, kHeadPart, head_grad + element,
                          *reinterpret_cast<const float4*>(grads + at), left);
    });
  }
};

// A part of the gradient of a middle slice, in registers of a block: kTiles tiles of 16 rows from
// row first_row on, of [kRank][kColumns] = heads^T grads. Rows are ranks in the order in which
// heads lie in shared memory: a lane has two neighbours of a tile, and kColumnTiles neighbouring
// columns.
template <typename Config>
struct MiddleGrad {
  static constexpr int kColumnTiles = Config::kColumns / Config::kWarps / 8;  // of a warp
  static constexpr int kAllTiles = Config::kRank / 16;
  static constexpr int kTiles = kAllTiles * kColumnTiles <= 16 ? kAllTiles : 16 / kColumnTiles;
  static constexpr int kVector = kColumnTiles < 4 ? kColumnTiles : 4;
  static_assert(kColumnTiles >= 1 && kAllTiles % kTiles == 0);
  static_assert(kColumnTiles % kVector == 0);
  float sums[kTiles][kColumnTiles][4];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int m = 0; m < kTiles; ++m) {
#pragma unroll
      for (int j = 0; j < kColumnTiles; ++j) {
#pragma unroll
        for (int i = 0; i < 4; ++i) sums[m][j][i] = 0.0f;
      }
    }
  }

  // Adds the gradients of `count` prefixes.
  __device__ __forceinline__ void add(int thread, int first_row, const float* heads,
                                      const float* grads, int count) {
    constexpr int kProducts = Config::kProducts;
    const int warp = thread / 32, row = thread % 32 / 4, column = thread % 4;
    const int depth = (count + 1) / 2 * 8;  // rows of absent prefixes are 0
    // k = column stands for row 2 column, k = column + 4 for the next: no bank conflicts.
    const float* const its_heads = heads + 2 * column * Config::kHeadStep + first_row + 2 * row;
    const float* its_grads[kColumnTiles / kVector];
#pragma unroll
    for (int j = 0; j < kColumnTiles / kVector; ++j) {
      const int at = (warp * kColumnTiles + j * kVector) * 8 + kVector * row;
      its_grads[j] = grads + 2 * column * Config::kRowStep +
                     at / Config::kSlice * Config::kColumnStep + at % Config::kSlice;
    }
#pragma unroll 2
    for (int k = 0; k < depth; k += 8) {
      Operand<kProducts> b[kColumnTiles][2];
#pragma unroll
      for (int j = 0; j < kColumnTiles; j += kVector) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float values[kVector];
          load_neighbours(its_grads[j / kVector] + (k + half) * Config::kRowStep, values);
#pragma unroll
          for (int v = 0; v < kVector; ++v) b[j + v][half] = operand<kProducts>(values[v]);
        }
      }
#pragma unroll
      for (int m = 0; m < kTiles; ++m) {
        float even[2], odd[2];  // of rows 2 column and the next
        load_neighbours(its_heads + k * Config::kHeadStep + m * 16, even);
        load_neighbours(its_heads + (k + 1) * Config::kHeadStep + m * 16, odd);
        const auto a0 = operand<kProducts>(even[0]), a1 = operand<kProducts>(even[1]);
        const auto a2 = operand<kProducts>(odd[0]), a3 = operand<kProducts>(odd[1]);
#pragma unroll
        for (int j = 0; j < kColumnTiles; ++j) {
          multiply_add(sums[m][j], a0, a1, a2, a3, b[j][0], b[j][1]);
        }
      }
    }
  }

  // Adds it to the gradient in memory.
  __device__ __forceinline__ void flush(int thread, const Piece<Config>& piece, int slice,
                                        int first_row) const {
    const int32_t last_r = piece.last_r(), middle_q = piece.middle_q();
    const int warp = thread / 32, row = thread % 32 / 4, column = thread % 4;
#pragma unroll
    for (int j = 0; j < kColumnTiles; j += kVector) {
      const int at = (warp * kColumnTiles + j) * 8 + 2 * kVector * column;
      const int middle_column = at / Config::kSlice;
      const int r = slice * Config::kSlice + at % Config::kSlice;
#pragma unroll
      for (int m = 0; m < kTiles; ++m) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int head = first_row + m * 16 + row / 4 * 8 + row % 4 / 2 + row % 2 * 4 + 2 * half;
          const size_t line =
              (static_cast<size_t>(piece.middle) * piece.head_r() + head) * middle_q +
              piece.middle_column() + middle_column;
          const bool exists =
              piece.has_middle(middle_column) && (Config::kKnownRanks || head < piece.head_r());
          float* const to = piece.table->middle_grad + line * last_r + r;
          const int left = exists ? last_r - r : 0;
          const int i = 2 * half;
          const auto& own = sums[m];
          if constexpr (kVector == 1) {
            add_to_two<Config>(piece, kMiddlePart, to, own[j][i], own[j][i + 1], left);
          } else if constexpr (kVector == 2) {
            add_to_four<Config>(
                piece, kMiddlePart, to,
                make_float4(own[j][i], own[j + 1][i], own[j][i + 1], own[j + 1][i + 1]), left);
          } else {
            add_to_four<Config>(piece, kMiddlePart, to,
                                make_float4(own[j][i], own[j + 1][i], own[j + 2][i], own[j + 3][i]),
                                left);
            add_to_four<Config>(
                piece, kMiddlePart, to + 4,
                make_float4(own[j][i + 1], own[j + 1][i + 1], own[j + 2][i + 1], own[j + 3][i + 1]),
                left - 4);
          }
        }
      }
    }
  }
};

template <typename Config>
__device__ __forceinline__ void add_middle_grad(int thread, const Piece<Config>& piece, int slice,
                                                const float* heads, const float* grads, int count) {
  using Grad = MiddleGrad<Config>;
#pragma unroll 1
  for (int first_row = 0; first_row < piece.head_r(); first_row += 16 * Grad::kTiles) {
    Grad grad;
    grad.clear();
    grad.add(thread, first_row, heads, grads, count);
    grad.flush(thread, piece, slice, first_row);
  }
}

// head_grad rows [kRows][kRank] += grads[kRows][kColumns] middle^T, of `count` prefixes. kChains:
// independent sums of a value, so that as many products do not depend on each other.
template <typename Config, int kChains = 1>
__device__ __forceinline__ void add_head_grad(int thread, const Piece<Config>& piece,
                                              const int4* prefixes, int count, const float* middle,
                                              const float* grads) {
  constexpr int kProducts = Config::kProducts;
  constexpr int kRowTiles = Config::kRows / 16;
  constexpr int kSharing = Config::kWarps / kRowTiles;  // warps of one row tile
  constexpr int kMine = Config::kRank / 8 / kSharing;   // column tiles
  static_assert(Config::kWarps % kRowTiles == 0 && kMine >= 1);
  const TableView& table = *piece.table;
  const int32_t head_r = piece.head_r();
  const int warp = thread / 32, row = thread % 32 / 4, column = thread % 4;
  const int row_tile = warp % kRowTiles;
  const int first = warp / kRowTiles * kMine;
  if (row_tile * 4 >= count || first * 8 >= head_r) return;
  float chains[kChains][kMine][4] = {};
  const int lane = thread % 32;
  const float* const its_grads =
      grads + (row_tile * 16 + lane % 16) * Config::kRowStep + lane / 16 * 4;
  const float* const its_middle =
      middle + (first * 8 + lane % 8) * Config::kMiddleStep + lane / 8 * 4;
#pragma unroll 1
  for (int middle_column = 0; middle_column < 4; ++middle_column) {
    if (!piece.has_middle(middle_column)) break;
#pragma unroll 2
    for (int k = 0; k < Config::kSlice; k += 16) {
      float a[2][4];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        load_matrices(its_grads + middle_column * Config::kColumnStep + k + 8 * half, a[half]);
      }
#pragma unroll
      for (int j = 0; j < kMine; ++j) {
        float b[4];
        load_matrices(its_middle + j * 8 * Config::kMiddleStep + middle_column * Config::kSlice + k,
                      b);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          multiply_add(chains[(k / 8 + half) % kChains][j], operand<kProducts>(a[half][0]),
                       operand<kProducts>(a[half][1]), operand<kProducts>(a[half][2]),
                       operand<kProducts>(a[half][3]), operand<kProducts>(b[2 * half]),
                       operand<kProducts>(b[2 * half + 1]));
        }
      }
    }
  }
  float (&sums)[kMine][4] = chains[0];
#pragma unroll
  for (int c = 1; c < kChains; ++c) {
#pragma unroll
    for (int j = 0; j < kMine; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) sums[j][i] += chains[c][j][i];
    }
  }
  const int prefix = row_tile * 4 + row / 4;
  const int head_column = piece.head_column() + row % 4;
  const bool exists = piece.has_head(row % 4);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (prefix + 2 * half >= count) continue;
    const size_t line =
        static_cast<size_t>(prefixes[prefix + 2 * half].w) * piece.head_q() + head_column;
#pragma unroll
    for (int j = 0; j < kMine; ++j) {
      const int r = (first + j) * 8 + 2 * column;
      add_to_two<Config>(piece, kHeadPart, table.head_grad + line * head_r + r, sums[j][2 * half],
                         sums[j][2 * half + 1], exists ? head_r - r : 0);
    }
  }
}

}  // namespace torchrec_hkv::tensor_train::cuda
