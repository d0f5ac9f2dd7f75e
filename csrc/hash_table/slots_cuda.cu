// Operations on slots that a find gave.
#include "common/cuda_check.h"
#include "hash_table/bucket_cuda.cuh"
#include "hash_table/kernels.h"

namespace torchrec_hkv::hash_table::cuda {
namespace {

// Copies a row by the lanes of a warp, in the widest pieces that its size allows.
template <typename Piece>
__device__ __forceinline__ void copy_pieces(char* to, const char* from, int32_t bytes) {
  for (int32_t b = threadIdx.x % kWarp * sizeof(Piece); b < bytes; b += kWarp * sizeof(Piece)) {
    *reinterpret_cast<Piece*>(to + b) = *reinterpret_cast<const Piece*>(from + b);
  }
}
__device__ __forceinline__ void copy_row(char* to, const char* from, int32_t bytes) {
  if (bytes % 16 == 0) {
    copy_pieces<uint4>(to, from, bytes);
  } else if (bytes % 4 == 0) {
    copy_pieces<uint32_t>(to, from, bytes);
  } else {
    copy_pieces<uint16_t>(to, from, bytes);
  }
}

// A warp takes a few rows, so that their loads overlap.
constexpr int kRowsOfWarp = 4;

// Uniform rows have a kernel of their own: the code of the normal takes registers from all warps.
template <Distribution kInitial>
__global__ void __launch_bounds__(kThreads)
    gather_kernel(TableView table, RowStore store, const int64_t* __restrict__ ids,
                  const int64_t* __restrict__ slots, int64_t n, char* __restrict__ rows) {
  const int64_t first =
      (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) / kWarp * kRowsOfWarp;
  const int32_t bytes = store.width * element_size(store.type);
#pragma unroll
  for (int k = 0; k < kRowsOfWarp; ++k) {
    const int64_t i = first + k;
    if (i >= n) return;
    char* to = rows + i * bytes;
    if (slots[i] != kNoSlot) {
      copy_row(to, store.row(slots[i]), bytes);
      continue;
    }
    for (int32_t c = threadIdx.x % kWarp; c < store.width; c += kWarp) {
      float value = 0.0f;
      if (ids != nullptr) {
        const InitialRows& init = table.initial_rows;
        const uint32_t draw =
            initial_draw(init, ids[i], static_cast<uint32_t>(table.column_offset + c));
        value = kInitial == Distribution::kUniform ? scale_uniform(init, draw)
                                                   : scale_normal(init, draw);
      }
      store_element(store.type, to, c, value);
    }
  }
}

// Of several rows for one slot, the warp that claims the slot first writes its own.
__global__ void __launch_bounds__(kThreads)
    assign_kernel(RowStore store, const int64_t* __restrict__ slots, const char* __restrict__ rows,
                  int64_t n, uint32_t* __restrict__ claims) {
  const int64_t i = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) / kWarp;
  if (i >= n) return;
  const int64_t slot = slots[i];
  if (slot == kNoSlot) return;
  uint32_t claimed = 0;
  if (threadIdx.x % kWarp == 0) {
    const uint32_t bit = 1u << (slot & 31);
    claimed = atomicOr(&claims[slot >> 5], bit) & bit;
  }
  if (__shfl_sync(kAllLanes, claimed, 0)) return;
  const int32_t bytes = store.width * element_size(store.type);
  copy_row(store.row(slot), rows + i * bytes, bytes);
}

__device__ __forceinline__ void add_element(RowType type, char* row, int32_t c, float value) {
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

__global__ void __launch_bounds__(kThreads)
    add_kernel(RowStore store, const int64_t* __restrict__ slots, const char* __restrict__ rows,
               int64_t n) {
  const int64_t i = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) / kWarp;
  if (i >= n || slots[i] == kNoSlot) return;
  const char* from = rows + i * store.width * element_size(store.type);
  char* row = store.row(slots[i]);
  for (int32_t c = threadIdx.x % kWarp; c < store.width; c += kWarp) {
    add_element(store.type, row, c, load_element(store.type, from, c));
  }
}

__global__ void __launch_bounds__(kThreads)
    touch_kernel(TableView table, const int64_t* __restrict__ slots, int64_t n, Visit visit) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i < n && slots[i] != kNoSlot) touch(table, slots[i], visit, visit.given(i));
}

__global__ void __launch_bounds__(kThreads)
    erase_kernel(TableView table, const int64_t* __restrict__ slots, int64_t n) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= n || slots[i] == kNoSlot) return;
  const int64_t bucket = slots[i] / table.bucket_slots;
  store_l2(&table.digests[bucket * kBucketDigests + (slots[i] - bucket * table.bucket_slots)],
           kEmptyDigest);
}

}  // namespace

void gather(const TableView& table, const RowStore& store, const int64_t* ids, const int64_t* slots,
            int64_t n, char* rows, cudaStream_t stream) {
  if (n == 0 || store.width == 0) return;
  const int64_t warps = (n + kRowsOfWarp - 1) / kRowsOfWarp;
  const auto kernel = table.initial_rows.distribution == Distribution::kUniform
                          ? gather_kernel<Distribution::kUniform>
                          : gather_kernel<Distribution::kNormal>;
  kernel<<<grid_for(warps * kWarp), kThreads, 0, stream>>>(table, store, ids, slots, n, rows);
  HKV_CUDA_CHECK_LAUNCH();
}

void write_rows(const TableView& table, const int64_t* slots, const char* rows, int64_t n, bool add,
                uint32_t* claims, cudaStream_t stream) {
  if (n == 0) return;
  if (add) {
    add_kernel<<<grid_for(n * kWarp), kThreads, 0, stream>>>(table.rows, slots, rows, n);
  } else {
    assign_kernel<<<grid_for(n * kWarp), kThreads, 0, stream>>>(table.rows, slots, rows, n, claims);
  }
  HKV_CUDA_CHECK_LAUNCH();
}

void touch_slots(const TableView& table, const int64_t* slots, int64_t n, const Visit& visit,
                 cudaStream_t stream) {
  if (n == 0) return;
  touch_kernel<<<grid_for(n), kThreads, 0, stream>>>(table, slots, n, visit);
  HKV_CUDA_CHECK_LAUNCH();
}

void erase_slots(const TableView& table, const int64_t* slots, int64_t n, cudaStream_t stream) {
  if (n == 0) return;
  erase_kernel<<<grid_for(n), kThreads, 0, stream>>>(table, slots, n);
  HKV_CUDA_CHECK_LAUNCH();
}

}  // namespace torchrec_hkv::hash_table::cuda
