// Reads and writes rows at slots that a find returned. Groups of one table have kernels of their
// own.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "common/cuda_check.h"
#include "common/dependent_launch.cuh"
#include "hash_table/cuda/bucket.cuh"
#include "hash_table/cuda/hbm_cache/frames.cuh"
#include "hash_table/cuda/insert/missing_lists.cuh"
#include "hash_table/cuda/row_matrix.cuh"
#include "hash_table/cuda/row_vector.cuh"
#include "hash_table/kernels.h"

namespace torchrec_hkv::hash_table::cuda {
namespace {

// Number of rows that a warp copies together. Their pieces are distributed to the lanes, so that
// short rows fill the warp and several loads are in flight.
constexpr int kRowsOfWarp = 8;

// Copies rows whose addresses are not null; lane k holds those of row k. Word: the widest type
// that the size of the rows allows.
template <typename Word>
__device__ __forceinline__ void copy_words(char* to, const char* from, int32_t bytes) {
  constexpr int kAtOnce = 4;
  const int32_t words = bytes / static_cast<int32_t>(sizeof(Word));
  const int32_t all = words * kRowsOfWarp;
  for (int32_t begin = 0; begin < all; begin += kAtOnce * kWarp) {
    // Reads all before the first write. Otherwise each read would wait for the previous write,
    // because the compiler can't know that rows do not overlap.
    Word loaded[kAtOnce];
    char* word_to[kAtOnce] = {};
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      if (begin + k * kWarp >= all) break;
      const int32_t i = begin + k * kWarp + threadIdx.x % kWarp;
      const int32_t row = i < all ? i / words : 0;
      const int64_t at = static_cast<int64_t>(i - row * words) * sizeof(Word);
      auto* row_to = reinterpret_cast<char*>(
          __shfl_sync(kAllLanes, reinterpret_cast<unsigned long long>(to), row));
      const auto* row_from = reinterpret_cast<const char*>(
          __shfl_sync(kAllLanes, reinterpret_cast<unsigned long long>(from), row));
      if (i >= all || row_to == nullptr || row_from == nullptr) continue;
      loaded[k] = *reinterpret_cast<const Word*>(in_global(row_from) + at);
      word_to[k] = row_to + at;
    }
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      if (word_to[k] != nullptr) *reinterpret_cast<Word*>(in_global(word_to[k])) = loaded[k];
    }
  }
}
__device__ __forceinline__ void copy_rows(char* to, const char* from, int32_t bytes) {
  if (bytes % 16 == 0) {
    copy_words<uint4>(to, from, bytes);
  } else if (bytes % 4 == 0) {
    copy_words<uint32_t>(to, from, bytes);
  } else {
    copy_words<uint16_t>(to, from, bytes);
  }
}

__device__ __forceinline__ int64_t first_row_of_warp() {
  return (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) / kWarp * kRowsOfWarp;
}

// Uniform rows have a kernel of their own, because the code of the normal distribution needs more
// registers.
template <Distribution kInitial>
__global__ void __launch_bounds__(kThreads)
    gather_kernel(TableView table, RowStore store, const int64_t* __restrict__ ids,
                  const int64_t* __restrict__ slots, int64_t n, char* __restrict__ rows,
                  bool* __restrict__ found) {
  wait_for_kernel_before();
  const int lane = threadIdx.x % kWarp;
  const int64_t first = first_row_of_warp();
  if (first >= n) return;
  const auto bytes = static_cast<int32_t>(store.bytes());
  const bool mine = lane < kRowsOfWarp && first + lane < n;
  const int64_t slot = mine ? slots[first + lane] : kNoSlot;
  if (mine && found != nullptr) found[first + lane] = slot != kNoSlot;
  copy_rows(rows + (first + lane) * bytes,
            slot == kNoSlot ? nullptr : store.at(slot, table.frames.frame_of(slot)), bytes);
  for (unsigned remaining = __ballot_sync(kAllLanes, mine && slot == kNoSlot); remaining;
       remaining &= remaining - 1) {
    const int64_t i = first + __ffs(static_cast<int>(remaining)) - 1;
    if (ids == nullptr) {
      for (int32_t b = lane * 2; b < bytes; b += kWarp * 2) {
        *reinterpret_cast<uint16_t*>(rows + i * bytes + b) = 0;
      }
      continue;
    }
    for (int32_t c = lane; c < store.width; c += kWarp) {
      const InitialRows& init = table.initial_rows;
      const uint32_t draw =
          initial_draw(init, ids[i], static_cast<uint32_t>(table.column_offset + c));
      const float value =
          kInitial == Distribution::kUniform ? scale_uniform(init, draw) : scale_normal(init, draw);
      store_element(store.type, rows + i * bytes, c, value);
    }
  }
}

// Whether a thread is the first of the call to claim its slot; kNoSlot claims nothing. Usually only
// one of a block's threads with the same slot reads the slot's bit, because L2 serialises the
// requests of all blocks for the word of a hot slot. Called by all threads of a block.
template <int kEntries>
struct BlockClaims {
  int64_t slots[kThreads];
  uint32_t threads[kEntries];  // by slot modulo kEntries: one of the threads with this slot

  __device__ __forceinline__ bool claim(uint32_t* claims, int64_t slot) {
    uint32_t& entry = threads[static_cast<uint64_t>(slot) % kEntries];
    slots[threadIdx.x] = slot;
    if (slot != kNoSlot) atomicExch(&entry, threadIdx.x);
    __syncthreads();
    if (slot == kNoSlot) return false;
    const uint32_t other = entry;
    if (other != threadIdx.x && slots[other] == slot) return false;
    const uint32_t bit = 1u << (slot & 31);
    if (load_l2(&claims[slot >> 5]) & bit) return false;
    return (atomicOr(&claims[slot >> 5], bit) & bit) == 0;
  }
};

// Of several rows for one slot, writes that of the `writer`, or of the first thread to claim the
// slot.
__global__ void __launch_bounds__(kThreads)
    assign_kernel(TableView table, const int64_t* __restrict__ slots, const char* __restrict__ rows,
                  int64_t n, const bool* __restrict__ writer, uint32_t* __restrict__ claims) {
  __shared__ BlockClaims<kThreads> block;
  wait_for_kernel_before();
  const int lane = threadIdx.x % kWarp;
  const int64_t first = first_row_of_warp();
  const bool is_row_lane = lane < kRowsOfWarp && first + lane < n;
  int64_t slot =
      is_row_lane && (writer == nullptr || writer[first + lane]) ? slots[first + lane] : kNoSlot;
  if (writer == nullptr && !block.claim(claims, slot)) slot = kNoSlot;
  if (first >= n) return;
  const auto bytes = static_cast<int32_t>(table.rows.bytes());
  copy_rows(slot != kNoSlot ? row_to_write(table, slot) : nullptr, rows + (first + lane) * bytes,
            bytes);
}

__device__ __forceinline__ void add_element(RowType type, char* row, int32_t c, float value) {
  row = in_global(row);
  switch (type) {
    case RowType::kFloat16:
      atomicAdd(reinterpret_cast<__half*>(row) + c, __float2half_rn(value));
      break;
    case RowType::kBFloat16:
      atomicAdd(reinterpret_cast<__nv_bfloat16*>(row) + c, __float2bfloat16_rn(value));
      break;
    default:
      atomicAdd(reinterpret_cast<float*>(row) + c, value);
  }
}

constexpr int kMaxColumns = 2048;  // columns of a row; runtime/table_config.cpp refuses more

// A warp takes 32 neighbouring positions. Rows for one slot are summed before they are added to
// memory: for the slot with the most positions in a warp over the whole block, for others over a
// warp. So a hot slot costs one atomic operation a column for each block, not for each position.
template <bool kOneTable>
__global__ void __launch_bounds__(kThreads)
    add_kernel(const __grid_constant__ TableView only, const TableView* __restrict__ tables,
               int32_t num_tables, const int64_t* __restrict__ slots, int64_t n,
               const RowMatrix rows) {
  constexpr int kMin = 8;              // least positions of a warp for a sum over the block
  __shared__ float sums[kMaxColumns];  // of the block's hot slot
  __shared__ int64_t slots_of_block[kThreads];
  __shared__ uint32_t most;  // most positions of one slot in a warp, and their first thread
  const int lane = threadIdx.x % kWarp;
  const int64_t at = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const int64_t first = at - lane;
  const int64_t slot = at < n ? slots[at] : kNoSlot;
  const unsigned peers = __match_any_sync(kAllLanes, static_cast<unsigned long long>(slot));
  const bool leads = slot != kNoSlot && (peers & ((1u << lane) - 1)) == 0;
  slots_of_block[threadIdx.x] = slot;
  if (threadIdx.x == 0) most = 0;
  __syncthreads();
  if (leads && __popc(peers) >= kMin) atomicMax(&most, __popc(peers) * kThreads + threadIdx.x);
  __syncthreads();
  const bool any_hot = most != 0;
  const int64_t hot_slot = any_hot ? slots_of_block[most % kThreads] : kNoSlot;
  const TableView* hot_table = nullptr;
  if (any_hot) {
    hot_table = kOneTable ? &only : &tables[table_of_slot(tables, num_tables, hot_slot)];
    for (int32_t c = threadIdx.x; c < hot_table->dim(); c += kThreads) sums[c] = 0.0f;
    __syncthreads();
  }
  for (unsigned remaining = __ballot_sync(kAllLanes, leads); remaining;
       remaining &= remaining - 1) {
    const int source = __ffs(static_cast<int>(remaining)) - 1;
    const int64_t source_slot = __shfl_sync(kAllLanes, slot, source);
    const unsigned source_peers = __shfl_sync(kAllLanes, peers, source);
    const bool hot = source_slot == hot_slot;
    const TableView& table =
        kOneTable ? only : tables[table_of_slot(tables, num_tables, source_slot)];
    char* const row =
        hot ? nullptr : row_to_write(table, source_slot - table.first_slot, lane == 0);
    for (int32_t c = lane; c < table.dim(); c += kWarp) {
      float sum = 0.0f;
#pragma unroll 4
      for (unsigned peer = source_peers; peer; peer &= peer - 1) {
        sum += load_element(rows.type, rows.at(first + __ffs(static_cast<int>(peer)) - 1), c);
      }
      if (hot) {
        atomicAdd(&sums[c], sum);
      } else {
        add_element(table.rows.type, row, c, sum);
      }
    }
  }
  if (!any_hot) return;
  __syncthreads();
  char* const row = row_to_write(*hot_table, hot_slot - hot_table->first_slot, threadIdx.x == 0);
  for (int32_t c = threadIdx.x; c < hot_table->dim(); c += kThreads) {
    add_element(hot_table->rows.type, row, c, sums[c]);
  }
}

// For groups of several tables, whose rows differ in length: eight lanes copy one row.
constexpr int kRowLanes = 8;

__global__ void __launch_bounds__(kThreads)
    gather_group_kernel(const TableView* __restrict__ tables, const Batch batch,
                        const int64_t* __restrict__ slots, const RowMatrix rows,
                        bool* __restrict__ found) {
  const int64_t i = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) / kRowLanes;
  if (i >= batch.num_ids) return;
  const int lane = threadIdx.x % kRowLanes;
  const TableView& table = table_at(tables, batch, i);
  const int64_t slot = slots[i];
  const RowType type = table.rows.type;
  if (lane == 0 && found != nullptr) found[i] = slot != kNoSlot;
  if (slot != kNoSlot) {
    copy_to_matrix<kRowLanes>(rows, i, type, table.row(slot - table.first_slot), table.dim(), lane);
    return;
  }
  const int64_t id = batch.ids[i];
  const auto initial = [&](int32_t c) {
    return Columns<1>::initial(table.initial_rows, id, table.column_offset + c).v[0];
  };
  Int8Scale scale{};
  if (type == RowType::kInt8) {
    uint32_t largest = 0;
    for (int32_t c = lane; c < table.dim(); c += kRowLanes) {
      largest = max(largest, magnitude_bits(initial(c)));
    }
    scale = int8_scale(largest_of_tile<kRowLanes>(largest));
  }
  for (int32_t c = lane; c < rows.columns; c += kRowLanes) {
    float value = 0.0f;
    if (c < table.dim()) {
      value = initial(c);
      if (type == RowType::kInt8) {
        value = scale.scale *
                static_cast<float>(scale.inverse == 0.0f ? 0 : to_int8(value, scale.inverse));
      } else if (type != rows.type) {
        value = widen(type, narrow(type, value));
      }
    }
    store_element(rows.type, rows.at(i), c, value);
  }
}

// claims: as in assign_kernel.
__global__ void __launch_bounds__(kThreads)
    assign_group_kernel(const TableView* __restrict__ tables, int32_t num_tables,
                        const int64_t* __restrict__ slots, int64_t n, const RowMatrix rows,
                        const bool* __restrict__ writer, uint32_t* __restrict__ claims) {
  __shared__ BlockClaims<kThreads> block;
  const int64_t i = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) / kRowLanes;
  const int lane = threadIdx.x % kRowLanes;
  const int64_t slot = i < n ? slots[i] : kNoSlot;
  bool chosen = false;
  if (writer == nullptr) {
    chosen = block.claim(claims, lane == 0 ? slot : kNoSlot);
  } else {
    chosen = lane == 0 && slot != kNoSlot && writer[i];
  }
  chosen = __shfl_sync(kAllLanes, static_cast<int>(chosen), 0, kRowLanes) != 0;
  if (!chosen) return;
  const TableView& table = tables[table_of_slot(tables, num_tables, slot)];
  char* const row = row_to_write(table, slot - table.first_slot, lane == 0);
  copy_from_matrix<kRowLanes>(rows, i, table.rows.type, row, table.dim(), lane);
}

// If `ids` is null, rows for kNoSlot are zeros.
void gather_single_table(const TableView& table, const RowStore& store, const int64_t* ids,
                         const int64_t* slots, int64_t n, char* rows, bool* found,
                         cudaStream_t stream) {
  if (n == 0 || store.width == 0) return;
  const int64_t warps = (n + kRowsOfWarp - 1) / kRowsOfWarp;
  const auto kernel = table.initial_rows.distribution == Distribution::kUniform
                          ? gather_kernel<Distribution::kUniform>
                          : gather_kernel<Distribution::kNormal>;
  launch_dependent(kernel, grid_for(warps * kWarp), kThreads, stream, table, store, ids, slots, n,
                   rows, found);
}

}  // namespace

void gather(const TableView& table, const RowStore& store, const int64_t* slots, int64_t n,
            char* vectors, cudaStream_t stream) {
  gather_single_table(table, store, nullptr, slots, n, vectors, nullptr, stream);
}

void gather_rows(const TableView* tables, const TableView* only, const Batch& batch,
                 const int64_t* slots, const RowMatrix& rows, bool* found, cudaStream_t stream) {
  if (batch.num_ids == 0) return;
  if (only != nullptr && only->rows.type == rows.type) {
    gather_single_table(*only, only->rows, batch.ids, slots, batch.num_ids, rows.data, found,
                        stream);
    return;
  }
  gather_group_kernel<<<grid_for(batch.num_ids * kRowLanes), kThreads, 0, stream>>>(
      tables, batch, slots, rows, found);
  HKV_CUDA_CHECK_LAUNCH();
}

void write_rows(const TableView* tables, const TableView* only, int32_t num_tables,
                const int64_t* slots, int64_t n, const RowMatrix& rows, bool add,
                const bool* writer, uint32_t* claims, cudaStream_t stream) {
  if (n == 0) return;
  const int64_t warps = (n + kRowsOfWarp - 1) / kRowsOfWarp;
  if (add) {
    const auto kernel = only != nullptr ? add_kernel<true> : add_kernel<false>;
    kernel<<<grid_for(n), kThreads, 0, stream>>>(only != nullptr ? *only : TableView{}, tables,
                                                 num_tables, slots, n, rows);
  } else if (only == nullptr || only->rows.type != rows.type) {
    assign_group_kernel<<<grid_for(n * kRowLanes), kThreads, 0, stream>>>(tables, num_tables, slots,
                                                                          n, rows, writer, claims);
  } else {
    launch_dependent(assign_kernel, grid_for(warps * kWarp), kThreads, stream, *only, slots,
                     static_cast<const char*>(rows.data), n, writer, claims);
    return;
  }
  HKV_CUDA_CHECK_LAUNCH();
}

}  // namespace torchrec_hkv::hash_table::cuda
