// Updates the rows of long segments, after the sums of their pieces have been computed. The sum of
// a segment is that of kShares shares of its pieces, in a fixed order. One warp sums the pieces of
// a segment with at most kShares of them; for longer segments each warp of a block sums a share.
#include "common/chain.cuh"
#include "hash_table/cuda/offsets.cuh"
#include "hash_table/cuda/update/row_update.cuh"
#include "hash_table/cuda/update/update.cuh"

namespace torchrec_hkv::hash_table::cuda {
namespace {

constexpr uint32_t kShares = kThreads / kWarp;

__device__ __forceinline__ uint32_t pieces_of(const LongSegment& segment) {
  return (segment.length + static_cast<uint32_t>(kPieceSize) - 1) /
         static_cast<uint32_t>(kPieceSize);
}

// kWidth: columns of a vector, 4 where the group allows. kInt8: some table has rows of 8 bits.
template <int kWidth, bool kColumnStates, bool kInt8>
__global__ void __launch_bounds__(kThreads, kColumnStates ? 3 : 4)
    long_segments_kernel(const TableView* __restrict__ tables,
                         const __grid_constant__ Update update,
                         const __grid_constant__ Scratch scratch, UpdateHint* hint) {
  constexpr int32_t kColumns = kWarp * 4;  // at a time
  __shared__ float shares[kShares][kColumns];
  wait_for_kernel_before();
  if (blockIdx.x == 0 && threadIdx.x == 0) {
    hint->unique_ids = int64_t{8} * *scratch.unique >= 7 * update.batch.num_ids ? 1 : 0;
    hint->longest_feature = *scratch.longest_feature;
    hint->hot_slots = *scratch.hot_slots;
  }
  if (is_refused(update.batch)) return;
  const LongSegments& longs = scratch.long_segments;
  const Pairs& sorted = scratch.pairs.pairs;
  const uint32_t warp = threadIdx.x / kWarp;
  const uint32_t number = *longs.number;
  const float rate = *update.learning_rate;
  const auto table_of_segment = [&](const Pair& pair) -> const TableView& {
    const uint32_t value = sorted.value_of(pair);
    return table_of(tables, update, scratch.bags != nullptr ? scratch.bags[value] : value);
  };
  const auto slot_of = [&](const Pair& pair, const TableView& table) {
    return static_cast<int64_t>(sorted.key_of(pair)) - table.first_slot;
  };
  // Calls visit(column) for the lane's columns among the first `columns` ones.
  const auto for_columns = [&](int32_t columns, const auto& visit) {
    for (int32_t c = threadIdx.x % kWarp * kWidth; c < columns; c += kWarp * kWidth) visit(c);
  };
  // Columns of the sum of consecutive pieces.
  const auto sum_pieces = [&](uint32_t begin, uint32_t end, int32_t column) {
    Columns<kWidth> sum = Columns<kWidth>::zero();
    const float* from = longs.sums + static_cast<int64_t>(begin) * longs.widest + column;
#pragma unroll 4
    for (uint32_t p = begin; p < end; ++p, from += longs.widest) {
      sum.add(1.0f, Columns<kWidth>::load(from));
    }
    return sum;
  };
  for (uint32_t r = blockIdx.x; r < number; r += gridDim.x) {
    const LongSegment segment = longs.segments[r];
    const uint32_t pieces = pieces_of(segment);
    if (pieces <= kShares) continue;
    const Pair pair = sorted.load(segment.first);
    const TableView& table = table_of_segment(pair);
    float* const total = longs.sums + static_cast<int64_t>(segment.first_piece) * longs.widest;
    for (int32_t first = 0; first < table.dim(); first += kColumns) {
      const int32_t columns = min(kColumns, table.dim() - first);
      for_columns(columns, [&](int32_t column) {
        sum_pieces(segment.first_piece + pieces * warp / kShares,
                   segment.first_piece + pieces * (warp + 1) / kShares, first + column)
            .store(&shares[warp][column]);
      });
      __syncthreads();  // all pieces of these columns have been read, too
      if (warp == 0) {
        for_columns(columns, [&](int32_t column) {
          Columns<kWidth> sum = Columns<kWidth>::zero();
#pragma unroll
          for (uint32_t w = 0; w < kShares; ++w) {
            sum.add(1.0f, Columns<kWidth>::load(&shares[w][column]));
          }
          sum.store(total + first + column);
        });
      }
      __syncthreads();
    }
    if (warp == 0) {
      update_row_in_memory<kWidth, kColumnStates, kInt8>(
          table, update.optimizer, rate, slot_of(pair, table),
          [&](int32_t column) { return Columns<kWidth>::load(total + column); }, total);
    }
  }
  for (uint32_t r = warp * gridDim.x + blockIdx.x; r < number; r += kShares * gridDim.x) {
    const LongSegment segment = longs.segments[r];
    const uint32_t pieces = pieces_of(segment);
    if (pieces > kShares) continue;
    const Pair pair = sorted.load(segment.first);
    const TableView& table = table_of_segment(pair);
    update_row_in_memory<kWidth, kColumnStates, kInt8>(
        table, update.optimizer, rate, slot_of(pair, table),
        [&](int32_t column) {
          return sum_pieces(segment.first_piece, segment.first_piece + pieces, column);
        },
        longs.sums + static_cast<int64_t>(segment.first_piece) * longs.widest);
  }
}

}  // namespace

void update_long_segments(const TableView* tables, const Update& update, const Scratch& scratch,
                          const GroupShape& shape, UpdateHint* hint, cudaStream_t stream) {
  if (update.batch.num_ids <= kLongest) return;
  const bool states = has_column_states(update.optimizer);
  const auto choose = [&]<bool kInt8>() {
    return update.group_four_wide ? (states ? long_segments_kernel<4, true, kInt8>
                                            : long_segments_kernel<4, false, kInt8>)
                                  : (states ? long_segments_kernel<1, true, kInt8>
                                            : long_segments_kernel<1, false, kInt8>);
  };
  const auto kernel =
      shape.int8_rows ? choose.template operator()<true>() : choose.template operator()<false>();
  const unsigned blocks = resident_grid(states ? 3 : 4, update.batch.num_ids * 4);
  launch_chained(kernel, blocks, kThreads, stream, tables, update, scratch, hint);
}

}  // namespace torchrec_hkv::hash_table::cuda
