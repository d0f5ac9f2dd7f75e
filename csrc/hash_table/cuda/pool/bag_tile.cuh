// Neighbouring bags of one feature, as a tile of lanes works on them.
#pragma once

#include <algorithm>
#include <cstdint>

#include "hash_table/cuda/offsets.cuh"
#include "hash_table/cuda/tile.cuh"
#include "hash_table/table_view.h"

namespace torchrec_hkv::hash_table::cuda {

constexpr int kMostBags = 16;  // of a tile

// How bags are dealt out to tiles.
struct BagTiling {
  int32_t bags_of_tile;
  int64_t tiles_of_feature;  // where features have equally many

  // As many bags as fill a tile's lanes with positions.
  BagTiling(const Batch& batch, int lanes) {
    const int64_t fit = batch.num_ids == 0 ? kMostBags : lanes * batch.num_bags / batch.num_ids;
    bags_of_tile = static_cast<int32_t>(std::clamp<int64_t>(fit, 1, std::min(kMostBags, lanes)));
    tiles_of_feature = (batch.batch_size + bags_of_tile - 1) / bags_of_tile;
  }
  int64_t tiles(const Batch& batch) const {
    return batch.ragged == nullptr ? tiles_of_feature * batch.num_features
                                   : first_ragged(batch.num_bags, batch.num_features);
  }
  // Number of a feature's first tile, where features have different numbers: of so many tiles all
  // of its bags find room, whichever its first one is.
  HKV_HOST_DEVICE int64_t first_ragged(int64_t first_bag, int32_t feature) const {
    return static_cast<uint32_t>(first_bag) / static_cast<uint32_t>(bags_of_tile) + feature;
  }
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

  // Bags whose offsets can't be followed are reported; those of the tile have no positions then.
  __device__ __forceinline__ BagTile(const Batch& batch, const BagTiling& tiling) {
    const int64_t number = Tile<kLanes>::number();
    int64_t first_bag, bags_left;
    if (batch.ragged == nullptr) {
      feature = static_cast<int32_t>(number / tiling.tiles_of_feature);
      if (feature >= batch.num_features) return;
      sample = (number - feature * tiling.tiles_of_feature) * tiling.bags_of_tile;
      first_bag = feature * batch.batch_size;
      bags_left = batch.batch_size - sample;
    } else {
      find_ragged(batch, tiling, number);
      if (feature >= batch.num_features) return;
      first_bag = batch.ragged[feature].first;
      bags_left = batch.ragged[feature + 1].first - first_bag - sample;
    }
    bags = static_cast<int>(min(static_cast<int64_t>(tiling.bags_of_tile), bags_left));
    const int64_t* const offsets = batch.offsets + first_bag + sample;
    begin = offsets[0];
    ends = offsets[min(lane(), bags - 1) + 1];
    const int64_t before = __shfl_up_sync(Tile<kLanes>::mask(), ends, 1, kLanes);
    starts = lane() == 0 ? begin : before;
    const int64_t bag = first_bag + sample + lane();
    const bool bad = lane() < bags && is_bad_bag(batch, bag, starts, ends);
    if (Tile<kLanes>::ballot(bad)) {
      if (bad) refuse_bag(batch, bag, starts, ends);
      begin = starts = ends = 0;
    }
    end = of_lane(ends, bags - 1);
  }

  // The feature of a tile and its first bag there; batch.num_features where there is none.
  __device__ __forceinline__ void find_ragged(const Batch& batch, const BagTiling& tiling,
                                              int64_t number) {
    int32_t low = 0, high = batch.num_features;
    while (high - low > 1) {
      const int32_t middle = (low + high) >> 1;
      (tiling.first_ragged(batch.ragged[middle].first, middle) <= number ? low : high) = middle;
    }
    sample = (number - tiling.first_ragged(batch.ragged[low].first, low)) * tiling.bags_of_tile;
    const bool there = sample < batch.ragged[low + 1].first - batch.ragged[low].first;
    feature = there ? low : batch.num_features;
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
