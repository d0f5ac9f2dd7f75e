// The update of one row by a tile of lanes, for the most common optimizers and rows of bounded
// width. row_update.cuh has the general form.
//
// A lane has kVectors vectors of a row: eight columns of 16 bits each, or four of another type. The
// vectors of neighbouring lanes are adjacent, so that a tile reads and writes whole lines. All
// lanes of a warp call update() together, all lanes of a tile the other methods.
#pragma once

#include <cstdint>

#include "common/optimizers.h"
#include "common/rounding.h"
#include "hash_table/cuda/async_copy.cuh"
#include "hash_table/cuda/int8_row.cuh"
#include "hash_table/cuda/row_vector.cuh"
#include "hash_table/cuda/tile.cuh"

namespace torchrec_hkv::hash_table::cuda {

// Whether RowUpdater implements an optimizer: one of the most common ones, without steps counted by
// row.
inline bool has_row_updater(const OptimizerConfig& optimizer) {
  const bool known = optimizer.kind == Optimizer::kSgd ||
                     optimizer.kind == Optimizer::kRowWiseAdagrad ||
                     optimizer.kind == Optimizer::kAdagrad || optimizer.kind == Optimizer::kAdam;
  return known && !optimizer.own_steps;
}

// Whether an update uses the gradient as it is, does not bound the norm of the row, and rounds rows
// of 16 bits to nearest. The code for the rest takes registers that most updates need.
inline bool is_plain_update(const OptimizerConfig& optimizer, RowType type) {
  const bool draws = optimizer.stochastic_rounding && element_size(type) == sizeof(uint16_t);
  return has_plain_gradient(optimizer) && !limits_norm(optimizer) && !draws;
}

// Values of a row that RowUpdater needs besides its columns.
struct RowExtras {
  float square;       // row-wise Adagrad's mean of squares
  float scale;        // of a row of 8 bits
  uint64_t rounding;  // key of stochastic rounding
};

// kKind: kSgd also serves row-wise Adagrad, whose columns have the same formula. Element: float,
// uint16_t for both 16-bit types, or int8_t. kPlain: is_plain_update.
template <Optimizer kKind, typename Element, int kLanes, int kVectors, bool kPlain>
struct RowUpdater {
  static constexpr int kWidth = sizeof(Element) == sizeof(uint16_t) ? 8 : 4;  // of a vector
  static constexpr int kStates = column_states(kKind);
  static constexpr bool kFloat32 = sizeof(Element) == sizeof(float);
  static constexpr bool k16Bits = sizeof(Element) == sizeof(uint16_t);
  static constexpr bool kInt8 = sizeof(Element) == sizeof(int8_t);
  using Vector = Columns<kWidth>;

  // A lane's columns of a row.
  struct LaneColumns {
    Vector v[kVectors];

    __device__ __forceinline__ void clear() {
#pragma unroll
      for (int i = 0; i < kVectors; ++i) v[i] = Vector::zero();
    }
    __device__ __forceinline__ void add(float scale, const LaneColumns& other) {
#pragma unroll
      for (int i = 0; i < kVectors; ++i) v[i].add(scale, other.v[i]);
    }
  };

  RowTerms terms;
  int32_t dim = 0;
  RowType type;
  uint32_t column_offset = 0;  // of rows of 16 bits
  uint64_t policy;             // cache policy of data that is not read again soon

  // Whether rows have one mean of squares (row-wise Adagrad).
  __device__ __forceinline__ static bool adapts(const OptimizerConfig& config) {
    return kKind == Optimizer::kSgd && config.kind == Optimizer::kRowWiseAdagrad;
  }
  __device__ __forceinline__ void begin(const TableView& table, const OptimizerConfig& config,
                                        float learning_rate) {
    dim = table.rows.width;
    type = kFloat32 ? RowType::kFloat32 : table.rows.type;
    if constexpr (k16Bits && !kPlain) column_offset = static_cast<uint32_t>(table.column_offset);
    policy = evict_first();
    terms = begin_row(config, learning_rate, static_cast<float>(*table.optimizer_step));
  }
  __device__ __forceinline__ static int32_t column(int vector) {
    return (Tile<kLanes>::lane() + vector * kLanes) * kWidth;
  }
  // Whether rows begin at multiples of 16 bytes; always true for float32. Not for rows of 8 bits.
  __device__ __forceinline__ bool aligned() const { return kFloat32 || dim % kWidth == 0; }

  // Begins to copy the lane's columns of float32 values. kOnce: evicts these lines from L2 first,
  // so that gradients, which are read again, stay there. Not in kernels for column states, for
  // which nvcc 13.0 generates illegal instructions.
  template <bool kOnce>
  __device__ __forceinline__ void copy_floats(char* to, const float* from) const {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
#pragma unroll
      for (int k = 0; k < kWidth; k += 4) {
        const int32_t at = column(i) + k;
        if (at >= dim) break;
        char* const address = to + at * static_cast<int32_t>(sizeof(float));
        if constexpr (kOnce && kStates == 0) {
          copy_async(address, from + at, policy);
        } else {
          copy_async<16>(address, from + at);
        }
      }
    }
  }
  // As copy_floats, for 16-bit values, which begin at multiples of 8 bytes.
  __device__ __forceinline__ void copy_halves(char* to, const uint16_t* from) const {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
#pragma unroll
      for (int k = 0; k < kWidth; k += 4) {
        const int32_t at = column(i) + k;
        if (at < dim) copy_async<8>(to + at * static_cast<int32_t>(sizeof(uint16_t)), from + at);
      }
    }
  }
  __device__ __forceinline__ void copy_gradient(char* to, const char* from,
                                                RowType value_type) const {
    if (value_type == RowType::kFloat32) {
      copy_floats<false>(to, reinterpret_cast<const float*>(from));
    } else {
      copy_halves(to, reinterpret_cast<const uint16_t*>(from));
    }
  }
  __device__ __forceinline__ void copy_row(char* to, const char* from) const {
    if constexpr (kFloat32) {
      copy_floats<true>(to, reinterpret_cast<const float*>(from));
    } else if constexpr (kInt8) {  // without the scale
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
        if (column(i) < dim) copy_async<4>(to + column(i), from + kInt8Start + column(i));
      }
    } else if (aligned()) {
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
        const int32_t at = column(i) * static_cast<int32_t>(sizeof(Element));
        if (column(i) >= dim) break;
        if constexpr (kStates == 0) {
          copy_async(to + at, from + at, policy);
        } else {
          copy_async<16>(to + at, from + at);
        }
      }
    } else {
      copy_halves(to, reinterpret_cast<const uint16_t*>(from));
    }
  }

  // Loads the copied columns, with zeros after the row's columns.
  __device__ __forceinline__ LaneColumns load(RowType value_type, const char* from) const {
    LaneColumns columns;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      columns.v[i] = Vector::zero();
      if (column(i) >= dim) continue;
      columns.v[i] = Vector::load(value_type, from, column(i));
      if (k16Bits && column(i) + 4 >= dim) {
#pragma unroll
        for (int k = 4; k < kWidth; ++k) columns.v[i].v[k] = 0.0f;
      }
    }
    return columns;
  }

  // active: whether the tile has a row to update. sum: the row's gradient; an active tile may
  // change it. values, state: the row and its column states in memory. arrived_*: their copies,
  // states `state_stride` bytes apart. Returns row-wise Adagrad's new mean of squares.
  __device__ __forceinline__ float update(bool active, const OptimizerConfig& config,
                                          LaneColumns& sum, const char* arrived_row,
                                          const char* arrived_states, int32_t state_stride,
                                          char* values, float* state, const RowExtras& extras,
                                          bool adapts) const {
    values = in_global(values);
    state = in_global(state);
    RowTerms row_terms = terms;
    float renewed = 0.0f;
    [[maybe_unused]] LaneColumns row;  // of 8 bits, until its scale is known
    [[maybe_unused]] uint32_t largest = 0;
    if constexpr (!kPlain)
      clip_and_decay(active, config, arrived_row, extras.scale, sum, row_terms);
    if (kKind == Optimizer::kSgd && adapts) {
      float squares = 0.0f;
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
#pragma unroll
        for (int k = 0; k < kWidth; ++k) squares += sum.v[i].v[k] * sum.v[i].v[k];
      }
      squares = Tile<kLanes>::sum(squares);
      if (active) renewed = adapt_row(config, squares, dim, extras.square, &row_terms);
    }
    if constexpr (kStates == 0 && !kPlain) {
      limit_norm(active, config, arrived_row, extras.scale, sum, row_terms);
    }
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const int32_t at = column(i);
      if (!active || at >= dim) continue;
      Vector value = load_value(arrived_row, at, extras.scale);
      Vector first, second;
      if constexpr (kStates >= 1) {
        first = Vector::load(reinterpret_cast<const float*>(arrived_states) + at);
      }
      if constexpr (kStates >= 2) {
        second = Vector::load(reinterpret_cast<const float*>(arrived_states + state_stride) + at);
      }
#pragma unroll
      for (int k = 0; k < kWidth; ++k) {
        float unused = 0.0f;
        float& first_of = kStates >= 1 ? first.v[k] : unused;
        float& second_of = kStates >= 2 ? second.v[k] : unused;
        value.v[k] =
            move_column<kKind>(config, row_terms, value.v[k], sum.v[i].v[k], first_of, second_of);
      }
      if constexpr (kInt8) {
        row.v[i] = value;
#pragma unroll
        for (int k = 0; k < kWidth; ++k) largest = max(largest, magnitude_bits(value.v[k]));
      } else if (k16Bits && !kPlain && config.stochastic_rounding) {
        store_by_chance(value, extras.rounding, values, at);
      } else {
        store_row(value, values, at);
      }
      if constexpr (kStates >= 1) store_floats(first, state, at);
      if constexpr (kStates >= 2) store_floats(second, state + dim, at);
    }
    if constexpr (kInt8) {
      largest = Tile<kLanes>::largest(largest);
      if (active) store_int8(row, largest, extras.rounding, values);
    }
    return renewed;
  }

 private:
  // Columns of the copy of a row. scale: of a row of 8 bits.
  __device__ __forceinline__ Vector load_value(const char* arrived_row, int32_t at,
                                               float scale) const {
    if constexpr (kInt8) {
      return Vector::load_int8(arrived_row + at, scale);
    } else if constexpr (k16Bits) {
      return Vector::load_16_bits(type, arrived_row, at);
    } else {
      return Vector::load(type, arrived_row, at);
    }
  }

  // Calls visit(gradient, value) for the lane's columns of a row.
  template <typename Visit>
  __device__ __forceinline__ void for_each_column(const char* arrived_row, float scale,
                                                  LaneColumns& sum, const Visit& visit) const {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const int32_t at = column(i);
      if (at >= dim) break;
      const Vector value = load_value(arrived_row, at, scale);
#pragma unroll
      for (int k = 0; k < kWidth; ++k) {
        if (k < 4 || at + 4 < dim) visit(sum.v[i].v[k], value.v[k]);
      }
    }
  }

  // Replaces the gradient of an active tile by gradient_of.
  __device__ __forceinline__ void clip_and_decay(bool active, const OptimizerConfig& config,
                                                 const char* arrived_row, float scale,
                                                 LaneColumns& sum, RowTerms& row_terms) const {
    if (clips_by_norm(config)) {
      float squares = 0.0f;
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
#pragma unroll
        for (int k = 0; k < kWidth; ++k) {
          const float g = clipped(config, sum.v[i].v[k]);
          squares += g * g;
        }
      }
      clip_row(config, Tile<kLanes>::sum(squares), &row_terms);
    }
    if (!active) return;
    for_each_column(arrived_row, scale, sum, [&](float& gradient, float value) {
      gradient = gradient_of(config, row_terms, value, gradient);
    });
  }

  // Bounds the norm of the new row, for optimizers without column states. sum: of gradient_of.
  __device__ __forceinline__ void limit_norm(bool active, const OptimizerConfig& config,
                                             const char* arrived_row, float scale, LaneColumns& sum,
                                             RowTerms& row_terms) const {
    if (!limits_norm(config)) return;
    float squares = 0.0f;
    if (active) {
      for_each_column(arrived_row, scale, sum, [&](float gradient, float value) {
        const float renewed = moved(row_terms, value, gradient);
        squares += renewed * renewed;
      });
    }
    limit_row(config, Tile<kLanes>::sum(squares), &row_terms);
  }

  __device__ __forceinline__ void store_floats(const Vector& vector, float* to, int32_t at) const {
#pragma unroll
    for (int k = 0; k < kWidth; k += 4) {
      if (at + k >= dim) break;
      store_once(to + at + k,
                 Columns<4>{vector.v[k], vector.v[k + 1], vector.v[k + 2], vector.v[k + 3]},
                 policy);
    }
  }
  // largest: magnitude_bits of the row's largest value.
  __device__ __forceinline__ void store_int8(const LaneColumns& row, uint32_t largest,
                                             uint64_t rounding, char* to) const {
    const Int8Scale scale = int8_scale(largest);
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const int32_t at = column(i);
      if (at >= dim) break;
      uint32_t word = 0;
      if (scale.inverse != 0.0f) {
        word = pack_int8_by_chance(row.v[i].v, scale.inverse,
                                   rounding_bits(rounding, static_cast<uint32_t>(at) / 4));
      }
      *reinterpret_cast<uint32_t*>(to + kInt8Start + at) = word;
    }
    if (Tile<kLanes>::lane() == 0) *reinterpret_cast<float*>(to) = scale.scale;
  }
  // Columns of a row of 16 bits.
  __device__ __forceinline__ void store_by_chance(const Vector& vector, uint64_t rounding, char* to,
                                                  int32_t at) const {
#pragma unroll
    for (int k = 0; k < kWidth; k += 4) {
      if (at + k >= dim) break;
      const uint32_t first = column_offset + static_cast<uint32_t>(at + k);
      const bool one_quad = first % 4 == 0;  // the same for all columns of the table
      const uint64_t bits = rounding_bits(rounding, first / 4);
      uint32_t draws[4];
#pragma unroll
      for (uint32_t c = 0; c < 4; ++c) {
        draws[c] =
            one_quad ? static_cast<uint32_t>(bits >> 16 * c) : rounding_draw(rounding, first + c);
      }
      *reinterpret_cast<uint2*>(to + (at + k) * sizeof(Element)) = make_uint2(
          narrow_pair_by_chance(type, vector.v[k], vector.v[k + 1], draws[0], draws[1]),
          narrow_pair_by_chance(type, vector.v[k + 2], vector.v[k + 3], draws[2], draws[3]));
    }
  }
  __device__ __forceinline__ void store_row(const Vector& vector, char* to, int32_t at) const {
    if constexpr (kFloat32) {
      store_floats(vector, reinterpret_cast<float*>(to), at);
    } else if (aligned()) {
      vector.store(type, to, at);
    } else {
#pragma unroll
      for (int k = 0; k < kWidth; k += 4) {
        if (at + k >= dim) break;
        *reinterpret_cast<uint2*>(to + (at + k) * sizeof(Element)) =
            make_uint2(narrow_pair(type, vector.v[k], vector.v[k + 1]),
                       narrow_pair(type, vector.v[k + 2], vector.v[k + 3]));
      }
    }
  }
};

}  // namespace torchrec_hkv::hash_table::cuda
