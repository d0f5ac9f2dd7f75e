// Copies rows from host memory in the order of their addresses.

#include "common/cuda_check.h"
#include "common/dependent_launch.cuh"
#include "common/scan.cuh"
#include "serving/host_rows.cuh"

namespace torchrec_hkv::serving::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kScanThreads = 1024;
// For fewer rows, ordering takes longer than it saves.
constexpr int64_t kFewRows = 1 << 13;
// Limit of the bytes that a lookup copies; it reads further rows in place.
constexpr int64_t kMaxCopiedBytes = int64_t{256} << 20;

constexpr size_t aligned(size_t bytes) { return (bytes + 15) / 16 * 16; }

// Replaces counts by the positions of the stretches' first rows. One block.
__global__ void __launch_bounds__(kScanThreads) scan_kernel(const HostRowList rows) {
  using Scan = BlockScan<uint32_t, kScanThreads>;
  constexpr uint32_t kOwn = kMaxBins / kScanThreads;
  __shared__ Scan::Storage storage;
  uint32_t* const mine = rows.counts + threadIdx.x * kOwn;
  uint32_t all = 0, of_block = 0;
#pragma unroll
  for (uint32_t k = 0; k < kOwn; ++k) all += mine[k];
  uint32_t begin = Scan::before(storage, all, of_block);
#pragma unroll
  for (uint32_t k = 0; k < kOwn; ++k) {
    const uint32_t count = mine[k];
    mine[k] = begin;
    begin += count;
  }
}

__device__ __forceinline__ uint32_t number_of(const HostRowList& rows) {
  return min(*rows.number, rows.capacity);
}

__global__ void __launch_bounds__(kThreads) order_kernel(const HostRowList rows) {
  const uint32_t number = number_of(rows);
  for (uint32_t i = blockIdx.x * kThreads + threadIdx.x; i < number; i += gridDim.x * kThreads) {
    rows.ordered[atomicAdd(&rows.counts[rows.bins[i]], 1u)] = rows.listed[i];
  }
}

constexpr int kTogether = 4;  // rows that a warp has in flight

template <typename Word>
__device__ __forceinline__ void copy_rows(const HostRow (&of)[kTogether], char* to,
                                          int64_t slot_bytes) {
  constexpr uint32_t kBytes = sizeof(Word);
  uint32_t longest = 0;
#pragma unroll
  for (int r = 0; r < kTogether; ++r) longest = max(longest, of[r].bytes);
  for (uint32_t at = threadIdx.x % 32 * kBytes; at < longest; at += 32 * kBytes) {
    Word words[kTogether];
#pragma unroll
    for (int r = 0; r < kTogether; ++r) {
      if (at < of[r].bytes) words[r] = __ldcs(reinterpret_cast<const Word*>(of[r].row + at));
    }
#pragma unroll
    for (int r = 0; r < kTogether; ++r) {
      if (at < of[r].bytes) *reinterpret_cast<Word*>(to + r * slot_bytes + at) = words[r];
    }
  }
}

// Neighbouring rows are copied by different warps, so that the rows in flight belong to few
// stretches.
__global__ void __launch_bounds__(kThreads) copy_kernel(const HostRowList rows) {
  const uint32_t number = number_of(rows), lane = threadIdx.x % 32;
  const uint32_t step = gridDim.x * (kThreads / 32) * kTogether;
  for (uint32_t first = (blockIdx.x * kThreads + threadIdx.x) / 32 * kTogether; first < number;
       first += step) {
    HostRow of[kTogether];
    bool in_vectors = true;
#pragma unroll
    for (int r = 0; r < kTogether; ++r) {
      of[r] = first + r < number ? rows.ordered[first + r] : HostRow{nullptr, 0, 0};
      in_vectors = in_vectors && (reinterpret_cast<uintptr_t>(of[r].row) | of[r].bytes) % 16 == 0;
    }
    char* const to = rows.copies + int64_t{first} * rows.slot_bytes;
    if (in_vectors) {
      copy_rows<uint4>(of, to, rows.slot_bytes);
    } else {  // rows are multiples of 4 bytes
      copy_rows<uint32_t>(of, to, rows.slot_bytes);
    }
#pragma unroll
    for (int r = 0; r < kTogether; ++r) {
      if (lane == r && of[r].row != nullptr) rows.found[of[r].position] = to + r * rows.slot_bytes;
    }
  }
}

}  // namespace

HostRowList HostRowList::in(const Staging& staging, size_t* bytes) {
  HostRowList made{};
  made.slot_bytes = static_cast<int64_t>(aligned(static_cast<size_t>(staging.row_bytes)));
  made.found = staging.found;
  const int64_t max_copies = kMaxCopiedBytes / made.slot_bytes;
  if (staging.host_bytes > 0 && staging.num_found >= kFewRows && staging.num_found <= UINT32_MAX) {
    made.capacity = static_cast<uint32_t>(min(staging.num_found, max_copies));
  }
  while ((staging.host_bytes - 1) >> made.shift >= kMaxBins) ++made.shift;
  char* at = staging.memory;
  const auto take = [&](size_t size) {
    char* const begin = at;
    at += aligned(size);
    return begin;
  };
  const size_t n = made.capacity;
  made.counts = reinterpret_cast<uint32_t*>(take((kMaxBins + 1) * sizeof(uint32_t)));
  made.number = made.counts + kMaxBins;
  made.listed = reinterpret_cast<HostRow*>(take(n * sizeof(HostRow)));
  made.ordered = reinterpret_cast<HostRow*>(take(n * sizeof(HostRow)));
  made.bins = reinterpret_cast<uint16_t*>(take(n * sizeof(uint16_t)));
  made.copies = take(n * static_cast<size_t>(made.slot_bytes));
  *bytes = made.capacity == 0 ? 0 : static_cast<size_t>(at - staging.memory);
  return made;
}

size_t staging_bytes(const Staging& staging) {
  size_t bytes = 0;
  HostRowList::in(staging, &bytes);
  return bytes;
}

void begin_list(const HostRowList& rows, cudaStream_t stream) {
  if (rows.capacity == 0) return;
  const size_t bytes = (kMaxBins + 1) * sizeof(uint32_t);
  HKV_CUDA_CHECK(cudaMemsetAsync(rows.counts, 0, bytes, stream));
}

void copy_listed(const HostRowList& rows, cudaStream_t stream) {
  if (rows.capacity == 0) return;
  const unsigned most = multiprocessors();
  const auto needed = [&](uint32_t of_block) { return (rows.capacity + of_block - 1) / of_block; };
  scan_kernel<<<1, kScanThreads, 0, stream>>>(rows);
  HKV_CUDA_CHECK_LAUNCH();
  order_kernel<<<min(needed(kThreads), most), kThreads, 0, stream>>>(rows);
  HKV_CUDA_CHECK_LAUNCH();
  // Warps on half of the multiprocessors saturate the link. More rows in flight would touch pages
  // that are further apart.
  copy_kernel<<<min(needed(kThreads / 32 * kTogether), (most + 1) / 2), kThreads, 0, stream>>>(
      rows);
  HKV_CUDA_CHECK_LAUNCH();
}

}  // namespace torchrec_hkv::serving::cuda
