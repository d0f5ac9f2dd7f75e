// Updates the rows of long segments after the sums of their pieces have been computed. The pieces
// are divided into kPieceWarps groups, whose sums are added in a fixed order. One warp sums a
// segment with at most that many pieces. Segments with more pieces are summed by blocks, each of
// which takes a group of columns: each warp sums a share, and the block that finishes the last
// group updates the row.
#include "common/dependent_launch.cuh"
#include "hash_table/cuda/offsets.cuh"
#include "hash_table/cuda/update/row_update.cuh"
#include "hash_table/cuda/update/update.cuh"

namespace torchrec_hkv::hash_table::cuda {
namespace {

static_assert(kPieceWarps == kThreads / kWarp);

// Loads columns that other blocks have just written.
template <int kWidth>
__device__ __forceinline__ Columns<kWidth> load_columns_l2(const float* from) {
  Columns<kWidth> columns;
  if constexpr (kWidth == 4) {
    const uint4 words = load_vector_l2(from);
    columns.v[0] = __uint_as_float(words.x), columns.v[1] = __uint_as_float(words.y);
    columns.v[2] = __uint_as_float(words.z), columns.v[3] = __uint_as_float(words.w);
  } else {
    columns.v[0] = __uint_as_float(load_l2(reinterpret_cast<const uint32_t*>(from)));
  }
  return columns;
}

// Sums kColumnsPerLane columns per lane over some pieces. A lane takes one of each kWarp
// neighbouring columns. from: the first piece's columns. columns: their number. widest: distance
// between pieces.
template <int kColumnsPerLane>
__device__ __forceinline__ void sum_pieces(const float* from, uint32_t pieces, int32_t widest,
                                           int32_t columns, float* sums) {
  constexpr int kAhead = 16 / kColumnsPerLane;
  const auto lane = static_cast<int32_t>(threadIdx.x % kWarp);
  float lane_sums[kColumnsPerLane] = {};
#pragma unroll kAhead
  for (uint32_t p = 0; p < pieces; ++p, from += widest) {
#pragma unroll
    for (int k = 0; k < kColumnsPerLane; ++k) {
      if (k * kWarp + lane < columns) lane_sums[k] += from[k * kWarp + lane];
    }
  }
#pragma unroll
  for (int k = 0; k < kColumnsPerLane; ++k) sums[k * kWarp + lane] = lane_sums[k];
}

// kWidth: columns of a vector, 4 if the group allows. kInt8: some table has rows of 8 bits.
template <int kWidth, bool kColumnStates, bool kInt8>
__global__ void __launch_bounds__(kThreads, kColumnStates ? 2 : 3)
    long_segments_kernel(const TableView* __restrict__ tables,
                         const __grid_constant__ UpdateArguments update,
                         const __grid_constant__ UpdateScratch scratch, UpdateHint* hint) {
  constexpr int32_t kMaxColumns = 4 * kWarp;  // of a group
  __shared__ float partial_sums[kPieceWarps][kMaxColumns];
  wait_for_kernel_before();
  if (blockIdx.x == 0 && threadIdx.x == 0) {
    hint->unique_ids = int64_t{8} * *scratch.unique >= 7 * update.batch.num_ids ? 1 : 0;
    hint->longest_feature = *scratch.longest_feature;
  }
  if (is_refused(update.batch)) return;
  const LongSegments& longs = scratch.long_segments;
  const Pairs& sorted = scratch.pairs.pairs;
  const uint32_t warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const float rate = *update.learning_rate;
  const auto table_of_segment = [&](const Pair& pair) -> const TableView& {
    return table_of(tables, update.batch, scratch.bag_of(sorted.value_of(pair)));
  };
  const auto slot_of = [&](const Pair& pair, const TableView& table) {
    return static_cast<int64_t>(sorted.key_of(pair)) - table.first_slot;
  };
  // The sum of a piece, from a column on.
  const auto piece_sum = [&](uint32_t piece, int32_t column) {
    return longs.sums + static_cast<int64_t>(piece) * longs.widest + column;
  };

  // Narrow groups have more loads in flight for each column, wide ones need fewer rounds.
  const int32_t of_group = longs.widest <= kMaxColumns ? kWarp : kMaxColumns;
  const auto groups_of = [&](int32_t columns) {
    return static_cast<uint32_t>((columns + of_group - 1) / of_group);
  };
  const uint32_t groups = groups_of(longs.widest);
  const uint32_t num_work_items = *longs.number_many * groups;
  for (uint32_t work = blockIdx.x; work < num_work_items; work += gridDim.x) {
    LongSegment* const listed = &longs.segments[longs.capacity - 1 - work / groups];
    const LongSegment segment = *listed;
    const Pair pair = sorted.load(segment.first);
    const TableView& table = table_of_segment(pair);
    const int32_t first_column = static_cast<int32_t>(work % groups) * of_group;
    const int32_t columns = min(of_group, table.dim() - first_column);
    if (columns <= 0) continue;
    const uint32_t pieces = segment.pieces();
    const uint32_t begin = pieces * warp / kPieceWarps, end = pieces * (warp + 1) / kPieceWarps;
    const float* const from = piece_sum(segment.first_piece + begin, first_column);
    if (of_group == kWarp) {
      sum_pieces<1>(from, end - begin, longs.widest, columns, partial_sums[warp]);
    } else {
      sum_pieces<4>(from, end - begin, longs.widest, columns, partial_sums[warp]);
    }
    __syncthreads();  // the shares are written, and all pieces of these columns read
    float* const total = piece_sum(segment.first_piece, 0);
    if (warp == 0) {
      for (auto c = static_cast<int32_t>(lane); c < columns; c += kWarp) {
        float sum = 0.0f;
#pragma unroll
        for (uint32_t w = 0; w < kPieceWarps; ++w) sum += partial_sums[w][c];
        total[first_column + c] = sum;
      }
      __threadfence();
      __syncwarp();
      uint32_t summed = 0;
      if (lane == 0) summed = atomicAdd(&listed->summed, 1u) + 1;
      summed = __shfl_sync(kAllLanes, summed, 0);
      if (summed == groups_of(table.dim())) {
        __threadfence();
        update_row_in_memory<kWidth, kColumnStates, kInt8>(
            table, update.optimizer, rate, slot_of(pair, table),
            [&](int32_t column_in_row) { return load_columns_l2<kWidth>(total + column_in_row); },
            total);
      }
    }
    __syncthreads();
  }
  const uint32_t number = *longs.number;
  for (uint32_t r = warp * gridDim.x + blockIdx.x; r < number; r += kPieceWarps * gridDim.x) {
    const LongSegment segment = longs.segments[r];
    const uint32_t pieces = segment.pieces();
    const Pair pair = sorted.load(segment.first);
    const TableView& table = table_of_segment(pair);
    update_row_in_memory<kWidth, kColumnStates, kInt8>(
        table, update.optimizer, rate, slot_of(pair, table),
        [&](int32_t column) {
          const float* const from = piece_sum(segment.first_piece, column);
          Columns<kWidth> piece_sums[kPieceWarps];
#pragma unroll
          for (uint32_t p = 0; p < kPieceWarps; ++p) {
            if (p < pieces) piece_sums[p] = Columns<kWidth>::load(from + int64_t{p} * longs.widest);
          }
          Columns<kWidth> sum = Columns<kWidth>::zero();
#pragma unroll
          for (uint32_t p = 0; p < kPieceWarps; ++p) {
            if (p < pieces) sum.add(1.0f, piece_sums[p]);
          }
          return sum;
        },
        piece_sum(segment.first_piece, 0));
  }
}

}  // namespace

void update_long_segments(const TableView* tables, const UpdateArguments& update,
                          const UpdateScratch& scratch, const GroupShape& shape, UpdateHint* hint,
                          cudaStream_t stream) {
  if (update.batch.num_ids <= kLongest) return;
  const bool states = column_states(update.optimizer.kind) > 0;
  const auto choose = [&]<bool kInt8>() {
    return update.group_four_wide ? (states ? long_segments_kernel<4, true, kInt8>
                                            : long_segments_kernel<4, false, kInt8>)
                                  : (states ? long_segments_kernel<1, true, kInt8>
                                            : long_segments_kernel<1, false, kInt8>);
  };
  const auto kernel =
      shape.int8_rows ? choose.template operator()<true>() : choose.template operator()<false>();
  const unsigned blocks = resident_grid(states ? 2 : 3, update.batch.num_ids * 4);
  launch_dependent(kernel, blocks, kThreads, stream, tables, update, scratch, hint);
}

}  // namespace torchrec_hkv::hash_table::cuda
