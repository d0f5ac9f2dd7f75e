// The index of a small batch in one launch: a cluster of 16 blocks sorts in distributed shared
// memory, one id per thread, then numbers distinct ids and prefixes. Evenly spread ids are sorted
// into buckets of equal ranges of keys, and within a bucket by comparison, which needs fewer
// barriers of the cluster. Otherwise a radix sort is used, least significant digit first.
#include <cooperative_groups.h>

#include <climits>

#include "common/cuda_check.h"
#include "tensor_train/cuda/contract/tensor_core.cuh"
#include "tensor_train/cuda/index/block_digits.cuh"
#include "tensor_train/cuda/index/index.cuh"

namespace torchrec_hkv::tensor_train::cuda {
namespace {

namespace cg = cooperative_groups;

constexpr int kBlocks = 16;
constexpr int kMaxThreads = 1024;
constexpr int kMaxBucket = 128;    // most items of a bucket that is sorted by comparison
constexpr int kMaxOffsets = 4096;  // most offsets that a block keeps in shared memory
static_assert(kBlocks * kMaxThreads == kSmallBatch);

struct Shared {
  uint64_t pairs[2][kMaxThreads];  // key << 32 | position, for this pass and the next
  BlockDigits digits;
  int32_t buckets[kDigits];  // number of this block's items in each bucket
  int32_t starts[kDigits];   // first place of this block's ids with each digit
  int32_t firsts[kDigits];   // first place of each digit
  int32_t sizes[kDigits];    // number of places of each digit
  int32_t warp_sums[kDigits / 32];
  int32_t heads[3];         // distinct ids, prefixes and slots that begin in this block
  int32_t heads_before[3];  // the same for earlier blocks
  int32_t heads_all[3];     // the same for all blocks
  int32_t warp_heads[3][kMaxWarps];
  int32_t offsets[kMaxOffsets + 1];
  uint64_t window[kMaxThreads + 2 * kMaxBucket];  // places of this block and those around it
};

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900

// A thread's id during the sort.
struct SmallSortItem {
  uint32_t key;
  int32_t position;
};

// Computes the places of the items of each digit or bucket, after all blocks have counted. Returns,
// to all threads of the cluster, whether a digit has more than `most` items.
__device__ bool place_digits(cg::cluster_group& cluster, Shared& shared, int32_t* counted,
                             int32_t most) {
  const int block = static_cast<int>(cluster.block_rank());
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
  int32_t all = 0, before = 0, sum = 0;
  if (thread < kDigits) {
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
      const int32_t count = cluster.map_shared_rank(counted, b)[thread];
      all += count;
      if (b < block) before += count;
    }
    sum = inclusive_scan(all);
    if (lane == 31) shared.warp_sums[warp] = sum;
  }
  const bool too_many = __syncthreads_or(all > most) != 0;
  if (thread < kDigits) {
    int32_t first = sum - all;
    for (int w = 0; w < warp; ++w) first += shared.warp_sums[w];
    shared.firsts[thread] = first;
    shared.sizes[thread] = all;
    shared.starts[thread] = first + before;
  }
  __syncthreads();
  return too_many;
}

// Moves items to the places of their digits in pairs[pass]. rank: number of earlier items of this
// block with the digit.
__device__ void move_items(cg::cluster_group& cluster, Shared& shared, int pass, uint32_t digit,
                           int rank, int per, bool here, const SmallSortItem& item) {
  if (here) {
    const int to = shared.starts[digit] + rank;
    const int to_block = to / per;
    cluster.map_shared_rank(&shared.pairs[pass][0], to_block)[to - to_block * per] =
        static_cast<uint64_t>(item.key) << 32 | static_cast<uint32_t>(item.position);
  }
  cluster.sync();
}

__device__ __forceinline__ SmallSortItem item_of(uint64_t pair) {
  return {static_cast<uint32_t>(pair >> 32), static_cast<int32_t>(static_cast<uint32_t>(pair))};
}

// Sorts the items of each bucket from pairs[0] into pairs[1], by comparing each with all items of
// its bucket, at most kMaxBucket.
__device__ void order_buckets(cg::cluster_group& cluster, Shared& shared, int per, int n,
                              uint32_t scale, bool here) {
  const int block = static_cast<int>(cluster.block_rank());
  const int thread = threadIdx.x;
  const int first = block * per - kMaxBucket;  // first place of the window
  uint64_t thread_pair = 0;
  if (here) thread_pair = shared.window[kMaxBucket + thread] = shared.pairs[0][thread];
  if (thread < 2 * kMaxBucket) {
    const int at = thread < kMaxBucket ? thread : thread + per;
    const int place = first + at;
    if (place >= 0 && place < n) {
      const int of = place / per;
      shared.window[at] = cluster.map_shared_rank(&shared.pairs[0][0], of)[place - of * per];
    }
  }
  __syncthreads();
  if (here) {
    const uint32_t bucket = __umulhi(item_of(thread_pair).key, scale);
    const int start = shared.firsts[bucket], size = shared.sizes[bucket];
    int smaller = 0;
#pragma unroll 8
    for (int i = 0; i < size; ++i)
      smaller += shared.window[start - first + i] < thread_pair ? 1 : 0;
    const int to = start + smaller;
    const int to_block = to / per;
    cluster.map_shared_rank(&shared.pairs[1][0], to_block)[to - to_block * per] = thread_pair;
  }
  cluster.sync();
}

// Sorts the items of the cluster by key, and equal keys by position. Item `at` of the order belongs
// to thread at % per of block at / per. here: whether the item exists. bits: number of bits of the
// keys. scale: 2^40 / number of keys, or 0. Returns the index of the sorted pairs.
__device__ int sort_items(cg::cluster_group& cluster, Shared& shared, int per, int n, int bits,
                          uint32_t scale, bool here, SmallSortItem& item) {
  static_assert(2 * kMaxBucket <= kDigits);
  BlockDigits& digits = shared.digits;
  if (scale != 0) {
    // Items arrive in any order and are sorted afterwards.
    const uint32_t bucket = here ? __umulhi(item.key, scale) : 0;
    const int rank = here ? atomicAdd(shared.buckets + bucket, 1) : 0;
    cluster.sync();
    if (!place_digits(cluster, shared, shared.buckets, kMaxBucket)) {
      move_items(cluster, shared, 0, bucket, rank, per, here, item);
      order_buckets(cluster, shared, per, n, scale, here);
      if (here) item = item_of(shared.pairs[1][threadIdx.x]);
      return 1;
    }
  }
  int pass = 1;
  int rank[1];
  for (int shift = 0; shift < bits; shift += 8) {
    pass ^= 1;
    const uint32_t digit = item.key >> shift & (kDigits - 1);
    count_digits<1>(&digits, {digit}, here, rank);
    cluster.sync();
    place_digits(cluster, shared, digits.all, INT_MAX);
    const int before = here ? digits.before[threadIdx.x / 32][digit] : 0;
    move_items(cluster, shared, pass, digit, before + rank[0], per, here, item);
    if (here) item = item_of(shared.pairs[pass][threadIdx.x]);
  }
  return pass;
}

// Returns the key at a sorted place of this block, or at the adjacent place of a neighbouring
// block.
__device__ __forceinline__ uint32_t key_at(cg::cluster_group& cluster, Shared& shared, int pass,
                                           int per, int thread) {
  const int block = static_cast<int>(cluster.block_rank());
  uint64_t* pairs = &shared.pairs[pass][0];
  if (thread < 0) return cluster.map_shared_rank(pairs, block - 1)[per - 1] >> 32;
  if (thread >= per) return cluster.map_shared_rank(pairs, block + 1)[0] >> 32;
  return pairs[thread] >> 32;
}

__device__ void number_distinct(cg::cluster_group& cluster, Shared& shared, const IndexInput& in,
                                const Index& index, int pass, int per, bool here,
                                SmallSortItem item) {
  const int block = static_cast<int>(cluster.block_rank());
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
  const int warps = blockDim.x / 32;
  const int n = static_cast<int>(in.batch.num_ids);
  const int at = block * per + thread;
  const auto outside = static_cast<uint32_t>(in.num_keys);
  const bool inside = here && item.key != outside;
  const uint32_t previous =
      here && at > 0 ? key_at(cluster, shared, pass, per, thread - 1) : outside;
  const uint32_t next =
      here && at + 1 < n ? key_at(cluster, shared, pass, per, thread + 1) : outside;
  KeyParts<uint32_t> parts = {-1, 0, 0};
  SortedEntry s = {};
  if (inside) {
    parts = parts_of(in, item.key);
    s.first = at == 0 || item.key != previous;
    s.first_of_prefix = s.first && (at == 0 || !parts.same_prefix(parts_of(in, previous)));
    s.repeats = !s.first || (at + 1 < n && next == item.key);
  }
  const unsigned ids = __ballot_sync(kAllLanes, s.first);
  const unsigned prefixes = __ballot_sync(kAllLanes, s.first_of_prefix);
  const unsigned slots = __ballot_sync(kAllLanes, s.first && s.repeats);
  if (lane == 0) {
    shared.warp_heads[0][warp] = __popc(ids);
    shared.warp_heads[1][warp] = __popc(prefixes);
    shared.warp_heads[2][warp] = __popc(slots);
  }
  __syncthreads();
  if (warp < 3) {
    const int32_t count = lane < warps ? shared.warp_heads[warp][lane] : 0;
    const int32_t sum = inclusive_scan(count);
    shared.warp_heads[warp][lane] = sum - count;
    if (lane == 31) shared.heads[warp] = sum;
  }
  // The places of rows are looked up while the other blocks arrive.
  cluster.barrier_arrive();
  int64_t bag = 0;
  if (here && in.batch.pooled) {
    const int64_t num_bags = in.batch.num_bags();
    if (num_bags <= kMaxOffsets) {
      int32_t low = 0, high = static_cast<int32_t>(num_bags);
      while (high - low > 1) {
        const int32_t middle = (low + high) >> 1;
        if (shared.offsets[middle] <= item.position) {
          low = middle;
        } else {
          high = middle;
        }
      }
      bag = low;
    } else {
      bag = bag_between(in.batch.offsets, 0, num_bags, item.position);
    }
  }
  const RowPosition place = here ? place_of(in, item.position, bag) : RowPosition{0, 0.0f};
  __syncwarp();
  cluster.barrier_wait();
  if (warp < 3) {  // numbers of all blocks, and of earlier blocks
    const int32_t count = lane < kBlocks ? cluster.map_shared_rank(shared.heads, lane)[warp] : 0;
    const int32_t sum = inclusive_scan(count);
    if (lane == block) shared.heads_before[warp] = sum - count;
    if (lane == 31) shared.heads_all[warp] = sum;
  }
  cluster.barrier_arrive();  // this block no longer reads the memory of others
  __syncthreads();
  const int32_t* const before = shared.heads_before;
  const unsigned up_to = lane == 31 ? kAllLanes : (2u << lane) - 1;
  s.at = at;
  s.position = item.position;
  s.distinct = before[0] + shared.warp_heads[0][warp] + __popc(ids & up_to) - 1;
  s.prefix = before[1] + shared.warp_heads[1][warp] + __popc(prefixes & up_to) - 1;
  s.slot = before[2] + shared.warp_heads[2][warp] + __popc(slots & up_to) - 1;
  if (block == 0 && thread == 0) {
    const int32_t* const all = shared.heads_all;
    write_counts(in, index, all[0], all[1], all[2]);
  }
  if (!here) return;
  if (inside) {
    write_sorted(in, index, s, parts, place.row, place.factor);
  } else {
    write_outside(index, at, item.position, place.row);
  }
}

// Starts loads of inputs for later use.
__device__ __forceinline__ void fetch_inputs(const IndexInput& in, int at, bool here) {
  auto fetch = [](const void* from) { asm volatile("prefetch.global.L1 [%0];" ::"l"(from)); };
  constexpr unsigned kStep = 64;
  if (here) fetch(in.batch.ids + at);
  if (threadIdx.x == 0) {
    fetch(in.batch.feature_tables);
    fetch(in.batch.feature_columns);
  }
  if (kStep * threadIdx.x < sizeof(TableCuda)) {
    fetch(reinterpret_cast<const char*>(in.tables) + kStep * threadIdx.x);
  }
}

#endif

__global__ void __launch_bounds__(kMaxThreads)
    index_cluster(IndexInput in, Index index, int per, int bits, uint32_t scale) {
  begin_dependent_kernel();
#if __CUDA_ARCH__ >= 900
  extern __shared__ char memory[];
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  cg::cluster_group cluster = cg::this_cluster();
  const int thread = threadIdx.x;
  const int n = static_cast<int>(in.batch.num_ids);
  const int at = static_cast<int>(cluster.block_rank()) * per + thread;
  const bool here = thread < per && at < n;
  const int64_t num_bags = in.batch.num_bags();
  const bool keeps = num_bags <= kMaxOffsets;
  fetch_inputs(in, at, here);
  if (keeps) {
    for (int i = thread; i <= num_bags; i += blockDim.x) {
      shared.offsets[i] = static_cast<int32_t>(in.batch.offsets[i]);
    }
  }
  clear_on_the_way(in);
  if (thread < kDigits) shared.buckets[thread] = 0;
  __syncthreads();
  SmallSortItem item = {0xffffffffu, at};
  if (here) {
    int64_t bag;
    if (in.batch.num_features == 1) {
      bag = 0;  // any bag will do: only its table is needed
    } else if (keeps) {
      int32_t low = 0, high = static_cast<int32_t>(num_bags);
      while (high - low > 1) {
        const int32_t middle = (low + high) >> 1;
        if (shared.offsets[middle] <= at) {
          low = middle;
        } else {
          high = middle;
        }
      }
      bag = low;
    } else {
      bag = bag_between(in.batch.offsets, 0, num_bags, at);
    }
    item.key = static_cast<uint32_t>(key_of(in, in.batch.ids[at], bag));
  }
  const int pass = sort_items(cluster, shared, per, n, bits, scale, here, item);
  number_distinct(cluster, shared, in, index, pass, per, here, item);
  __syncwarp();
  cluster.barrier_wait();  // no block leaves while others read its memory
#endif
}

}  // namespace

void index_small(const IndexInput& in, const Index& index, cudaStream_t stream) {
  const int n = static_cast<int>(in.batch.num_ids);
  const int per = (n + kBlocks - 1) / kBlocks;
  const int threads = per <= kDigits ? kDigits : (per + 31) / 32 * 32;
  int bits = 1;
  while ((uint64_t{1} << bits) <= in.num_keys) ++bits;
  const uint64_t scale = (uint64_t{1} << 40) / (in.num_keys + 1);
  launch_dependent(index_cluster, {dim3(kBlocks), threads, sizeof(Shared), kBlocks}, stream, in,
                   index, per, bits, scale <= 0xffffffffu ? static_cast<uint32_t>(scale) : 0u);
}

}  // namespace torchrec_hkv::tensor_train::cuda
