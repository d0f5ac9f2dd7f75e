// Pooling of float32 rows of many columns. A warp works on neighbouring bags of one feature. Each
// lane looks up the address of one position's row; then all lanes load a row, up to 512 columns at
// a time, through L1, which serves hot rows. Asynchronous copies (pool_tiles.cu) would pass L1 and
// shared memory three times, which bounds batches with hot ids; rows of few columns need them to
// have enough loads in flight.
#include "common/dependent_launch.cuh"
#include "hash_table/cuda/bucket.cuh"
#include "hash_table/cuda/pool/bag_tile.cuh"
#include "hash_table/cuda/pool/pool_launch.h"
#include "hash_table/cuda/row_vector.cuh"

namespace torchrec_hkv::hash_table::cuda {
namespace {

constexpr int kPoolBlocks = 5;  // per multiprocessor; this limits the registers of a thread
constexpr int kVectors = 4;     // of a lane, of four columns; wider rows take several turns
constexpr int32_t kTurn = kWarp * kVectors * 4;  // columns

__device__ __forceinline__ Columns<4> load_columns_cached(const float* from) {
  const uint4 words = load_vector_cached(from);
  return Columns<4>{__uint_as_float(words.x), __uint_as_float(words.y), __uint_as_float(words.z),
                    __uint_as_float(words.w)};
}

template <bool kScaled>
__global__ void __launch_bounds__(kPoolThreads, kPoolBlocks)
    pool_wide_kernel(const TableView* tables, const __grid_constant__ Batch batch,
                     const int64_t* __restrict__ slots, const __grid_constant__ Pooling pooling,
                     const __grid_constant__ Output<char> out,
                     const __grid_constant__ BagTiling tiling) {
  wait_for_kernel_before();  // which may have written slots or offsets
  // At most as many bags as lanes; ends and starts are of the bag with the lane's number.
  const BagTile<kWarp> tile(
      batch, tiling, (static_cast<int64_t>(blockIdx.x) * kPoolThreads + threadIdx.x) / kWarp);
  if (tile.feature >= batch.num_features) return;
  const int lane = tile.lane();
  const auto begin = static_cast<uint32_t>(tile.begin), end = static_cast<uint32_t>(tile.end);
  const auto ends = static_cast<uint32_t>(tile.ends);
  const float mean_scale = kScaled ? tile.mean_scale(pooling.mean) : 1.0f;
  const TableView& table = tables[batch.feature_tables[tile.feature]];
  const int32_t dim = table.dim();
  const uint32_t stride =
      static_cast<uint32_t>(batch.output_stride(tile.feature, out.stride)) * element_size(out.type);
  char* const outputs = out.at(batch.output_of(tile.feature, tile.sample, out.stride));
  const auto slot_at = [&](uint32_t at) { return at < end ? slots[at] : kNoSlot; };

#pragma unroll 1
  for (int32_t turn = 0; turn < dim; turn += kTurn) {
    // First column of a vector of the lane; the row may end before it.
    const auto column_of = [&](int v) { return turn + (v * kWarp + lane) * 4; };
    Columns<4> sum[kVectors];
    int bag = 0;
    uint32_t bag_end = tile.of_lane(ends, 0);
    // Writes the outputs of the bags that end here: the sum, and zeros for empty bags after it.
    const auto end_bags = [&](uint32_t here) {
      while (bag_end == here && bag < tile.bags) {
        char* const to = outputs + static_cast<uint64_t>(static_cast<uint32_t>(bag)) * stride;
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
          if (column_of(v) < dim) sum[v].store(out.type, to, column_of(v));
          sum[v] = Columns<4>::zero();
        }
        ++bag;
        bag_end = tile.of_lane(ends, bag);
      }
    };
#pragma unroll
    for (int v = 0; v < kVectors; ++v) sum[v] = Columns<4>::zero();
    end_bags(begin);
    int64_t next_slot = slot_at(begin + lane);
#pragma unroll 1
    for (uint32_t chunk = begin; chunk < end; chunk += kWarp) {
      // The table's fields are loaded again for each chunk, because they take many registers.
      asm volatile("" ::: "memory");
      const char* const row =
          table.has(next_slot) ? table.row(next_slot - table.first_slot) : nullptr;
      const auto address = reinterpret_cast<uint64_t>(row);
      next_slot = slot_at(chunk + kWarp + lane);
      float scale = 1.0f;
      if (kScaled) {
        // The position's bag: the number of bags that end at or before it.
        int lane_bag = 0;
#pragma unroll
        for (int step = kWarp / 2; step; step /= 2) {
          if (tile.of_lane(ends, lane_bag + step - 1) <= chunk + lane) lane_bag += step;
        }
        scale = tile.of_lane(mean_scale, lane_bag);
        if (pooling.weights != nullptr && chunk + lane < end) {
          scale *= pooling.weights[chunk + lane];
        }
      }
      const auto count = static_cast<int>(min(end - chunk, static_cast<uint32_t>(kWarp)));
#pragma unroll 1
      for (int at = 0; at < count; ++at) {
        const auto* const from = reinterpret_cast<const float*>(tile.of_lane(address, at));
        const float position_scale = kScaled ? tile.of_lane(scale, at) : 1.0f;
        Columns<4> columns[kVectors];
        if (from != nullptr) {
#pragma unroll
          for (int v = 0; v < kVectors; ++v) {
            if (column_of(v) < dim) columns[v] = load_columns_cached(from + column_of(v));
          }
        } else {
#pragma unroll
          for (int v = 0; v < kVectors; ++v) {
            if (column_of(v) >= dim) continue;
            columns[v] = Columns<4>::initial(table.initial_rows, batch.ids[chunk + at],
                                             table.column_offset + column_of(v));
          }
        }
#pragma unroll
        for (int v = 0; v < kVectors; ++v) sum[v].add(position_scale, columns[v]);
        end_bags(chunk + at + 1);
      }
    }
  }
}

}  // namespace

void pool_wide(const PoolCall& call) {
  const auto kernel = call.scaled() ? pool_wide_kernel<true> : pool_wide_kernel<false>;
  const TileLength length{.together = 4, .rounds = 6, .most = 3};
  launch_pool(kernel, kWarp, kPoolBlocks, length, call, kWarp);
}

}  // namespace torchrec_hkv::hash_table::cuda
