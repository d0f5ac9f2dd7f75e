// What the updates of all rows of a table share, and how the columns of a row are distributed to
// lanes. A lane works on kVectors vectors of kWidth neighbouring columns in a step; rows with more
// columns take several steps.
#pragma once

#include <cstdint>

#include "common/optimizers.h"
#include "common/rounding.h"
#include "hash_table/cuda/entry.cuh"
#include "hash_table/cuda/row_vector.cuh"
#include "hash_table/cuda/tile.cuh"

namespace torchrec_hkv::hash_table::cuda {

// Distributes the columns of a row to the lanes of a tile. Within a step, a vector of a lane is
// followed by the same vector of the next lane.
template <int kLanes, int kVectors, int kWidth>
struct ColumnSteps {
  static constexpr int32_t kColumns = kLanes * kVectors * kWidth;

  // First column of a vector of the lane, in the step that begins with column `first`.
  __device__ __forceinline__ static int32_t column(int vector, int32_t first) {
    return first + (Tile<kLanes>::lane() + vector * kLanes) * kWidth;
  }
  // Calls visit(first) for all steps of a row.
  template <typename Visit>
  __device__ __forceinline__ static void for_each(int32_t dim, const Visit& visit) {
    for (int32_t first = 0; first < dim; first += kColumns) visit(first);
  }
  // Calls visit(column) for the lane's vectors.
  template <typename Visit>
  __device__ __forceinline__ static void for_columns(int32_t dim, int32_t first,
                                                     const Visit& visit) {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      if (column(v, first) < dim) visit(column(v, first));
    }
  }
};

// Values that all rows of a table share in one update. The table's optimizer_step already counts
// this update.
struct TableUpdate {
  const OptimizerConfig* optimizer;
  float learning_rate;
  int32_t dim;
  RowType type;
  bool rounds_by_chance;
  bool plain;  // gradient_of is the identity
  uint32_t column_offset;
  RowTerms terms;  // unless rows count their own steps

  __device__ __forceinline__ TableUpdate(const TableView& table, const OptimizerConfig& config,
                                         float rate)
      : optimizer(&config),
        learning_rate(rate),
        dim(table.dim()),
        type(table.rows.type),
        rounds_by_chance(config.stochastic_rounding && type != RowType::kFloat32),
        plain(has_plain_gradient(config)),
        column_offset(static_cast<uint32_t>(table.column_offset)) {
    if (!config.own_steps) {
      terms = begin_row(config, rate, static_cast<float>(*table.optimizer_step));
    }
  }
};

// Values that a row has once, besides its columns. All lanes of a tile hold the same values.
struct RowScalars {
  float square;       // row-wise state; the update renews it
  float step;         // updates of this row so far, if rows count them; the update renews it
  uint64_t rounding;  // key of stochastic rounding, which rows of 8 bits always have
};

// Loads these values of a row.
__device__ __forceinline__ RowScalars load_row_scalars(const TableView& table, int64_t slot,
                                                       const float* state,
                                                       const OptimizerConfig& optimizer) {
  RowScalars scalars{0.0f, 0.0f, 0};
  state = in_global(state);
  if (adapts_by_row(optimizer.kind)) {
    scalars.square = state[row_square_column(optimizer.kind, table.dim())];
  }
  if (optimizer.own_steps) scalars.step = state[own_step_column(optimizer.kind, table.dim())];
  if ((optimizer.stochastic_rounding && table.rows.type != RowType::kFloat32) ||
      table.rows.type == RowType::kInt8) {
    scalars.rounding = rounding_key(optimizer.rounding_seed, table.initial_rows.seed,
                                    id_of_slot(table, slot), *table.optimizer_step);
  }
  return scalars;
}
__device__ __forceinline__ void store_row_scalars(const RowScalars& scalars, int32_t dim,
                                                  float* state, const OptimizerConfig& optimizer) {
  state = in_global(state);
  if (adapts_by_row(optimizer.kind)) state[row_square_column(optimizer.kind, dim)] = scalars.square;
  if (optimizer.own_steps) state[own_step_column(optimizer.kind, dim)] = scalars.step;
}

}  // namespace torchrec_hkv::hash_table::cuda
