// Pooling of rows of 8 bits: a tile of lanes works on neighbouring bags of one feature, chunk by
// chunk. Each lane looks up the address and the scale of one position's row. Then all lanes load
// words of several rows, four columns each, which are in flight in registers: asynchronous copies
// of four bytes would take several times as long in L1.
#include "common/dependent_launch.cuh"
#include "hash_table/cuda/bucket.cuh"
#include "hash_table/cuda/pool/bag_chunks.cuh"
#include "hash_table/cuda/pool/pool_launch.h"
#include "hash_table/cuda/row_vector.cuh"
#include "hash_table/group_shape.h"

namespace torchrec_hkv::hash_table::cuda {
namespace {

constexpr int kAhead = 8;                                            // rows in flight
constexpr int int8_blocks(int words) { return words == 1 ? 5 : 4; }  // of a multiprocessor

// The positions of a chunk in shared memory.
template <int kLanes>
struct alignas(16) ChunkRows {
  const char* rows[kLanes];  // null: an initial row
  float2 scales[kLanes];     // of the row, and of the position
  uint32_t ends[kLanes];     // the number of the bag that ends there, from 1 on, or 0
};

// kWords: words of a lane in a step. Rows with more columns take several steps.
template <int kLanes, int kWords>
__global__ void __launch_bounds__(kPoolThreads, int8_blocks(kWords))
    pool_int8_kernel(const TableView* __restrict__ tables, const __grid_constant__ Batch batch,
                     const int64_t* __restrict__ slots, const __grid_constant__ Pooling pooling,
                     const __grid_constant__ Output<char> out,
                     const __grid_constant__ BagTiling tiling) {
  using Row = Columns<4>;
  __shared__ ChunkRows<kLanes> chunks_of_block[kPoolThreads / kLanes];
  ChunkRows<kLanes>& chunk_rows = chunks_of_block[threadIdx.x / kLanes];
  wait_for_kernel_before();  // which may have written slots or offsets
  const Tile<kLanes> tile;
  const int lane = tile.lane();
  const BagRange range = tiling.range_of(
      batch, (static_cast<int64_t>(blockIdx.x) * kPoolThreads + threadIdx.x) / kLanes);
  const TileTable table(tables[batch.feature_tables[range.feature]]);
  const int32_t dim = range.bags > 0 ? table.view.dim() : 0;
  const auto row_bytes = static_cast<int32_t>(row_size(RowType::kInt8, dim));
  const RowType out_type = out.type;
  const uint32_t stride = static_cast<uint32_t>(batch.output_stride(range.feature, out.stride)) *
                          element_size(out_type);
  char* const outputs = out.at(batch.output_of(range.feature, range.sample, out.stride));

  for (int32_t first_column = 0; tile.any(first_column < dim);
       first_column += kLanes * kWords * 4) {
    const auto column_of = [&](int w) { return first_column + (lane + w * kLanes) * 4; };
    Row sum[kWords];
#pragma unroll
    for (int w = 0; w < kWords; ++w) sum[w] = Row::zero();
    const auto write = [&](uint32_t bag, const Row(&rows)[kWords]) {
      char* const to = outputs + static_cast<uint64_t>(bag) * stride;
#pragma unroll
      for (int w = 0; w < kWords; ++w) {
        if (column_of(w) < dim) rows[w].store(out_type, to, column_of(w));
      }
    };
    Row zeros[kWords];
#pragma unroll
    for (int w = 0; w < kWords; ++w) zeros[w] = Row::zero();

    BagChunks<kLanes> chunks(batch, slots, range, first_column < dim);
    while (tile.any(chunks.more())) {
      BagChunk chunk = chunks.template next<true>(batch, slots, pooling.mean);
      if (!chunk.good) {
        for (int bag = chunk.bag; bag < range.bags; ++bag) write(bag, zeros);
        chunks.stop();
        chunk.count = chunk.done = chunk.empty = 0;
      }
      for (unsigned empty = chunk.empty; empty; empty &= empty - 1) {
        write(chunk.bag + __ffs(static_cast<int>(empty)) - 1, zeros);
      }
      const bool is_valid = lane < chunk.count;
      const int64_t slot = chunk.slot - table.first_slot;
      const char* row = nullptr;
      float scale = 0.0f;
      if (is_valid && static_cast<uint64_t>(slot) < table.num_slots) {
        row = table.row(slot, row_bytes);
        scale = *reinterpret_cast<const float*>(row);
      }
      const float scale_of_position = chunks.scale_of(chunk, pooling.weights);
      const bool ends_here = chunk.ends_a_bag(lane);
      __syncwarp();  // all lanes have read the previous chunk
      chunk_rows.rows[lane] = row;
      chunk_rows.ends[lane] = 0;
      __syncwarp();
      if (ends_here) chunk_rows.ends[chunk.end - 1] = static_cast<uint32_t>(chunk.bag + lane + 1);

      const auto load = [&](int at, uint32_t (&words)[kWords]) {
        const char* const from = in_global(chunk_rows.rows[at]);
#pragma unroll
        for (int w = 0; w < kWords; ++w) {
          if (from != nullptr && column_of(w) < dim) {
            words[w] = *reinterpret_cast<const uint32_t*>(from + kInt8Start + column_of(w));
          }
        }
      };
      const auto add = [&](int at, const uint32_t (&words)[kWords]) {
        const float2 scales = chunk_rows.scales[at];
#pragma unroll
        for (int w = 0; w < kWords; ++w) {
          sum[w].add(scales.y, Row::load_int8(reinterpret_cast<const char*>(&words[w]), scales.x));
        }
      };
      const auto end = [&](int at) {
        const uint32_t bag_end = chunk_rows.ends[at];
        if (bag_end == 0) return;
        write(bag_end - 1, sum);
#pragma unroll
        for (int w = 0; w < kWords; ++w) sum[w] = Row::zero();
      };
      uint32_t words[kAhead][kWords];
#pragma unroll
      for (int k = 0; k < kAhead; ++k) load(k, words[k]);
      chunk_rows.scales[lane] = make_float2(scale, scale_of_position);  // loaded meanwhile
      const bool some_missing = tile.ballot(is_valid && row == nullptr) != 0;
      __syncwarp();
      if (some_missing) {
#pragma unroll 1
        for (int at = 0; at < chunk.count; ++at) {
          if (chunk_rows.rows[at] != nullptr) {
            uint32_t row_words[kWords];
            load(at, row_words);
            add(at, row_words);
          } else {
            const int64_t id = batch.ids[chunk.at + at];
#pragma unroll
            for (int w = 0; w < kWords; ++w) {
              sum[w].add(chunk_rows.scales[at].y,
                         Row::initial(table.view.initial_rows, id,
                                      table.view.column_offset + column_of(w)));
            }
          }
          end(at);
        }
        continue;
      }
#pragma unroll 1
      for (int first = 0; first < chunk.count; first += kAhead) {
#pragma unroll
        for (int k = 0; k < kAhead; ++k) {
          const int at = first + k;
          if (at >= chunk.count) break;
          add(at, words[k]);
          if (at + kAhead < chunk.count) load(at + kAhead, words[k]);
          end(at);
        }
      }
    }
  }
}

template <int kLanes, int kWords>
void launch_int8(const PoolCall& call) {
  const TileLength length{.together = 0, .rounds = 4, .most = 4};
  launch_pool(pool_int8_kernel<kLanes, kWords>, kLanes, int8_blocks(kWords), length, call);
}

}  // namespace

void pool_int8(const PoolCall& call, const GroupShape& shape) {
  if (shape.widest <= 32) return launch_int8<8, 1>(call);
  if (shape.widest <= 64) return launch_int8<8, 2>(call);
  if (shape.widest <= 128) return launch_int8<16, 2>(call);
  launch_int8<32, 2>(call);
}

}  // namespace torchrec_hkv::hash_table::cuda
