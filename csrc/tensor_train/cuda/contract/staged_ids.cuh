// How a warp reads the distinct ids of a prefix.
#pragma once

#include <cstdint>

#include "tensor_train/cuda/contract/tile_config.cuh"

namespace torchrec_hkv::tensor_train::cuda {

// The first distinct ids of a tile. They are loaded to shared memory together with other data, so
// that warps need not wait for memory once more for their prefix.
struct StagedIds {
  const int2* ids;  // [count] (last, source)
  int32_t first;
  int32_t count;

  __device__ __forceinline__ int2 read(const TileInput& in, int32_t distinct) const {
    const int32_t at = distinct - first;
    if (at < count) return ids[at];
    return make_int2(in.lasts[distinct], static_cast<int>(in.sources[distinct]));
  }
};

// Reads ids without staging, because a tile of few ids would first wait for all of them.
struct UnstagedIds {
  __device__ __forceinline__ int2 read(const TileInput& in, int32_t distinct) const {
    return make_int2(in.lasts[distinct], static_cast<int>(in.sources[distinct]));
  }
};

// Data of 32 distinct ids that a warp loads at once, one id per lane.
struct IdLane {
  int32_t last = 0;
  uint32_t source = 0;

  template <typename Ids>
  __device__ __forceinline__ void read(const TileInput& in, const Ids& ids, int32_t distinct,
                                       bool exists) {
    if (!exists) return;
    const int2 id = ids.read(in, distinct);
    last = id.x;
    source = static_cast<uint32_t>(id.y);
  }
};

}  // namespace torchrec_hkv::tensor_train::cuda
