// Sums the gradients of the pieces of long segments. A tile of lanes takes a piece, or some of its
// columns. Each lane looks up the address of one position's gradient; then all lanes load
// gradients, several of which are in flight in registers. Neighbouring positions with the same
// gradient, such as those of an id that a bag has several times, load it once.
#include "common/cuda_check.h"
#include "common/dependent_launch.cuh"
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
struct GradientRuns {
  static constexpr int kMax = kLanes < 16 ? 16 : kLanes;

  const char* gradients[kMax];
  float scales[kMax];
  int32_t counts[kMax];  // how often each is added
};

// A tile sums kLanes * kVectors * kWidth columns at a time. The first columns of all pieces are
// summed before further ones, so that these columns of all gradients stay in L2.
template <int kLanes, int kWidth, int kVectors>
__global__ void __launch_bounds__(kPieceThreads, kPieceBlocks)
    sum_pieces_kernel(const TableView* __restrict__ tables,
                      const __grid_constant__ UpdateArguments update,
                      const __grid_constant__ UpdateScratch scratch, uint32_t parts) {
  using Lanes = Tile<kLanes>;
  using Vector = Columns<kWidth>;
  constexpr int kChunk = GradientRuns<kLanes>::kMax, kBatches = kChunk / kLanes;
  constexpr int kInFlight = kFloats / (kVectors * kWidth);
  constexpr int32_t kColumns = kLanes * kVectors * kWidth;
  __shared__ GradientRuns<kLanes> runs_of_block[kPieceThreads / kLanes];
  wait_for_kernel_before();
  let_next_kernel_start();
  if (is_refused(update.batch)) return;
  GradientRuns<kLanes>& runs = runs_of_block[threadIdx.x / kLanes];
  const int lane = Lanes::lane();
  const LongSegments& longs = scratch.long_segments;
  const RowType type = update.grad.type;
  const uint32_t pieces = *longs.pieces;
  const uint32_t tiles = gridDim.x * (kPieceThreads / kLanes);
  for (uint32_t work = (blockIdx.x * kPieceThreads + threadIdx.x) / kLanes;
       Lanes::any(work < pieces * parts); work += tiles) {
    const bool has_work = work < pieces * parts;
    const uint32_t piece = has_work ? work % pieces : 0;
    const int32_t first_column = has_work ? static_cast<int32_t>(work / pieces) * kColumns : 0;
    const LongSegment segment =
        has_work ? longs.segments[longs.segment_of[piece]] : LongSegment{0, 0, 0, 0};
    uint32_t chunk =
        segment.first + (piece - segment.first_piece) * static_cast<uint32_t>(kPieceSize);
    uint32_t end = min(segment.first + segment.length, chunk + static_cast<uint32_t>(kPieceSize));
    GradientRef refs[kBatches];  // of the chunk's positions
    const auto load_refs = [&] {
#pragma unroll
      for (int b = 0; b < kBatches; ++b) {
        const uint32_t at = chunk + b * kLanes + lane;
        refs[b] = at < end ? gradient_ref_of(update, scratch, scratch.pairs.pairs.value(at))
                           : GradientRef{};
      }
    };
    // Writes an item for each run of equal gradients. Returns the number of items.
    const auto write_runs = [&] {
      int written = 0;
#pragma unroll
      for (int b = 0; b < kBatches; ++b) {
        const GradientRef& ref = refs[b];
        const bool is_valid = chunk + b * kLanes + lane < end;
        const int64_t before = Lanes::of_lane_before(ref.gradient);
        const float scale_before = Lanes::of_lane_before(ref.scale);
        const bool begins_run =
            is_valid && (lane == 0 || before != ref.gradient || scale_before != ref.scale);
        const unsigned valid_mask = Lanes::ballot(is_valid), begin_mask = Lanes::ballot(begins_run);
        if (begins_run) {
          const int number = written + __popc(begin_mask & ((1u << lane) - 1));
          const unsigned later = begin_mask & ~((2u << lane) - 1);
          const int stop = later != 0 ? __ffs(static_cast<int>(later)) - 1 : __popc(valid_mask);
          runs.gradients[number] = update.grad.at(ref.gradient);
          runs.scales[number] = ref.scale;
          runs.counts[number] = stop - lane;
        }
        written += __popc(begin_mask);
      }
      return written;
    };
    load_refs();
    const uint32_t table = Lanes::of_lane(refs[0].table, 0);
    const int32_t dim = has_work ? tables[table].dim() : 0;
    if (first_column >= dim) end = chunk;
    const auto column_of = [&](int v) { return first_column + (lane + v * kLanes) * kWidth; };
    Vector sum[kVectors];
#pragma unroll
    for (int v = 0; v < kVectors; ++v) sum[v] = Vector::zero();
    while (Lanes::any(chunk < end)) {
      __syncwarp();  // all lanes have read the previous items
      const int count = write_runs();
      __syncwarp();
      chunk += kChunk;
      load_refs();  // loads while the items are added
#pragma unroll 1
      for (int first = 0; first < count; first += kInFlight) {
        Vector gradients[kInFlight][kVectors];
#pragma unroll
        for (int k = 0; k < kInFlight; ++k) {
          if (first + k >= count) break;
          const char* const from = in_global(runs.gradients[first + k]);
#pragma unroll
          for (int v = 0; v < kVectors; ++v) {
            if (column_of(v) < dim) gradients[k][v] = Vector::load(type, from, column_of(v));
          }
        }
#pragma unroll
        for (int k = 0; k < kInFlight; ++k) {
          if (first + k >= count) break;
          const float scale = runs.scales[first + k];
#pragma unroll 1
          for (int remaining = runs.counts[first + k]; remaining > 0; --remaining) {
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
void launch(const TableView* tables, const UpdateArguments& update, const UpdateScratch& scratch,
            int32_t widest, cudaStream_t stream) {
  constexpr int32_t kColumns = kLanes * kVectors * kWidth;
  const auto parts = static_cast<uint32_t>((widest + kColumns - 1) / kColumns);
  const int64_t max_pieces = update.batch.num_ids / kLongest + 1;
  // resident_grid counts blocks of kThreads.
  const int64_t threads = max_pieces * parts * kLanes * (kThreads / kPieceThreads);
  const unsigned blocks = resident_grid(kPieceBlocks, threads);
  launch_dependent(sum_pieces_kernel<kLanes, kWidth, kVectors>, blocks, kPieceThreads, stream,
                   tables, update, scratch, parts);
}

}  // namespace

void sum_pieces(const TableView* tables, const UpdateArguments& update,
                const UpdateScratch& scratch, const GroupShape& shape, cudaStream_t stream) {
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
