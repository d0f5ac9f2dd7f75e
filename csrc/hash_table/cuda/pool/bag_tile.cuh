// Neighbouring bags of one feature, for a tile of lanes.
#pragma once

#include <cstdint>

#include "hash_table/cuda/offsets.cuh"
#include "hash_table/cuda/tile.cuh"
#include "hash_table/table_view.h"

namespace torchrec_hkv::hash_table::cuda {

// Neighbouring bags of one feature.
struct BagRange {
  int32_t feature;
  int32_t bags;    // 0: no bags
  int64_t sample;  // of the first bag
  int64_t first;   // number of the first bag
};

// Distributes bags to tiles.
struct BagTiling {
  int32_t bags_of_tile;
  int64_t tiles_of_feature;  // of each feature, if features have equally many bags

  // As many bags as have about this number of positions, but at most `most`.
  BagTiling(const Batch& batch, int64_t positions, int64_t most) {
    const int64_t fit = batch.num_ids == 0 ? most : positions * batch.num_bags / batch.num_ids;
    bags_of_tile = static_cast<int32_t>(max(int64_t{1}, min(fit, int64_t{most})));
    tiles_of_feature = (batch.batch_size + bags_of_tile - 1) / bags_of_tile;
  }
  int64_t tiles(const Batch& batch) const {
    return batch.ragged == nullptr ? tiles_of_feature * batch.num_features
                                   : first_ragged(batch.num_bags, batch.num_features);
  }
  // Number of a feature's first tile, if features have different numbers of bags. There are enough
  // tiles for all bags of a feature, wherever its first bag is.
  HKV_HOST_DEVICE int64_t first_ragged(int64_t first_bag, int32_t feature) const {
    return static_cast<uint32_t>(first_bag) / static_cast<uint32_t>(bags_of_tile) + feature;
  }
#ifdef __CUDACC__
  // The bags of a tile. All fields are 0 if the tile is after the last one.
  __device__ __forceinline__ BagRange range_of(const Batch& batch, int64_t tile) const {
    BagRange range{};
    int64_t remaining;
    if (batch.ragged == nullptr) {
      const auto feature = static_cast<int32_t>(static_cast<uint32_t>(tile) /
                                                static_cast<uint32_t>(tiles_of_feature));
      if (feature >= batch.num_features) return range;
      range.feature = feature;
      range.sample = (tile - range.feature * tiles_of_feature) * bags_of_tile;
      range.first = range.feature * batch.batch_size + range.sample;
      remaining = batch.batch_size - range.sample;
    } else {
      int32_t low = 0, high = batch.num_features;
      while (high - low > 1) {
        const int32_t middle = (low + high) >> 1;
        (first_ragged(batch.ragged[middle].first, middle) <= tile ? low : high) = middle;
      }
      const int64_t first = batch.ragged[low].first;
      range.feature = low;
      range.sample = (tile - first_ragged(first, low)) * bags_of_tile;
      range.first = first + range.sample;
      remaining = batch.ragged[low + 1].first - range.first;
    }
    range.bags = static_cast<int32_t>(
        max(min(static_cast<int64_t>(bags_of_tile), remaining), static_cast<int64_t>(0)));
    return range;
  }
#endif
};

// The bags of a tile. All lanes have the same values, except for `ends` and `starts`.
template <int kLanes>
struct BagTile : Tile<kLanes> {
  using Tile<kLanes>::lane;
  using Tile<kLanes>::of_lane;

  int32_t feature;  // batch.num_features or more: no bags
  int64_t sample;   // of the first bag
  int bags;
  int64_t begin, end;    // positions of all bags
  int64_t starts, ends;  // of the bag with the lane's number

  // number: of the tile. Invalid offsets are reported; the bags of the tile then have no positions.
  __device__ __forceinline__ BagTile(const Batch& batch, const BagTiling& tiling, int64_t number) {
    const BagRange range = tiling.range_of(batch, number);
    feature = range.bags == 0 ? batch.num_features : range.feature;
    if (feature >= batch.num_features) return;
    sample = range.sample;
    bags = range.bags;
    const int64_t* const offsets = batch.offsets + range.first;
    begin = offsets[0];
    ends = offsets[min(lane(), bags - 1) + 1];
    const int64_t before = Tile<kLanes>::of_lane_before(ends);
    starts = lane() == 0 ? begin : before;
    const int64_t bag = range.first + lane();
    const bool bad = lane() < bags && is_bad_bag(batch, bag, starts, ends);
    if (Tile<kLanes>::ballot(bad)) {
      if (bad) refuse_bag(batch, bag, starts, ends);
      begin = starts = ends = 0;
    }
    end = of_lane(ends, bags - 1);
  }

  // The scale of the bag with the lane's number.
  __device__ __forceinline__ float mean_scale(bool mean) const {
    return mean && ends > starts ? 1.0f / static_cast<float>(ends - starts) : 1.0f;
  }
};

}  // namespace torchrec_hkv::hash_table::cuda
