#include <algorithm>

#include "common/cuda_check.h"
#include "hash_table/bucket_cuda.cuh"
#include "hash_table/grow.h"

namespace torchrec_hkv::hash_table::cuda {
namespace {

// Warps of one launch; each goes on with the next piece of work until there is none.
constexpr int64_t kMostWarps = int64_t{1} << 24;

// The work of a warp: item, item + stride, ...
__device__ __forceinline__ int64_t first_item() {
  return (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) / kWarp;
}
__device__ __forceinline__ int64_t item_stride() {
  return static_cast<int64_t>(gridDim.x) * (kThreads / kWarp);
}
unsigned grid_for_items(int64_t items) { return grid_for(std::min(items, kMostWarps) * kWarp); }

// All lanes of a warp copy one vector, in the widest pieces that its size allows.
template <typename Piece>
__device__ __forceinline__ void copy_pieces(char* to, const char* from, int64_t bytes) {
  for (int64_t b = threadIdx.x % kWarp * static_cast<int64_t>(sizeof(Piece)); b < bytes;
       b += kWarp * static_cast<int64_t>(sizeof(Piece))) {
    *reinterpret_cast<Piece*>(to + b) = *reinterpret_cast<const Piece*>(from + b);
  }
}
__device__ __forceinline__ void copy_vector(const RowStore& store, int64_t from, int64_t to) {
  const int64_t bytes = store.bytes();
  char* target = store.at(to, kNoFrame);
  const char* source = store.at(from, kNoFrame);
  if (bytes % 16 == 0) {
    copy_pieces<uint4>(target, source, bytes);
  } else if (bytes % 4 == 0) {
    copy_pieces<uint32_t>(target, source, bytes);
  } else {
    copy_pieces<uint16_t>(target, source, bytes);
  }
}

// All but the digest; all lanes of a warp.
__device__ void move_entry(const TableView& table, int64_t from, int64_t to) {
  if (threadIdx.x % kWarp == 0) {
    table.ids[to] = table.ids[from];
    table.last_steps[to] = table.last_steps[from];
    if (table.scores != nullptr) table.scores[to] = table.scores[from];
  }
  copy_vector(table.rows, from, to);
  copy_vector(table.states, from, to);
}

__device__ __forceinline__ uint16_t* digest_at(const TableView& table, int64_t slot) {
  const int64_t bucket = slot / table.bucket_slots;
  return &table.digests[bucket * kBucketDigests + (slot - bucket * table.bucket_slots)];
}

// One warp a position of a bucket. No other warp reads or writes this position of the bucket or of
// the two that it is split into.
__global__ void __launch_bounds__(kThreads) split_kernel(TableView table, SplitRange range) {
  const int lane = threadIdx.x % kWarp;
  const int64_t items = static_cast<int64_t>(range.end - range.begin) * kBucketDigests;
  for (int64_t item = first_item(); item < items; item += item_stride()) {
    const uint32_t bucket = range.begin + static_cast<uint32_t>(item / kBucketDigests);
    const int position = static_cast<int>(item % kBucketDigests);
    uint16_t* from = table.digests + static_cast<int64_t>(bucket) * kBucketDigests + position;
    uint16_t* to = table.digests + int64_t{2} * bucket * kBucketDigests + position;
    if (position >= table.bucket_slots) {
      if (lane < 2) to[lane * kBucketDigests] = kClosedDigest;
      continue;
    }
    const uint16_t digest = *from;
    const int64_t slot = static_cast<int64_t>(bucket) * table.bucket_slots + position;
    const int64_t low = int64_t{2} * bucket * table.bucket_slots + position;
    int side = -1;  // which of the two it goes to
    if (digest != kEmptyDigest) {
      const BucketChoice choice = choose_buckets(table.ids[slot], table.num_buckets * 2);
      side = static_cast<int>(split_target(choice, bucket) & 1u);
      const int64_t target = low + static_cast<int64_t>(side) * table.bucket_slots;
      if (target != slot) move_entry(table, slot, target);
    }
    __syncwarp();  // bucket 0 is its own target: all lanes have read before this
    if (lane < 2) {
      to[lane * kBucketDigests] = lane == side ? digest : kEmptyDigest;
      if (lane != side) {
        table.last_steps[low + static_cast<int64_t>(lane) * table.bucket_slots] = kFreeStep;
      }
    }
  }
}

// astray: their number, and the slots of as many as there is room for. One thread a slot.
__global__ void __launch_bounds__(kThreads) list_astray_kernel(TableView table, int64_t* astray) {
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t slot = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
       slot < table.num_slots; slot += stride) {
    if (*digest_at(table, slot) == kEmptyDigest) continue;
    const auto bucket = static_cast<uint32_t>(slot / table.bucket_slots);
    if (!is_astray(table.ids[slot], bucket, table.num_buckets)) continue;
    const unsigned long long at = atomicAdd(reinterpret_cast<unsigned long long*>(astray), 1ull);
    if (at < kAstrayRoom) astray[1 + at] = slot;
  }
}

// The first free position of a bucket, or -1; the same answer in all lanes.
__device__ __forceinline__ int free_position(const TableView& table, uint32_t bucket) {
  const uint16_t* line = digest_line(table, bucket);
  const uint32_t pair = load_l2(reinterpret_cast<const uint32_t*>(line) + threadIdx.x % kWarp);
  const unsigned even = __ballot_sync(kAllLanes, (pair & 0xffff) == kEmptyDigest);
  if (even) return 2 * (__ffs(static_cast<int>(even)) - 1);
  const unsigned odd = __ballot_sync(kAllLanes, pair >> 16 == kEmptyDigest);
  return odd ? 2 * __ffs(static_cast<int>(odd)) - 1 : -1;
}

// One warp an entry. The slots that they leave stay taken until free_kernel: grow.h says why each
// finds a free one all the same.
__global__ void __launch_bounds__(kThreads)
    settle_kernel(TableView table, const int64_t* __restrict__ astray, int64_t n) {
  const int64_t i = first_item();
  if (i >= n) return;
  const int64_t from = astray[i];
  const BucketChoice choice = choose_buckets(table.ids[from], table.num_buckets);
  int64_t to = kNoSlot;
  for (uint32_t bucket = choice.first; to == kNoSlot;
       bucket = bucket == choice.first ? choice.second : choice.first) {
    const int position = free_position(table, bucket);
    if (position < 0) continue;
    const int64_t slot = static_cast<int64_t>(bucket) * table.bucket_slots + position;
    int mine = 0;
    if (threadIdx.x % kWarp == 0) {
      mine = atomicCAS(reinterpret_cast<unsigned short*>(digest_at(table, slot)), kEmptyDigest,
                       choice.digest) == kEmptyDigest;
    }
    if (__shfl_sync(kAllLanes, mine, 0)) to = slot;
  }
  move_entry(table, from, to);
}

__global__ void __launch_bounds__(kThreads)
    free_kernel(TableView table, const int64_t* __restrict__ astray, int64_t n) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= n) return;
  *digest_at(table, astray[i]) = kEmptyDigest;
  table.last_steps[astray[i]] = kFreeStep;
}

__global__ void __launch_bounds__(kThreads) count_kernel(TableView table, int64_t* number) {
  const int64_t vectors = static_cast<int64_t>(table.num_buckets) * kLineVectors;
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kThreads;
  const uint4* digests = reinterpret_cast<const uint4*>(table.digests);
  int64_t entries = 0;
  for (int64_t v = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; v < vectors;
       v += stride) {
    const uint4 vector = load_vector_once(digests + v);
    entries += kVectorDigests - __popc(match_vector(vector, kEmptyDigest)) -
               __popc(match_vector(vector, kClosedDigest));
  }
  for (int offset = kWarp / 2; offset; offset /= 2) {
    entries += __shfl_down_sync(kAllLanes, entries, offset);
  }
  if (threadIdx.x % kWarp == 0 && entries != 0) {
    atomicAdd(reinterpret_cast<unsigned long long*>(number),
              static_cast<unsigned long long>(entries));
  }
}

}  // namespace

void split_buckets(const TableView& table, int64_t* astray, cudaStream_t stream) {
  for (SplitRange range = SplitRange::first(table.num_buckets);; range = range.next()) {
    const int64_t items = static_cast<int64_t>(range.end - range.begin) * kBucketDigests;
    if (items > 0) {
      split_kernel<<<grid_for_items(items), kThreads, 0, stream>>>(table, range);
      HKV_CUDA_CHECK_LAUNCH();
    }
    if (range.is_last()) break;
  }
  TableView doubled = table;
  doubled.num_buckets *= 2;
  doubled.num_slots *= 2;
  for (int64_t left = 1; left > 0;) {
    HKV_CUDA_CHECK(cudaMemsetAsync(astray, 0, sizeof(int64_t), stream));
    list_astray_kernel<<<grid_for(std::min(doubled.num_slots, kMostWarps)), kThreads, 0, stream>>>(
        doubled, astray);
    HKV_CUDA_CHECK_LAUNCH();
    int64_t number = 0;
    HKV_CUDA_CHECK(
        cudaMemcpyAsync(&number, astray, sizeof(number), cudaMemcpyDeviceToHost, stream));
    HKV_CUDA_CHECK(cudaStreamSynchronize(stream));
    const int64_t listed = std::min(number, kAstrayRoom);
    left = number - listed;
    if (listed == 0) break;
    settle_kernel<<<grid_for(listed * kWarp), kThreads, 0, stream>>>(doubled, astray + 1, listed);
    HKV_CUDA_CHECK_LAUNCH();
    free_kernel<<<grid_for(listed), kThreads, 0, stream>>>(doubled, astray + 1, listed);
    HKV_CUDA_CHECK_LAUNCH();
  }
  HKV_CUDA_CHECK(cudaStreamSynchronize(stream));
}

void count_entries(const TableView& table, int64_t* number, cudaStream_t stream) {
  const int64_t vectors = static_cast<int64_t>(table.num_buckets) * kLineVectors;
  constexpr int64_t kMostThreads = int64_t{1} << 20;
  count_kernel<<<grid_for(std::min(vectors, kMostThreads)), kThreads, 0, stream>>>(table, number);
  HKV_CUDA_CHECK_LAUNCH();
}

}  // namespace torchrec_hkv::hash_table::cuda
