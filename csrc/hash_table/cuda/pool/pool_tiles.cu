// Pooling by tiles: as many lanes as a row has vectors of four columns work on neighbouring bags of
// one feature. A lane looks up the address of one position's row, for all positions of a chunk at
// once; then the tile reads the rows, several at a time, across the borders of bags, so that as
// much is under way for bags of one id as for long ones.
#include "common/cuda_check.h"
#include "hash_table/cuda/bucket.cuh"
#include "hash_table/cuda/pool/bag_tile.cuh"
#include "hash_table/cuda/pool/pool_tiles.h"
#include "hash_table/cuda/row_vector.cuh"

namespace torchrec_hkv::hash_table::cuda {
namespace {

constexpr int kAhead = 8;  // rows that a tile reads at once

// What a lane knows of one position of a chunk.
struct Position {
  const char* row;  // null: none, the id counts with its initial row
  float scale;
  bool last;  // of its bag
  int bag;    // counted from the tile's first
};

// kFloat32, kFloat32Out: whether rows, and outputs, are of that type. Otherwise of any.
template <int kLanes, bool kScaled, bool kFloat32, bool kFloat32Out>
__global__ void __launch_bounds__(kThreads, 3)
    pool_tiles_kernel(const TableView* __restrict__ tables, const Batch batch,
                      const int64_t* __restrict__ slots, const Pooling pooling,
                      const Output<char> out, const BagTiling tiling) {
  const BagTile<kLanes> tile(batch, tiling);
  if (tile.feature >= batch.num_features) return;
  const TableView& table = tables[batch.feature_tables[tile.feature]];
  const int32_t dim = table.dim();
  const RowType out_type = kFloat32Out ? RowType::kFloat32 : out.type;
  char* const to =
      out.data + batch.output_of(tile.feature, tile.sample, out.stride) * element_size(out_type);
  const auto stride = static_cast<uint32_t>(batch.output_stride(tile.feature, out.stride));
  const auto output_of_bag = [&](int bag) {
    return to + static_cast<int64_t>(bag) * stride * element_size(out_type);
  };
  const float bag_scale = tile.mean_scale(pooling.mean);
  for (unsigned empty = tile.ballot(tile.lane() < tile.bags && tile.ends == tile.starts); empty;
       empty &= empty - 1) {
    char* const bag = output_of_bag(__ffs(static_cast<int>(empty)) - 1);
    for (int32_t c = tile.lane() * 4; c < dim; c += kLanes * 4) {
      Columns<4>::zero().store(out_type, bag, c);
    }
  }
  const auto row_of_lane = [&](const Position& position, int source) {
    return reinterpret_cast<const char*>(
        tile.of_lane(reinterpret_cast<unsigned long long>(position.row), source));
  };
  for (int32_t first_column = 0; first_column < dim; first_column += kLanes * 4) {
    const int32_t column = first_column + tile.lane() * 4;
    const bool mine = column < dim;
    Columns<4> sum = Columns<4>::zero();
    for (int64_t chunk = tile.begin; chunk < tile.end; chunk += kLanes) {
      const int64_t at = chunk + tile.lane();
      Position position{nullptr, 1.0f, false, tile.bag_of(at)};
      const int64_t its_end = tile.of_lane(tile.ends, position.bag);
      if (kScaled) position.scale = tile.of_lane(bag_scale, position.bag);
      if (at < tile.end) {
        const int64_t slot = slots[at];
        if (table.has(slot)) position.row = table.row(slot - table.first_slot);
        if (kScaled && pooling.weights != nullptr) position.scale *= pooling.weights[at];
        position.last = at + 1 == its_end;
      }
      const int count = static_cast<int>(min(static_cast<int64_t>(kLanes), tile.end - chunk));
      const auto add = [&](int source, const Columns<4>& row) {
        const float scale = kScaled ? tile.of_lane(position.scale, source) : 1.0f;
        const bool last = tile.of_lane(position.last, source);
        const int bag = tile.of_lane(position.bag, source);
        if (source >= count) return;
        sum.add(scale, row);
        if (last) {
          if (mine) sum.store(out_type, output_of_bag(bag), column);
          sum = Columns<4>::zero();
        }
      };
      // Initial rows are rare; computed among the loads, they would take registers from all of
      // these.
      if (tile.ballot(at < tile.end && position.row == nullptr)) {
        for (int source = 0; source < count; ++source) {
          const char* from = row_of_lane(position, source);
          Columns<4> row = Columns<4>::zero();
          if (mine && from != nullptr) row = Columns<4>::load(table.rows.type, from, column);
          if (mine && from == nullptr) {
            row = Columns<4>::initial(table.initial_rows, batch.ids[chunk + source],
                                      table.column_offset + column);
          }
          add(source, row);
        }
        continue;
      }
      for (int group = 0; group < count; group += kAhead) {
        Columns<4> row[kAhead];
#pragma unroll
        for (int k = 0; k < kAhead; ++k) {
          const char* from = row_of_lane(position, group + k);
          row[k] = Columns<4>::zero();
          if (group + k >= count || !mine) continue;
          // Through L1, which serves hot rows.
          row[k] = kFloat32 ? Columns<4>::load(reinterpret_cast<const float*>(from) + column)
                            : Columns<4>::load(table.rows.type, from, column);
        }
#pragma unroll
        for (int k = 0; k < kAhead; ++k) add(group + k, row[k]);
      }
    }
  }
}

template <int kLanes>
void launch(const TableView* tables, const Batch& batch, const int64_t* slots, Pooling pooling,
            Output<char> out, const GroupShape& shape, cudaStream_t stream) {
  const BagTiling tiling(batch, kLanes);
  const bool scaled = pooling.mean || pooling.weights != nullptr;
  const bool float32_out = out.type == RowType::kFloat32;
  const auto kernel = !shape.float32_rows ? pool_tiles_kernel<kLanes, true, false, false>
                      : !float32_out      ? pool_tiles_kernel<kLanes, true, true, false>
                      : scaled            ? pool_tiles_kernel<kLanes, true, true, true>
                                          : pool_tiles_kernel<kLanes, false, true, true>;
  kernel<<<grid_for(tiling.tiles(batch) * kLanes), kThreads, 0, stream>>>(tables, batch, slots,
                                                                          pooling, out, tiling);
  HKV_CUDA_CHECK_LAUNCH();
}

}  // namespace

void pool_four_wide(const TableView* tables, const Batch& batch, const int64_t* slots,
                    Pooling pooling, Output<char> out, const GroupShape& shape,
                    cudaStream_t stream) {
  if (shape.widest <= 32) {
    launch<8>(tables, batch, slots, pooling, out, shape, stream);
  } else if (shape.widest <= 64) {
    launch<16>(tables, batch, slots, pooling, out, shape, stream);
  } else {
    launch<32>(tables, batch, slots, pooling, out, shape, stream);
  }
}

}  // namespace torchrec_hkv::hash_table::cuda
