// Updates of single rows by a tile of lanes, for the optimizers that are used most: fp32 rows of at
// most kQuickColumns columns, in multiples of four. What depends on the table alone is held in
// registers, and computed once for all rows of a tile. row_update.cuh has all others.
//
// An updater has load(slot), which begins to read a row and its state, and finish(slot, row,
// gradient), which updates them; all lanes call them together.
#pragma once

#include <cstdint>
#include <limits>

#include "hash_table/cuda/tile.cuh"
#include "hash_table/cuda/update/row_update.cuh"

namespace torchrec_hkv::hash_table::cuda {

// One optimizer, fp32 rows, and nothing else: see is_plain. A row takes half a warp, so that what
// is done once a row, the division and the root above all, is done for two rows at once. kOfLane:
// vectors of four columns that a lane has. One, where it is enough, lets more rows be under way.
// kStay: what is read of rows and column states leaves the second-level cache after others.
template <Optimizer kKind, int kOfLane, int kOfRow = kWarp / 2, bool kStay = false>
struct PlainUpdater {
  static constexpr int kStates = column_states(kKind);
  static constexpr bool kColumnStates = kStates > 0;
  static constexpr bool kAdapts =
      kKind == Optimizer::kRowWiseAdagrad || kKind == Optimizer::kRowWiseAdam;
  // Row-wise Adagrad's columns have SGD's formula; its rate is its own.
  static constexpr Optimizer kColumns =
      kKind == Optimizer::kRowWiseAdagrad ? Optimizer::kSgd : kKind;
  static constexpr int kLanes = kOfRow;
  static constexpr int kVectors = kOfLane;
  using Gradient = LaneColumns<kLanes, kVectors>;

  struct Row {
    float* values;
    float* state;
    float old_square;
    Gradient value, first, second;
  };

  const OptimizerConfig* optimizer;
  const TableView* table;
  RowTerms terms;
  float *rows, *states;
  int32_t dim, state_width;
  bool has_frames;
  uint64_t policy;  // of kStay

  __device__ __forceinline__ PlainUpdater(const TableView& of, const OptimizerConfig& config,
                                          float learning_rate)
      : PlainUpdater(of, config) {
    set_terms(learning_rate);
  }
  // set_terms, which waits for the table's step, is left to the caller.
  __device__ __forceinline__ PlainUpdater(const TableView& of, const OptimizerConfig& config)
      : optimizer(&config),
        table(&of),
        rows(reinterpret_cast<float*>(of.rows.homes)),
        states(reinterpret_cast<float*>(of.states.homes)),
        dim(of.rows.width),
        state_width(of.states.width),
        has_frames(of.frames.tags != nullptr),
        policy(kStay ? evict_last() : 0) {}

  __device__ __forceinline__ void set_terms(float learning_rate) {
    terms = begin_row(*optimizer, learning_rate, static_cast<float>(*table->optimizer_step));
  }
  __device__ __forceinline__ Row load(int64_t slot) const {
    Row row;
    row.values = rows + slot * dim;
    if constexpr (kColumnStates || kAdapts) row.state = states + slot * state_width;
    if (has_frames) {
      // Hides the view from the compiler, which would hold what the frames are found by in
      // registers for all rows, also where there are no frames.
      const TableView* its = table;
      asm volatile("" : "+l"(its));
      const int64_t frame = frame_to_write(its->frames, slot, Tile<kLanes>::lane() == 0);
      row.values = reinterpret_cast<float*>(its->rows.at(slot, frame));
      row.state = reinterpret_cast<float*>(its->states.at(slot, frame));
    }
    row.value = read(row.values);
    if constexpr (kStates >= 1) row.first = read(row.state);
    if constexpr (kStates >= 2) row.second = read(row.state + dim);
    if constexpr (kAdapts) row.old_square = row.state[kStates * dim];
    return row;
  }

  __device__ __forceinline__ Gradient read(const float* columns) const {
    if constexpr (kStay) {
      return Gradient::load_once(columns, dim, policy);
    } else {
      return Gradient::load_once(columns, dim);
    }
  }

  __device__ __forceinline__ void finish(int64_t, Row& row, const Gradient& gradient) const {
    finish(row, gradient, kAdapts ? squares_of(gradient) : 0.0f);
  }
  // What finish needs of a gradient where the optimizer adapts by row, for those that know it.
  __device__ __forceinline__ static float squares_of(const Gradient& gradient) {
    float squares = 0.0f;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) squares += gradient.v[i].dot(gradient.v[i]);
    return Tile<kLanes>::sum(squares);
  }
  __device__ __forceinline__ void finish(Row& row, const Gradient& gradient, float squares) const {
    RowTerms its = terms;
    if constexpr (kAdapts) {
      const float renewed = adapt_row(*optimizer, squares, dim, row.old_square, &its);
      if (Tile<kLanes>::lane() == 0) row.state[kStates * dim] = renewed;
    }
    float unused = 0.0f;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        float& first = kStates >= 1 ? row.first.v[i].v[k] : unused;
        float& second = kStates >= 2 ? row.second.v[i].v[k] : unused;
        float& value = row.value.v[i].v[k];
        value = move_column<kColumns>(*optimizer, its, value, gradient.v[i].v[k], first, second);
      }
    }
    row.value.store(row.values, dim);
    if constexpr (kStates >= 1) row.first.store(row.state, dim);
    if constexpr (kStates >= 2) row.second.store(row.state + dim, dim);
  }
};

// No clipping of rows' gradients, no bound on rows, no coupled decay, and no row's own steps.
inline bool is_plain(const OptimizerConfig& optimizer, const GroupShape& shape) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  return shape.float32_rows && !optimizer.own_steps && optimizer.clip_norm == kInfinity &&
         optimizer.clip_value == kInfinity && optimizer.max_norm == kInfinity &&
         optimizer.coupled_decay == 0.0f;
}

inline bool has_plain_updater(const OptimizerConfig& optimizer, const GroupShape& shape) {
  const bool known = optimizer.kind == Optimizer::kSgd ||
                     optimizer.kind == Optimizer::kRowWiseAdagrad ||
                     optimizer.kind == Optimizer::kAdagrad || optimizer.kind == Optimizer::kAdam;
  return known && is_plain(optimizer, shape);
}

// Calls with_updater.template operator()<Updater>() for the plain updater of an optimizer. Returns
// whether there is one. Kernels are compiled once for each, so few have one.
template <int kOfLane = 2, typename WithUpdater>
bool choose_plain_updater(const OptimizerConfig& optimizer, const GroupShape& shape,
                          const WithUpdater& with_updater) {
  if (!has_plain_updater(optimizer, shape)) return false;
  switch (optimizer.kind) {
    case Optimizer::kSgd:
      with_updater.template operator()<PlainUpdater<Optimizer::kSgd, kOfLane>>();
      return true;
    case Optimizer::kRowWiseAdagrad:
      with_updater.template operator()<PlainUpdater<Optimizer::kRowWiseAdagrad, kOfLane>>();
      return true;
    case Optimizer::kAdagrad:
      with_updater.template operator()<PlainUpdater<Optimizer::kAdagrad, kOfLane>>();
      return true;
    case Optimizer::kAdam:
      with_updater.template operator()<PlainUpdater<Optimizer::kAdam, kOfLane>>();
      return true;
    default:
      return false;
  }
}

}  // namespace torchrec_hkv::hash_table::cuda
