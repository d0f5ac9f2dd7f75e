#include <algorithm>
#include <vector>

#include "common/cuda_check.h"
#include "hash_table/cuda/bucket.cuh"
#include "hash_table/grow.h"

namespace torchrec_hkv::hash_table::cuda {
namespace {

// Warps of one launch; each processes items until there are no more.
constexpr int64_t kMaxWarps = int64_t{1} << 24;

// A warp processes first_item(), first_item() + item_stride(), ...
__device__ __forceinline__ int64_t first_item() {
  return (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) / kWarp;
}
__device__ __forceinline__ int64_t item_stride() {
  return static_cast<int64_t>(gridDim.x) * (kThreads / kWarp);
}
unsigned grid_for_items(int64_t items) { return grid_for(min(items, kMaxWarps) * kWarp); }

// Copies one vector by all lanes of a warp, in the widest pieces that its size allows.
template <typename Word>
__device__ __forceinline__ void copy_words(char* to, const char* from, int64_t bytes) {
  for (int64_t b = threadIdx.x % kWarp * static_cast<int64_t>(sizeof(Word)); b < bytes;
       b += kWarp * static_cast<int64_t>(sizeof(Word))) {
    *reinterpret_cast<Word*>(to + b) = *reinterpret_cast<const Word*>(from + b);
  }
}
__device__ __forceinline__ void copy_vector(const RowStore& store, int64_t from, int64_t to) {
  const int64_t bytes = store.bytes();
  char* target = store.at(to, kNoFrame);
  const char* source = store.at(from, kNoFrame);
  if (bytes % 16 == 0) {
    copy_words<uint4>(target, source, bytes);
  } else if (bytes % 4 == 0) {
    copy_words<uint32_t>(target, source, bytes);
  } else {
    copy_words<uint16_t>(target, source, bytes);
  }
}

// Copies all but the digest, by all lanes of a warp.
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

// One warp for each position of a bucket. No other warp accesses this position of the bucket or of
// the two new buckets.
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
    int side = -1;  // which of the two buckets the entry goes to
    if (digest != kEmptyDigest) {
      const BucketChoice choice = choose_buckets(table.ids[slot], table.num_buckets * 2);
      side = static_cast<int>(split_target(choice, bucket) & 1u);
      const int64_t target = low + static_cast<int64_t>(side) * table.bucket_slots;
      if (target != slot) move_entry(table, slot, target);
    }
    __syncwarp();  // bucket 0 is its own target, so all lanes must have read it before
    if (lane < 2) {
      to[lane * kBucketDigests] = lane == side ? digest : kEmptyDigest;
      if (lane != side) {
        table.last_steps[low + static_cast<int64_t>(lane) * table.bucket_slots] = kFreeStep;
      }
    }
  }
}

// misplaced: the number of misplaced entries in slots [begin, end), and as many of their slots as
// there is room for. One thread for each slot.
__global__ void __launch_bounds__(kThreads)
    list_misplaced_kernel(TableView table, int64_t begin, int64_t end, int64_t* misplaced) {
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t slot = begin + static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; slot < end;
       slot += stride) {
    if (*digest_at(table, slot) == kEmptyDigest) continue;
    const auto bucket = static_cast<uint32_t>(slot / table.bucket_slots);
    if (!is_misplaced(table.ids[slot], bucket, table.num_buckets)) continue;
    const unsigned long long at = atomicAdd(reinterpret_cast<unsigned long long*>(misplaced), 1ull);
    if (at < kMisplacedCapacity) misplaced[1 + at] = slot;
  }
}

// The free slots of a bucket, one bit each; the same result in all lanes of a warp.
__device__ __forceinline__ uint64_t free_positions(const TableView& table, uint32_t bucket) {
  const uint16_t* line = digest_line(table, bucket);
  const int lane = threadIdx.x % kWarp;
  const uint64_t low = __ballot_sync(
      kAllLanes, reinterpret_cast<const volatile uint16_t*>(line)[lane] == kEmptyDigest);
  const uint64_t high = __ballot_sync(
      kAllLanes, reinterpret_cast<const volatile uint16_t*>(line)[kWarp + lane] == kEmptyDigest);
  return high << 32 | low;
}

// One warp moves one entry after the other, as on a CPU: they are few, and their slots must be
// deterministic. grow.h explains why each finds a free slot.
__global__ void __launch_bounds__(kWarp)
    move_misplaced_kernel(TableView table, const int64_t* __restrict__ misplaced, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    const int64_t from = misplaced[i];
    const BucketChoice choice = choose_buckets(table.ids[from], table.num_buckets);
    const uint64_t free_first = free_positions(table, choice.first);
    const uint64_t free_second = free_positions(table, choice.second);
    const bool first =
        prefers_first(table.bucket_slots, __popcll(free_first), __popcll(free_second));
    const uint64_t free = first ? free_first : free_second;
    const int64_t to =
        static_cast<int64_t>(first ? choice.first : choice.second) * table.bucket_slots +
        __ffsll(static_cast<long long>(free)) - 1;
    move_entry(table, from, to);
    __syncwarp();
    if (threadIdx.x == 0) {
      *digest_at(table, to) = choice.digest;
      *digest_at(table, from) = kEmptyDigest;
      table.last_steps[from] = kFreeStep;
    }
    __syncwarp();
  }
}

__global__ void __launch_bounds__(kThreads) count_kernel(TableView table, int64_t* number) {
  const int64_t vectors = static_cast<int64_t>(table.num_buckets) * kLineVectors;
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kThreads;
  const uint4* digests = reinterpret_cast<const uint4*>(table.digests.get());
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

void split_buckets(const TableView& table, int64_t* misplaced, cudaStream_t stream) {
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
  std::vector<int64_t> slots(kMisplacedCapacity + 1);
  const auto list_between = [&](int64_t begin, int64_t end) {
    HKV_CUDA_CHECK(cudaMemsetAsync(misplaced, 0, sizeof(int64_t), stream));
    list_misplaced_kernel<<<grid_for(min(end - begin, kMaxWarps)), kThreads, 0, stream>>>(
        doubled, begin, end, misplaced);
    HKV_CUDA_CHECK_LAUNCH();
    HKV_CUDA_CHECK(cudaMemcpyAsync(slots.data(), misplaced, slots.size() * sizeof(int64_t),
                                   cudaMemcpyDeviceToHost, stream));
    HKV_CUDA_CHECK(cudaStreamSynchronize(stream));
    return slots[0];
  };
  for (int64_t begin = 0, end = doubled.num_slots; begin < doubled.num_slots;) {
    const int64_t number = list_between(begin, end);
    if (number > kMisplacedCapacity) {  // more than the list has room for
      end = begin + (end - begin) / 2;
      continue;
    }
    if (number > 0) {
      std::sort(slots.begin() + 1, slots.begin() + 1 + number);
      HKV_CUDA_CHECK(cudaMemcpyAsync(misplaced + 1, slots.data() + 1, number * sizeof(int64_t),
                                     cudaMemcpyHostToDevice, stream));
      move_misplaced_kernel<<<1, kWarp, 0, stream>>>(doubled, misplaced + 1, number);
      HKV_CUDA_CHECK_LAUNCH();
      HKV_CUDA_CHECK(cudaStreamSynchronize(stream));  // before `slots` is overwritten
    }
    begin = end;
    end = doubled.num_slots;
  }
  HKV_CUDA_CHECK(cudaStreamSynchronize(stream));
}

void count_entries(const TableView& table, int64_t* number, cudaStream_t stream) {
  const int64_t vectors = static_cast<int64_t>(table.num_buckets) * kLineVectors;
  constexpr int64_t kMaxThreads = int64_t{1} << 20;
  count_kernel<<<grid_for(min(vectors, kMaxThreads)), kThreads, 0, stream>>>(table, number);
  HKV_CUDA_CHECK_LAUNCH();
}

}  // namespace torchrec_hkv::hash_table::cuda
