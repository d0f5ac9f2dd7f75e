// The sort by slot where each feature has a table of its own: the positions of a table then follow
// each other already, and only as many bits tell slots apart as number those of one table. A
// cluster of blocks sorts them in one kernel. In each pass, least significant digits first, a block
// ranks its share of the positions; the blocks tell each other how many keys of each digit they
// have; and positions go to their places by way of shared memory, so that neighbours are written
// together.
//
// A slot that has a large part of a table's positions gets a digit of its own in the first pass,
// behind all others. There its positions stay, and the other passes don't touch them.
#include <cooperative_groups.h>

#include <algorithm>

#include "common/chain.cuh"
#include "hash_table/cuda/update/update.cuh"

namespace torchrec_hkv::hash_table::cuda {
namespace {

namespace cg = cooperative_groups;

constexpr int kSortThreads = 512;
constexpr int kSortWarps = kSortThreads / kWarp;
constexpr int kItems = 20;  // positions of a thread
constexpr uint32_t kShare = kSortThreads * kItems;
constexpr unsigned kMostBlocks = 8;    // of a cluster, which every GPU that has clusters can run
constexpr unsigned kManyBlocks = 264;  // of all clusters: two a multiprocessor
constexpr unsigned kFewBlocks = 64;    // with fewer, other sorts are faster
constexpr int64_t kLeastIds = 1 << 16;

// What a block has in shared memory. Low: the type of pairs' values.
template <int kBits, typename Low>
struct SortedShare {
  static constexpr uint32_t kDigits = 1u << kBits;
  static constexpr uint32_t kHotDigit = kDigits;     // of a slot that leaves the sort
  static constexpr int kCounts = kHotDigit + kWarp;  // of digits, in whole warps
  static_assert(kCounts <= kSortThreads);

  uint32_t keys[kShare];  // staged, in the order of their digits
  Low lows[kShare];
  uint16_t counts[kSortWarps][kCounts];  // keys of a digit in this warp, then in those before it
  uint32_t totals[kCounts];              // keys of a digit in the block
  uint32_t starts[kCounts];              // first place of a digit among the staged keys
  uint32_t to[kCounts];                  // the same in memory, less that among the staged
  uint32_t warp_sums[2][kCounts / kWarp];
  uint32_t num_hot;
};

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900

// Of a sample of kWarp positions so many must have one slot for that to get its digit.
constexpr int kHotOfSample = 8;
constexpr uint32_t kNoHotSlot = ~0u;

__device__ __forceinline__ uint32_t inclusive_sum(uint32_t value) {
  const int lane = threadIdx.x % kWarp;
#pragma unroll
  for (int offset = 1; offset < kWarp; offset *= 2) {
    const uint32_t other = __shfl_up_sync(kAllLanes, value, offset);
    if (lane >= offset) value += other;
  }
  return value;
}

// kBits: of a digit.
template <int kBits, typename Low>
__global__ void __launch_bounds__(kSortThreads, 2)
    sort_by_table_kernel(const TableView* __restrict__ tables, const __grid_constant__ Batch batch,
                         Pairs from, Pairs to, int passes) {
  using Shared = SortedShare<kBits, Low>;
  constexpr int kCounts = Shared::kCounts;
  extern __shared__ __align__(16) char memory[];
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  wait_for_kernel_before();
  cg::cluster_group cluster = cg::this_cluster();
  const int blocks = static_cast<int>(cluster.num_blocks());
  const int block = static_cast<int>(cluster.block_rank());
  const int thread = threadIdx.x, warp = thread / kWarp, lane = thread % kWarp;
  const auto feature = static_cast<int32_t>(blockIdx.x) / blocks;
  // Offsets that can't be followed must not lead out of the arrays; no row is updated then.
  const auto start_of = [&](int32_t f) {
    return static_cast<uint32_t>(min(max(batch.feature_start(f), int64_t{0}), batch.num_ids));
  };
  const uint32_t begin = start_of(feature);
  uint32_t end = max(begin, start_of(feature + 1));
  const TableView& table = tables[batch.feature_tables[feature]];
  const auto first_slot = static_cast<uint32_t>(table.first_slot);
  const auto num_slots = static_cast<uint32_t>(table.num_slots);
  const int shift = from.format.shift;
  uint16_t* const counts = shared.counts[warp];

  // All blocks of a cluster find the same one. Its positions must be where the last pass writes.
  uint32_t hot = kNoHotSlot;
  if (passes % 2 == 1 && end > begin) {
    const uint64_t length = end - begin;
    const auto at = begin + static_cast<uint32_t>(length * lane / kWarp);
    const uint32_t slot = __ldcg(static_cast<const uint32_t*>(from.keys) + at) >> shift;
    const int same = __popc(__match_any_sync(kAllLanes, slot));
    const unsigned many = __ballot_sync(kAllLanes, same >= kHotOfSample);
    if (many) hot = __shfl_sync(kAllLanes, slot, __ffs(static_cast<int>(many)) - 1);
  }

  for (int pass = 0; pass < passes; ++pass) {
    const uint32_t* const from_keys = static_cast<const uint32_t*>(from.keys);
    const Low* const from_lows = static_cast<const Low*>(from.values);
    const uint32_t share = (end - begin + blocks - 1) / blocks;
    const uint32_t mine = min(begin + block * share, end);
    const uint32_t my_end = min(mine + share, end);
    const uint32_t rounds = max(1u, (share + kShare - 1) / kShare);
    const int low_bit = pass * kBits;
    // Of positions without a slot it is that of a slot behind the last one.
    const auto digit_of = [&](uint32_t key) {
      const uint32_t slot = key >> shift;
      const uint32_t digit = min(slot - first_slot, num_slots) >> low_bit & (Shared::kDigits - 1);
      return slot == hot ? Shared::kHotDigit : digit;
    };
    const auto item_at = [&](int i) {
      return static_cast<uint32_t>((warp * kItems + i) * kWarp + lane);
    };
    uint32_t keys[kItems], ranks[kItems / 2];
    const auto rank_round = [&](uint32_t first, uint32_t count) {
      for (int i = lane; i < kCounts / 2; i += kWarp) reinterpret_cast<uint32_t*>(counts)[i] = 0;
#pragma unroll
      for (int i = 0; i < kItems; ++i) {
        keys[i] = item_at(i) < count ? __ldcg(from_keys + first + item_at(i)) : 0;
      }
      __syncwarp();
#pragma unroll
      for (int i = 0; i < kItems; ++i) {
        const bool given = item_at(i) < count;
        const uint32_t digit = digit_of(keys[i]);
        unsigned same = __ballot_sync(kAllLanes, given);
        const auto agree = [&](int bit) {
          const unsigned set = __ballot_sync(kAllLanes, digit >> bit & 1);
          same &= (digit >> bit & 1) ? set : ~set;
        };
#pragma unroll
        for (int bit = 0; bit < kBits; ++bit) agree(bit);
        if (hot != kNoHotSlot) agree(kBits);
        const uint32_t before = __popc(same & ((1u << lane) - 1));
        const uint32_t earlier = counts[digit];
        if (i % 2 == 0) {
          ranks[i / 2] = earlier + before;
        } else {
          ranks[i / 2] |= (earlier + before) << 16;
        }
        __syncwarp();
        if (given && before == 0) counts[digit] = static_cast<uint16_t>(earlier + __popc(same));
        __syncwarp();
      }
    };
    // Counts of warps become those of the warps before; returns the sum.
    const auto scan_warps = [&]() {
      uint32_t sum = 0;
#pragma unroll
      for (int w = 0; w < kSortWarps; ++w) {
        const uint32_t its = shared.counts[w][thread];
        shared.counts[w][thread] = static_cast<uint16_t>(sum);
        sum += its;
      }
      return sum;
    };
    uint32_t own = 0;  // in the round, of the thread's digit
    if (rounds == 1) {
      rank_round(mine, my_end - mine);
      __syncthreads();
      if (thread < kCounts) shared.totals[thread] = own = scan_warps();
    } else {
      if (thread < kCounts) shared.totals[thread] = 0;
      __syncthreads();
      for (uint32_t at = mine + thread; at < my_end; at += kSortThreads) {
        atomicAdd(&shared.totals[digit_of(__ldcg(from_keys + at))], 1u);
      }
    }
    cluster.sync();
    if (thread < kCounts) {
      uint32_t before = 0, all = 0;
      for (int b = 0; b < blocks; ++b) {
        const uint32_t its = cluster.map_shared_rank(shared.totals, b)[thread];
        if (b < block) before += its;
        all += its;
      }
      const uint32_t sum_all = inclusive_sum(all), sum_own = inclusive_sum(own);
      if (lane == kWarp - 1) {
        shared.warp_sums[0][warp] = sum_all;
        shared.warp_sums[1][warp] = sum_own;
      }
      shared.to[thread] = begin + sum_all - all + before;
      shared.starts[thread] = sum_own - own;
      if (thread == static_cast<int>(Shared::kHotDigit)) shared.num_hot = all;
    }
    __syncthreads();
    if (thread < kCounts) {
      uint32_t to_here = shared.to[thread], start = shared.starts[thread];
      for (int w = 0; w < warp; ++w) {
        to_here += shared.warp_sums[0][w];
        start += shared.warp_sums[1][w];
      }
      shared.starts[thread] = start;
      shared.to[thread] = to_here - start;
    }
    __syncthreads();
    for (uint32_t round = 0; round < rounds; ++round) {
      const uint32_t first = min(mine + round * kShare, my_end);
      const uint32_t count = min(my_end - first, kShare);
      if (rounds > 1) {
        rank_round(first, count);
        __syncthreads();
        uint32_t sum = 0;
        if (thread < kCounts) {
          own = scan_warps();
          sum = inclusive_sum(own);
          if (lane == kWarp - 1) shared.warp_sums[1][warp] = sum;
        }
        __syncthreads();
        if (thread < kCounts) {
          for (int w = 0; w < warp; ++w) sum += shared.warp_sums[1][w];
          shared.to[thread] += shared.starts[thread] - (sum - own);
          shared.starts[thread] = sum - own;
        }
        __syncthreads();
      }
#pragma unroll
      for (int i = 0; i < kItems; ++i) {
        if (item_at(i) >= count) break;
        const Low low = __ldcg(from_lows + first + item_at(i));
        const uint32_t digit = digit_of(keys[i]);
        const uint32_t rank = i % 2 == 0 ? ranks[i / 2] & 0xffff : ranks[i / 2] >> 16;
        const uint32_t place = rank + shared.starts[digit] + counts[digit];
        shared.keys[place] = keys[i];
        shared.lows[place] = low;
      }
      __syncthreads();
      uint32_t* const to_keys = static_cast<uint32_t*>(to.keys);
      Low* const to_lows = static_cast<Low*>(to.values);
#pragma unroll 4
      for (uint32_t i = thread; i < count; i += kSortThreads) {
        const uint32_t key = shared.keys[i];
        const uint32_t place = shared.to[digit_of(key)] + i;
        to_keys[place] = key;
        to_lows[place] = shared.lows[i];
      }
      if (rounds > 1) {
        __syncthreads();
        if (thread < kCounts) shared.to[thread] += own;
        __syncthreads();
      }
    }
    __threadfence();
    cluster.sync();  // before others' keys are read, or totals written
    end -= shared.num_hot;
    hot = kNoHotSlot;
    const Pairs other = from;
    from = to;
    to = other;
  }
}

#else  // not called there

template <int kBits, typename Low>
__global__ void sort_by_table_kernel(const TableView*, const Batch, Pairs, Pairs, int) {}

#endif

// Blocks of a cluster: as many as may run at the same time.
unsigned blocks_of_table(int32_t num_tables) {
  unsigned blocks = kMostBlocks;
  while (blocks > 1 && blocks * static_cast<unsigned>(num_tables) > kManyBlocks) blocks /= 2;
  return blocks;
}

}  // namespace

bool sorts_by_table(const GroupShape& shape, const Batch& batch, const PairFormat& format,
                    const UpdateHint* hint) {
  if (shape.features_apart == 0 || batch.num_features != shape.features_apart) return false;
  if (batch.num_ids < kLeastIds) return false;
  if (format.wide || compute_capability() < 9) return false;
  const unsigned blocks = blocks_of_table(batch.num_features);
  const int64_t known = static_cast<const volatile UpdateHint*>(hint)->longest_feature;
  const int64_t longest = std::max(known, batch.num_ids / batch.num_features);
  return blocks * static_cast<unsigned>(batch.num_features) >= kFewBlocks &&
         longest <= int64_t{blocks} * kShare;
}

void sort_by_table(const TableView* tables, const Batch& batch, SortedPairs* pairs,
                   int64_t most_slots, cudaStream_t stream) {
  int bits = 1;
  while ((int64_t{1} << bits) <= most_slots) ++bits;  // one more number: of no slot
  const int passes = (bits + 7) / 8;
  const unsigned blocks = blocks_of_table(batch.num_features);
  const auto launch = [&]<int kBits, typename Low>() {
    const LaunchShape shape{dim3(blocks * static_cast<unsigned>(batch.num_features)), kSortThreads,
                            sizeof(SortedShare<kBits, Low>), static_cast<int>(blocks)};
    launch_chained(sort_by_table_kernel<kBits, Low>, shape, stream, tables, batch, pairs->pairs,
                   pairs->other, passes);
  };
  const bool packed = pairs->pairs.format.packed;
  if (bits <= 7 * passes) {
    packed ? launch.template operator()<7, uint16_t>() : launch.template operator()<7, uint32_t>();
  } else {
    packed ? launch.template operator()<8, uint16_t>() : launch.template operator()<8, uint32_t>();
  }
  if (passes % 2 == 1) std::swap(pairs->pairs, pairs->other);
}

}  // namespace torchrec_hkv::hash_table::cuda
