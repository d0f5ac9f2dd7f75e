// Neighbouring bags of one feature, as a tile of lanes works on them.
#pragma once

#include <algorithm>
#include <cstdint>

#include "hash_table/table_view.h"
#include "hash_table/tile.cuh"

namespace torchrec_hkv::hash_table::cuda {

constexpr int kMostBags = 16;  // of a tile

// How bags are dealt out to tiles.
struct BagTiling {
  int32_t bags_of_tile;
  int64_t tiles_of_feature;

  // As many bags as fill a tile's lanes with positions.
  BagTiling(const Batch& batch, int lanes) {
    const int64_t bags = batch.num_features * batch.batch_size;
    const int64_t fit = batch.num_ids == 0 ? kMostBags : lanes * bags / batch.num_ids;
    bags_of_tile = static_cast<int32_t>(std::clamp<int64_t>(fit, 1, std::min(kMostBags, lanes)));
    tiles_of_feature = (batch.batch_size + bags_of_tile - 1) / bags_of_tile;
  }
  int64_t tiles(const Batch& batch) const { return tiles_of_feature * batch.num_features; }
};

// A tile's bags. All its lanes have the same, but for `ends` and `starts`.
template <int kLanes>
struct BagTile : Tile<kLanes> {
  using Tile<kLanes>::lane;
  using Tile<kLanes>::of_lane;

  int32_t feature;  // batch.num_features or more: there are no bags
  int64_t sample;   // of the first bag
  int bags;
  int64_t begin, end;    // positions of all bags
  int64_t starts, ends;  // of the bag with the lane's number

  __device__ __forceinline__ BagTile(const Batch& batch, const BagTiling& tiling) {
    const int64_t number = Tile<kLanes>::number();
    feature = static_cast<int32_t>(number / tiling.tiles_of_feature);
    if (feature >= batch.num_features) return;
    sample = (number - feature * tiling.tiles_of_feature) * tiling.bags_of_tile;
    bags =
        static_cast<int>(min(static_cast<int64_t>(tiling.bags_of_tile), batch.batch_size - sample));
    const int64_t* const offsets = batch.offsets + feature * batch.batch_size + sample;
    begin = offsets[0];
    ends = offsets[min(lane(), bags - 1) + 1];
    end = of_lane(ends, bags - 1);
    const int64_t before = __shfl_up_sync(Tile<kLanes>::mask(), ends, 1, kLanes);
    starts = lane() == 0 ? begin : before;
  }

  // The bag of each lane's position, counted from the tile's first.
  __device__ __forceinline__ int bag_of(int64_t position) const {
    int bag = 0;
    for (int b = 0; b < bags - 1; ++b) bag += position >= of_lane(ends, b) ? 1 : 0;
    return bag;
  }
  // Of the bag with the lane's number.
  __device__ __forceinline__ float mean_scale(bool mean) const {
    return mean && ends > starts ? 1.0f / static_cast<float>(ends - starts) : 1.0f;
  }
};

}  // namespace torchrec_hkv::hash_table::cuda
