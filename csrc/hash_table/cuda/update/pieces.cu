// Sums the gradients of the pieces of long segments. A tile of lanes takes a piece, or some of its
// columns. Each lane looks up the address of one position's gradient; then all lanes load
// gradients, several of which are in flight in registers. Neighbouring positions with the same
// gradient, such as those of an id that a bag has several times, load it once.
#include "common/chain.cuh"
#include "common/cuda_check.h"
#include "hash_table/cuda/offsets.cuh"
#include "hash_table/cuda/tile.cuh"
#include "hash_table/cuda/update/update.cuh"

namespace torchrec_hkv::hash_table::cuda {
namespace {

constexpr int kPieceThreads = 128;
constexpr int kPieceBlocks = 6;  // per multiprocessor
constexpr int kFloats = 32;      // floats that a lane has in flight

// The gradients of a chunk of positions, without repetitions.
template <int kLanes>
struct Items {
  static constexpr int kMost = kLanes < 16 ? 16 : kLanes;

  const char* gradients[kMost];
  float scales[kMost];
  int32_t times[kMost];  // how often each is added
};

// A tile sums kLanes * kVectors * kWidth columns at a time. The first columns of all pieces are
// summed before further ones, so that these columns of all gradients stay in L2.
template <int kLanes, int kWidth, int kVectors>
__global__ void __launch_bounds__(kPieceThreads, kPieceBlocks)
    sum_pieces_kernel(const TableView* __restrict__ tables, const __grid_constant__ Update update,
                      const __grid_constant__ Scratch scratch, uint32_t parts) {
  using Lanes = Tile<kLanes>;
  using Vector = Columns<kWidth>;
  constexpr int kChunk = Items<kLanes>::kMost, kBatches = kChunk / kLanes;
  constexpr int kTogether = kFloats / (kVectors * kWidth);
  constexpr int32_t kColumns = kLanes * kVectors * kWidth;
  __shared__ Items<kLanes> items_of_block[kPieceThreads / kLanes];
  wait_for_kernel_before();
  let_next_kernel_start();
  if (is_refused(update.batch)) return;
  Items<kLanes>& items = items_of_block[threadIdx.x / kLanes];
  const int lane = Lanes::lane();
  const LongSegments& longs = scratch.long_segments;
  const RowType type = update.grad.type;
  const uint32_t pieces = *longs.pieces;
  const uint32_t tiles = gridDim.x * (kPieceThreads / kLanes);
  for (uint32_t work = (blockIdx.x * kPieceThreads + threadIdx.x) / kLanes;
       Lanes::any(work < pieces * parts); work += tiles) {
    const bool works = work < pieces * parts;
    const uint32_t piece = works ? work % pieces : 0;
    const int32_t first_column = works ? static_cast<int32_t>(work / pieces) * kColumns : 0;
    const LongSegment segment =
        works ? longs.segments[longs.segment_of[piece]] : LongSegment{0, 0, 0, 0};
    uint32_t chunk =
        segment.first + (piece - segment.first_piece) * static_cast<uint32_t>(kPieceSize);
    uint32_t end = min(segment.first + segment.length, chunk + static_cast<uint32_t>(kPieceSize));
    Share shares[kBatches];  // of the chunk's positions
    const auto look = [&] {
#pragma unroll
      for (int b = 0; b < kBatches; ++b) {
        const uint32_t at = chunk + b * kLanes + lane;
        shares[b] = at < end ? share_of(update, scratch, scratch.pairs.pairs.value(at)) : Share{};
      }
    };
    // Writes an item for each run of equal gradients. Returns the number of items.
    const auto write_items = [&] {
      int written = 0;
#pragma unroll
      for (int b = 0; b < kBatches; ++b) {
        const Share& share = shares[b];
        const bool there = chunk + b * kLanes + lane < end;
        const int64_t before = Lanes::of_lane_before(share.gradient);
        const float scale_before = Lanes::of_lane_before(share.scale);
        const bool fresh =
            there && (lane == 0 || before != share.gradient || scale_before != share.scale);
        const unsigned there_mask = Lanes::ballot(there), fresh_mask = Lanes::ballot(fresh);
        if (fresh) {
          const int number = written + __popc(fresh_mask & ((1u << lane) - 1));
          const unsigned later = fresh_mask & ~((2u << lane) - 1);
          const int stop = later != 0 ? __ffs(static_cast<int>(later)) - 1 : __popc(there_mask);
          items.gradients[number] = update.grad.at(share.gradient);
          items.scales[number] = share.scale;
          items.times[number] = stop - lane;
        }
        written += __popc(fresh_mask);
      }
      return written;
    };
    look();
    const uint32_t its_table = Lanes::of_lane(shares[0].table, 0);
    const int32_t dim = works ? tables[its_table].dim() : 0;
    if (first_column >= dim) end = chunk;
    const auto column_of = [&](int v) { return first_column + (lane + v * kLanes) * kWidth; };
    Vector sum[kVectors];
#pragma unroll
    for (int v = 0; v < kVectors; ++v) sum[v] = Vector::zero();
    while (Lanes::any(chunk < end)) {
      __syncwarp();  // all lanes have read the previous items
      const int count = write_items();
      __syncwarp();
      chunk += kChunk;
      look();  // loads while the items are added
#pragma unroll 1
      for (int first = 0; first < count; first += kTogether) {
        Vector gradients[kTogether][kVectors];
#pragma unroll
        for (int k = 0; k < kTogether; ++k) {
          if (first + k >= count) break;
          const char* const from = in_global(items.gradients[first + k]);
#pragma unroll
          for (int v = 0; v < kVectors; ++v) {
            if (column_of(v) < dim) gradients[k][v] = Vector::load(type, from, column_of(v));
          }
        }
#pragma unroll
        for (int k = 0; k < kTogether; ++k) {
          if (first + k >= count) break;
          const float scale = items.scales[first + k];
#pragma unroll 1
          for (int left = items.times[first + k]; left > 0; --left) {
#pragma unroll
            for (int v = 0; v < kVectors; ++v) sum[v].add(scale, gradients[k][v]);
          }
        }
      }
    }
    float* const to = longs.sums + int64_t{piece} * longs.widest;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      if (column_of(v) < dim) sum[v].store(to + column_of(v));
    }
  }
}

template <int kLanes, int kWidth, int kVectors>
void launch(const TableView* tables, const Update& update, const Scratch& scratch, int32_t widest,
            cudaStream_t stream) {
  constexpr int32_t kColumns = kLanes * kVectors * kWidth;
  const auto parts = static_cast<uint32_t>((widest + kColumns - 1) / kColumns);
  const int64_t most_pieces = update.batch.num_ids / kLongest + 1;
  // resident_grid counts blocks of kThreads.
  const int64_t threads = most_pieces * parts * kLanes * (kThreads / kPieceThreads);
  const unsigned blocks = resident_grid(kPieceBlocks, threads);
  launch_chained(sum_pieces_kernel<kLanes, kWidth, kVectors>, blocks, kPieceThreads, stream, tables,
                 update, scratch, parts);
}

}  // namespace

void sum_pieces(const TableView* tables, const Update& update, const Scratch& scratch,
                const GroupShape& shape, cudaStream_t stream) {
  const auto launch_for = [&] {
    if (!update.group_four_wide) return launch<32, 1, 4>;
    if (shape.widest <= 32) return launch<8, 4, 1>;
    if (shape.widest <= 64) return launch<16, 4, 1>;
    if (shape.widest <= 128) return launch<32, 4, 1>;
    return launch<32, 4, 2>;
  };
  launch_for()(tables, update, scratch, shape.widest, stream);
}

}  // namespace torchrec_hkv::hash_table::cuda
