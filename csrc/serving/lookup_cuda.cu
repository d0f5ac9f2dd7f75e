// Lookups in read-only tables on a GPU.

#include "common/cuda_check.h"
#include "serving/find.cuh"
#include "serving/host_rows.cuh"
#include "serving/kernels_cuda.h"
#include "serving/row_reader.cuh"

namespace torchrec_hkv::serving::cuda {
namespace {

constexpr int kThreads = 256;
constexpr unsigned kAll = 0xffffffffu;
constexpr int64_t kMaxFindBlocks = 2048;

__device__ void count_host_lookups(const Table& table, int lookups) {
  if (lookups > 0 && table.hot.host_lookups != nullptr) {
    atomicAdd(table.hot.host_lookups, static_cast<unsigned long long>(lookups));
  }
}

// Adds to a table's numbers of looked up ids and of unknown ids. number: number of ids, which the
// first thread of the block adds.
__device__ __forceinline__ void count_lookups(int64_t* of_table, int unknown, int64_t number) {
  auto* const counters = reinterpret_cast<unsigned long long*>(of_table);
  if (unknown > 0) atomicAdd(counters + 1, static_cast<unsigned long long>(unknown));
  if (number > 0 && threadIdx.x == 0) {
    atomicAdd(counters, static_cast<unsigned long long>(number));
  }
}

// Constants of rows_kernel. Eight loads in flight for each lane hide the latency of rows. With
// blocks of 128 threads, more warps fit on a multiprocessor than with 256.
constexpr int kRowsThreads = 128, kAhead = 8;

// A warp processes 32 ids: each lane finds one row, then all lanes copy the rows, kAhead pieces for
// each lane at a time. kOut: the output's type, or kAnyType. kFound: rows have been found already.
constexpr int kAnyType = -1;
// The type of outputs whose values are those of the rows as they are stored, or -2.
constexpr int same_type(RowFormat format) {
  return format == RowFormat::kFloat32    ? static_cast<int>(RowType::kFloat32)
         : format == RowFormat::kFloat16  ? static_cast<int>(RowType::kFloat16)
         : format == RowFormat::kBFloat16 ? static_cast<int>(RowType::kBFloat16)
                                          : -2;
}
template <RowFormat kFormat, int kColumns, int kOut, bool kFound>
__global__ void __launch_bounds__(kRowsThreads) rows_kernel(RowsLaunch call) {
  const int lane = threadIdx.x & 31;
  const int64_t first = (int64_t{blockIdx.x} * kRowsThreads + threadIdx.x) / 32 * 32;
  if (first >= call.n) return;
  const int here = static_cast<int>(call.n - first < 32 ? call.n - first : 32);
  const char* row = nullptr;
  if constexpr (kFound) {
    if (lane < here) row = call.staging.found[first + lane];
  } else {
    if (lane < here) row = find_row(*call.table, call.ids[first + lane]);
    const int unknown = __popc(__ballot_sync(kAll, lane < here && row == nullptr));
    count_lookups(call.counters, lane == 0 ? unknown : 0, blockIdx.x == 0 ? call.n : 0);
  }

  // Fields of the table are read before the loop. Otherwise the compiler reads them again after
  // each store, because it can't rule out that the store changes them.
  const RowType type = kOut == kAnyType ? call.type : static_cast<RowType>(kOut);
  const float unit = call.table->unit;
  const int32_t pieces = call.dim / kColumns, total = here * pieces;
  const int64_t piece_bytes = int64_t{kColumns} * element_size(type);
  char* const out = call.out + first * pieces * piece_bytes;
  // The next row of a lane and the piece of that row, updated without a division.
  int32_t at_row = lane / pieces, at = lane % pieces;
  const int32_t step_rows = 32 / pieces, step = 32 % pieces;
  for (int32_t base = lane; base - lane < total; base += 32 * kAhead) {
    ColumnBlock<kFormat, kColumns> column_blocks[kAhead];
    uint32_t known = 0;
#pragma unroll
    for (int k = 0; k < kAhead; ++k) {
      const bool is_there = base + 32 * k < total;
      const auto from = reinterpret_cast<const char*>(
          __shfl_sync(kAll, reinterpret_cast<unsigned long long>(row), is_there ? at_row : 0));
      if (is_there && from != nullptr) {
        column_blocks[k].load(from, at * kColumns);
        known |= 1u << k;
      }
      at += step;
      at_row += step_rows;
      if (at >= pieces) at -= pieces, ++at_row;
    }
#pragma unroll
    for (int k = 0; k < kAhead; ++k) {
      const int32_t piece = base + 32 * k;
      if (piece >= total) break;
      float values[kColumns];
      if (known >> k & 1) {
        if constexpr (kOut == same_type(kFormat)) {
          column_blocks[k].store(out + piece * piece_bytes);
          continue;
        }
        // widen() needs the column only if a byte holds two columns and one of them is read.
        constexpr bool kInHalves = kFormat == RowFormat::kInt4 && kColumns == 1;
        column_blocks[k].widen(unit, kInHalves ? piece % pieces : 0, values);
      } else {
        copy_unknown<kColumns>(*call.table, call.ids[first + piece / pieces],
                               piece % pieces * kColumns, values);
      }
      store_columns<kColumns>(type, out + piece * piece_bytes, values);
    }
  }
}

// found[i] = the row of the id at position i of [begin, end), or null; counts ids. Rows in host
// memory are listed in `rows`, with positions from `first_place` on. Called by all threads of the
// blocks in a row of the grid.
template <bool kTiered>
__device__ __forceinline__ void find_rows(const Table& table, const int64_t* ids, int64_t begin,
                                          int64_t end, uint32_t phase, const HostRowList& rows,
                                          const char** found, int64_t first_place,
                                          int64_t* counters) {
  const int64_t stride = int64_t{gridDim.x} * kThreads;
  const int lane = threadIdx.x % 32;
  int unknown = 0, from_host = 0;
  const int64_t of_warp = begin + int64_t{blockIdx.x} * kThreads + threadIdx.x - lane;
  for (int64_t first = of_warp; first < end; first += stride) {
    const int64_t i = first + lane;
    bool is_in_host_memory = false;
    const char* row = nullptr;
    if (i < end) {
      const bool sampled = kTiered && is_sampled(i, phase);
      row = find_row<kTiered>(table, ids[i], sampled, &is_in_host_memory);
      found[i] = row;
      unknown += row == nullptr;
      from_host += is_in_host_memory;
    }
    if constexpr (kTiered) {
      rows.list(table, row, is_in_host_memory, static_cast<uint32_t>(first_place + i));
    }
  }
  if constexpr (kTiered) {
    from_host = __reduce_add_sync(kAll, from_host);
    count_host_lookups(table, lane == 0 ? from_host : 0);
  }
  unknown = __reduce_add_sync(kAll, unknown);
  count_lookups(counters, lane == 0 ? unknown : 0,
                blockIdx.x == 0 && end > begin ? end - begin : 0);
}

__global__ void __launch_bounds__(kThreads) find_rows_kernel(RowsLaunch call, HostRowList rows) {
  find_rows<true>(*call.table, call.ids, 0, call.n, call.phase, rows, rows.found, 0, call.counters);
}

// found[layer * n + i] = the row of id i in the table of each output, or null; counts ids.
template <bool kTiered>
__global__ void __launch_bounds__(kThreads) find_kernel(PoolLaunch call, HostRowList rows) {
  const PooledOutput output = call.outputs[blockIdx.y];
  const int64_t* const of = call.offsets + output.feature * call.batch_size;
  const int64_t begin = max(of[0], int64_t{0}), end = min(of[call.batch_size], call.n);
  const int64_t first_place = output.layer * call.n;
  find_rows<kTiered>(call.tables[output.table], call.ids, begin, end, call.phase, rows,
                     call.staging.found + first_place, first_place,
                     call.counters + 2 * output.table);
}

// Pools the bags of one output. A lane takes kColumns columns, and a bag as many lanes as needed.
template <RowFormat kFormat, int kColumns>
__device__ void pool_bags(const PoolLaunch& call, const PooledOutput& output, const Table& table) {
  constexpr int kRowsAhead = 4;
  const int32_t pieces = table.dim / kColumns;
  int32_t lanes = 1;
  while (lanes < pieces && lanes < 32) lanes *= 2;
  const int32_t lane = threadIdx.x % lanes;
  const int64_t bag = (int64_t{blockIdx.x} * kThreads + threadIdx.x) / lanes;
  if (bag >= call.batch_size) return;
  const int64_t* const of = call.offsets + output.feature * call.batch_size + bag;
  const int64_t begin = max(of[0], int64_t{0}), end = min(of[1], call.n);
  const int64_t length = end - begin;
  const char* const* const found = call.staging.found + output.layer * call.n;
  const float row_scale = output.mean == Mean::kScaledRows ? 1.0f / length : 1.0f;
  const int64_t out_bytes = element_size(call.type);
  // As on a CPU, only rows in types of trained tables use fused multiply-adds.
  const bool fused =
      output.fused && (kFormat == RowFormat::kFloat32 || kFormat == RowFormat::kFloat16);
  for (int32_t piece = lane; piece < pieces; piece += lanes) {
    const int32_t column = piece * kColumns;
    float sums[kColumns] = {};
    float weight_sum = 0.0f;
    for (int64_t i = begin; i < end; i += kRowsAhead) {
      ColumnBlock<kFormat, kColumns> column_blocks[kRowsAhead];
      const char* rows[kRowsAhead];
#pragma unroll
      for (int k = 0; k < kRowsAhead; ++k) rows[k] = i + k < end ? found[i + k] : nullptr;
#pragma unroll
      for (int k = 0; k < kRowsAhead; ++k) {
        if (rows[k] != nullptr) column_blocks[k].load(rows[k], column);
      }
#pragma unroll
      for (int k = 0; k < kRowsAhead; ++k) {
        if (i + k >= end) break;
        float values[kColumns];
        if (rows[k] != nullptr) {
          column_blocks[k].widen(table.unit, column, values);
        } else {
          copy_unknown<kColumns>(table, call.ids[i + k], column, values);
        }
        const float weight = call.weights == nullptr ? 1.0f : call.weights[i + k];
        weight_sum = __fadd_rn(weight_sum, weight);
        const float by = __fmul_rn(weight, row_scale);
#pragma unroll
        for (int c = 0; c < kColumns; ++c) {
          sums[c] = fused ? __fmaf_rn(by, values[c], sums[c])
                          : __fadd_rn(sums[c], __fmul_rn(by, values[c]));
        }
      }
    }
    if (output.mean == Mean::kScaledSum && length > 0) {
      const float by = 1.0f / length;
      for (float& sum : sums) sum = __fmul_rn(sum, by);
    } else if (output.mean == Mean::kDividedSum && weight_sum != 0.0f) {
      for (float& sum : sums) sum = __fdiv_rn(sum, weight_sum);
    }
    char* const out = call.out + (bag * call.columns + output.column + column) * out_bytes;
    if (kColumns == 1 || (output.column % 4 == 0 && call.columns % 4 == 0)) {
      store_columns<kColumns>(call.type, out, sums);
    } else {  // columns of other tables misalign these
#pragma unroll
      for (int c = 0; c < kColumns; ++c) store_columns<1>(call.type, out + c * out_bytes, sums + c);
    }
  }
}

template <int kColumns>
__global__ void __launch_bounds__(kThreads) pool_kernel(PoolLaunch call, int first_output) {
  const PooledOutput output = call.outputs[first_output + blockIdx.y];
  const Table& table = call.tables[output.table];
  switch (table.format) {
    case RowFormat::kFloat32:
      return pool_bags<RowFormat::kFloat32, kColumns>(call, output, table);
    case RowFormat::kFloat16:
      return pool_bags<RowFormat::kFloat16, kColumns>(call, output, table);
    case RowFormat::kBFloat16:
      return pool_bags<RowFormat::kBFloat16, kColumns>(call, output, table);
    case RowFormat::kInt8:
      return pool_bags<RowFormat::kInt8, kColumns>(call, output, table);
    case RowFormat::kInt4:
      return pool_bags<RowFormat::kInt4, kColumns>(call, output, table);
  }
}

// Pools some of the outputs, whose tables have at most `widest` columns.
template <int kColumns>
void launch_pool(const PoolLaunch& call, int first, int count, int32_t widest,
                 cudaStream_t stream) {
  if (count == 0) return;
  int64_t lanes = 1;
  while (lanes < widest / kColumns && lanes < 32) lanes *= 2;
  const int64_t blocks = (call.batch_size * lanes + kThreads - 1) / kThreads;
  const dim3 grid(static_cast<unsigned>(blocks), static_cast<unsigned>(count));
  pool_kernel<kColumns><<<grid, kThreads, 0, stream>>>(call, first);
  HKV_CUDA_CHECK_LAUNCH();
}

template <RowFormat kFormat, int kColumns, int kOut, bool kFound = false>
void launch_rows_of(const RowsLaunch& call, cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>((call.n + kRowsThreads - 1) / kRowsThreads);
  rows_kernel<kFormat, kColumns, kOut, kFound><<<blocks, kRowsThreads, 0, stream>>>(call);
  HKV_CUDA_CHECK_LAUNCH();
}

// Whether rows and outputs are aligned to pieces of kColumns columns.
template <RowFormat kFormat, int kColumns>
bool fits_pieces(const RowsLaunch& call) {
  return call.dim % kColumns == 0 &&
         call.row_bytes % ColumnBlock<kFormat, kColumns>::kWordBytes == 0;
}

template <RowFormat kFormat, int kColumns>
void launch_typed_rows(const RowsLaunch& call, cudaStream_t stream) {
  constexpr auto as_int = [](RowType type) { return static_cast<int>(type); };
  switch (call.type) {
    case RowType::kFloat32:
      return launch_rows_of<kFormat, kColumns, as_int(RowType::kFloat32)>(call, stream);
    case RowType::kFloat16:
      return launch_rows_of<kFormat, kColumns, as_int(RowType::kFloat16)>(call, stream);
    default:
      return launch_rows_of<kFormat, kColumns, as_int(RowType::kBFloat16)>(call, stream);
  }
}

template <RowFormat kFormat>
void launch_rows(const RowsLaunch& call, cudaStream_t stream) {
  // The number of columns of a lane that is best for most tables, if rows and outputs are aligned.
  constexpr int kWidest = kFormat == RowFormat::kFloat32 ? 4 : 8;
  const bool in_widest = fits_pieces<kFormat, kWidest>(call);
  const bool in_fours = fits_pieces<kFormat, 4>(call);
  if (call.staging.found != nullptr) {
    return in_widest  ? launch_rows_of<kFormat, kWidest, kAnyType, true>(call, stream)
           : in_fours ? launch_rows_of<kFormat, 4, kAnyType, true>(call, stream)
                      : launch_rows_of<kFormat, 1, kAnyType, true>(call, stream);
  }
  if (in_widest) return launch_typed_rows<kFormat, kWidest>(call, stream);
  if (in_fours) return launch_typed_rows<kFormat, 4>(call, stream);
  launch_rows_of<kFormat, 1, kAnyType>(call, stream);
}

}  // namespace

void look_up_rows(const RowsLaunch& call, cudaStream_t stream) {
  if (call.n == 0) return;
  if (call.staging.found != nullptr) {
    size_t bytes = 0;
    const HostRowList rows = HostRowList::in(call.staging, &bytes);
    begin_list(rows, stream);
    const int64_t blocks = min((call.n + kThreads - 1) / kThreads, kMaxFindBlocks);
    find_rows_kernel<<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(call, rows);
    HKV_CUDA_CHECK_LAUNCH();
    copy_listed(rows, stream);
  }
  switch (call.format) {
    case RowFormat::kFloat32:
      return launch_rows<RowFormat::kFloat32>(call, stream);
    case RowFormat::kFloat16:
      return launch_rows<RowFormat::kFloat16>(call, stream);
    case RowFormat::kBFloat16:
      return launch_rows<RowFormat::kBFloat16>(call, stream);
    case RowFormat::kInt8:
      return launch_rows<RowFormat::kInt8>(call, stream);
    case RowFormat::kInt4:
      return launch_rows<RowFormat::kInt4>(call, stream);
  }
}

void pool(const PoolLaunch& call, cudaStream_t stream) {
  if (call.num_outputs == 0 || call.batch_size == 0) return;
  if (call.n > 0) {
    const int64_t wanted = call.n / call.num_outputs / kThreads + 1;
    const dim3 grid(static_cast<unsigned>(min(wanted, kMaxFindBlocks)),
                    static_cast<unsigned>(call.num_outputs));
    size_t bytes = 0;
    const HostRowList rows = HostRowList::in(call.staging, &bytes);
    begin_list(rows, stream);
    if (call.staging.host_bytes > 0) {
      find_kernel<true><<<grid, kThreads, 0, stream>>>(call, rows);
    } else {
      find_kernel<false><<<grid, kThreads, 0, stream>>>(call, rows);
    }
    HKV_CUDA_CHECK_LAUNCH();
    copy_listed(rows, stream);
  }
  launch_pool<4>(call, 0, call.num_in_fours, call.widest_in_fours, stream);
  launch_pool<1>(call, call.num_in_fours, call.num_outputs - call.num_in_fours, call.widest_other,
                 stream);
}

}  // namespace torchrec_hkv::serving::cuda
