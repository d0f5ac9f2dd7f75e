// The index of a small batch in one launch: a cluster of 16 blocks sorts in distributed shared
// memory, one id a thread, least significant digits first, then numbers distinct ids and prefixes.
#include <cooperative_groups.h>

#include "common/cuda_check.h"
#include "tensor_train/block_digits.cuh"
#include "tensor_train/index.cuh"
#include "tensor_train/tensor_core.cuh"

namespace torchrec_hkv::tensor_train::cuda {
namespace {

namespace cg = cooperative_groups;

constexpr int kBlocks = 16;
constexpr int kMostThreads = 1024;
constexpr int kMostOffsets = 4096;  // that a block keeps in shared memory
static_assert(kBlocks * kMostThreads == kSmallBatch);

struct Shared {
  uint64_t pairs[2][kMostThreads];  // key << 32 | position, of this pass and the next
  BlockDigits digits;
  int32_t starts[kDigits];  // where this block's ids of a digit go
  int32_t warp_sums[kDigits / 32];
  int32_t heads[3];  // distinct ids, prefixes and slots that begin in this block
  int32_t warp_heads[3][kMostWarps];
  int32_t offsets[kMostOffsets + 1];
};

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900

// A thread's id on its way through the sort.
struct Item {
  uint32_t key;
  int32_t position;
};

// One pass: sorts by 8 bits of the key, stable. Item `at` of the order belongs to thread at % per
// of block at / per; it exists where `here`.
__device__ void sort_pass(cg::cluster_group& cluster, Shared& shared, int pass, int shift, int per,
                          bool here, Item& item) {
  const int block = static_cast<int>(cluster.block_rank());
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
  const uint32_t digit = item.key >> shift & (kDigits - 1);
  const int rank = count_digits(shared.digits, digit, here);
  cluster.sync();
  int32_t all = 0, before = 0, sum = 0;
  if (thread < kDigits) {
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
      const int32_t count = cluster.map_shared_rank(shared.digits.all, b)[thread];
      all += count;
      if (b < block) before += count;
    }
    sum = inclusive_sum(all);
    if (lane == 31) shared.warp_sums[warp] = sum;
  }
  __syncthreads();
  if (thread < kDigits) {
    int32_t start = sum - all + before;
    for (int w = 0; w < warp; ++w) start += shared.warp_sums[w];
    shared.starts[thread] = start;
  }
  __syncthreads();
  if (here) {
    const int to = shared.starts[digit] + shared.digits.before[warp][digit] + rank;
    const int to_block = to / per;
    cluster.map_shared_rank(&shared.pairs[pass][0], to_block)[to - to_block * per] =
        static_cast<uint64_t>(item.key) << 32 | static_cast<uint32_t>(item.position);
  }
  cluster.sync();
  if (here) {
    const uint64_t pair = shared.pairs[pass][thread];
    item = {static_cast<uint32_t>(pair >> 32), static_cast<int32_t>(static_cast<uint32_t>(pair))};
  }
}

// The key of a sorted place of this block, or of the last and first of its neighbours.
__device__ __forceinline__ uint32_t key_at(cg::cluster_group& cluster, Shared& shared, int pass,
                                           int per, int thread) {
  const int block = static_cast<int>(cluster.block_rank());
  uint64_t* pairs = &shared.pairs[pass][0];
  if (thread < 0) return cluster.map_shared_rank(pairs, block - 1)[per - 1] >> 32;
  if (thread >= per) return cluster.map_shared_rank(pairs, block + 1)[0] >> 32;
  return pairs[thread] >> 32;
}

__device__ void number_distinct(cg::cluster_group& cluster, Shared& shared, const IndexInput& in,
                                const Index& index, int pass, int per, bool here, Item item) {
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
  KeyParts parts = {-1, 0, 0};
  Sorted s = {};
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
    const int32_t sum = inclusive_sum(count);
    shared.warp_heads[warp][lane] = sum - count;
    if (lane == 31) shared.heads[warp] = sum;
  }
  cluster.sync();
  int32_t before[3] = {0, 0, 0}, all[3] = {0, 0, 0};
#pragma unroll
  for (int b = 0; b < kBlocks; ++b) {
    const int32_t* heads = cluster.map_shared_rank(shared.heads, b);
#pragma unroll
    for (int i = 0; i < 3; ++i) {
      const int32_t count = heads[i];
      all[i] += count;
      if (b < block) before[i] += count;
    }
  }
  const unsigned up_to = lane == 31 ? kAllLanes : (2u << lane) - 1;
  s.at = at;
  s.position = item.position;
  s.distinct = before[0] + shared.warp_heads[0][warp] + __popc(ids & up_to) - 1;
  s.prefix = before[1] + shared.warp_heads[1][warp] + __popc(prefixes & up_to) - 1;
  s.slot = before[2] + shared.warp_heads[2][warp] + __popc(slots & up_to) - 1;
  if (block == 0 && thread == 0) write_counts(in, index, all[0], all[1], all[2]);
  if (!here) return;
  int64_t bag = 0;
  if (in.batch.pooled) {
    const int64_t num_bags = in.batch.num_bags();
    if (num_bags <= kMostOffsets) {
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
  const Place place = place_of(in, item.position, bag);
  if (inside) {
    write_sorted(in, index, s, parts, place.row, place.factor);
  } else {
    write_outside(index, at, item.position, place.row);
  }
}

#endif

__global__ void __launch_bounds__(kMostThreads)
    index_cluster(IndexInput in, Index index, int per, int bits) {
  enter_chain();
#if __CUDA_ARCH__ >= 900
  extern __shared__ char memory[];
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  cg::cluster_group cluster = cg::this_cluster();
  const int thread = threadIdx.x;
  const int n = static_cast<int>(in.batch.num_ids);
  const int at = static_cast<int>(cluster.block_rank()) * per + thread;
  const bool here = thread < per && at < n;
  const int64_t num_bags = in.batch.num_bags();
  const bool keeps = num_bags <= kMostOffsets;
  if (keeps) {
    for (int i = thread; i <= num_bags; i += blockDim.x) {
      shared.offsets[i] = static_cast<int32_t>(in.batch.offsets[i]);
    }
  }
  clear_on_the_way(in);
  __syncthreads();
  Item item = {0xffffffffu, at};
  if (here) {
    int64_t bag;
    if (keeps) {
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
    item.key = static_cast<uint32_t>(key_of(in, at, bag));
  }
  int pass = 1;
  for (int shift = 0; shift < bits; shift += 8) {
    pass ^= 1;
    sort_pass(cluster, shared, pass, shift, per, here, item);
  }
  number_distinct(cluster, shared, in, index, pass, per, here, item);
  cluster.sync();  // no block leaves while others read its memory
#endif
}

}  // namespace

void index_small(const IndexInput& in, const Index& index, cudaStream_t stream) {
  const int n = static_cast<int>(in.batch.num_ids);
  const int per = (n + kBlocks - 1) / kBlocks;
  const int threads = per <= kDigits ? kDigits : (per + 31) / 32 * 32;
  int bits = 1;
  while ((uint64_t{1} << bits) <= in.num_keys) ++bits;
  HKV_CUDA_CHECK(
      cudaFuncSetAttribute(index_cluster, cudaFuncAttributeNonPortableClusterSizeAllowed, 1));
  HKV_CUDA_CHECK(cudaFuncSetAttribute(index_cluster, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                      static_cast<int>(sizeof(Shared))));
  launch_chained(index_cluster, {dim3(kBlocks), threads, sizeof(Shared), kBlocks}, stream, in,
                 index, per, bits);
}

}  // namespace torchrec_hkv::tensor_train::cuda
