// Copies the hot rows of read-only tables to GPU memory, and finds the numbers of rows.

#include "common/cuda_check.h"
#include "serving/find.cuh"
#include "serving/kernels_cuda.h"

namespace torchrec_hkv::serving::cuda {
namespace {

constexpr int kCopyThreads = 256;
// Enough blocks to saturate the link to host memory. Lookups run at the same time.
constexpr int64_t kMaxCopyBlocks = 128;

// A warp copies the 32 rows of a hot word, one after the other. Word: 4 or 16 bytes of a row.
template <typename Word>
__global__ void __launch_bounds__(kCopyThreads) copy_hot_rows_kernel(HotRowCopy call) {
  const int lane = threadIdx.x % 32;
  const int64_t words = (call.rows + kHotMaskRows - 1) / kHotMaskRows;
  const int64_t pieces = call.row_bytes / static_cast<int64_t>(sizeof(Word));
  const int64_t warps = int64_t{gridDim.x} * kCopyThreads / 32;
  for (int64_t at = (int64_t{blockIdx.x} * kCopyThreads + threadIdx.x) / 32; at < words;
       at += warps) {
    const HotMaskWord word = call.words[at];
    auto* to = reinterpret_cast<Word*>(call.to) + int64_t{word.before} * pieces;
    for (uint32_t remaining = word.mask; remaining != 0; remaining &= remaining - 1) {
      const int64_t row = at * kHotMaskRows + __ffs(static_cast<int>(remaining)) - 1;
      const auto* const from = reinterpret_cast<const Word*>(call.from) + row * pieces;
      for (int64_t piece = lane; piece < pieces; piece += 32) to[piece] = __ldcs(from + piece);
      to += pieces;
    }
  }
}

__global__ void __launch_bounds__(kCopyThreads) find_row_numbers_kernel(RowNumbers call) {
  const int64_t i = int64_t{blockIdx.x} * kCopyThreads + threadIdx.x;
  if (i >= call.n) return;
  int64_t row = -1;
  const BucketMatch found = find_in_layer(call.layer, call.ids[i], &row);
  call.rows[i] = found == BucketMatch::kFound ? row : -1;
}

}  // namespace

void find_row_numbers(const RowNumbers& call, cudaStream_t stream) {
  if (call.n == 0) return;
  const auto blocks = static_cast<unsigned>((call.n + kCopyThreads - 1) / kCopyThreads);
  find_row_numbers_kernel<<<blocks, kCopyThreads, 0, stream>>>(call);
  HKV_CUDA_CHECK_LAUNCH();
}

void copy_hot_rows(const HotRowCopy& call, cudaStream_t stream) {
  if (call.rows == 0) return;
  const int64_t wanted = (call.rows + kCopyThreads - 1) / kCopyThreads;
  const auto blocks = static_cast<unsigned>(wanted < kMaxCopyBlocks ? wanted : kMaxCopyBlocks);
  if (call.row_bytes % 16 == 0) {
    copy_hot_rows_kernel<uint4><<<blocks, kCopyThreads, 0, stream>>>(call);
  } else {  // rows are multiples of 4 bytes
    copy_hot_rows_kernel<uint32_t><<<blocks, kCopyThreads, 0, stream>>>(call);
  }
  HKV_CUDA_CHECK_LAUNCH();
}

}  // namespace torchrec_hkv::serving::cuda
