// Sorts positions by slot if each feature has a table of its own. The positions of a table are then
// contiguous, and a key needs only the bits of a slot number in one table. A cluster of blocks
// sorts the positions of a table in one kernel. In each pass, least significant digit first, a
// block ranks its share of the positions, the blocks exchange their counts of digits, and positions
// are written through shared memory, so that neighbours are written together.
//
// A slot with a large part of a table's positions gets a digit of its own in the first pass, after
// all other digits. Its positions stay there, and the other passes do not touch them.
//
// Blocks have many threads, which keep their keys in registers. Beside other kernels, blocks have
// half as many: they find room sooner, but read their keys twice.
#include <cooperative_groups.h>

#include <utility>

#include "common/dependent_launch.cuh"
#include "common/scan.cuh"
#include "hash_table/cuda/update/update.cuh"

namespace torchrec_hkv::hash_table::cuda {
namespace {

namespace cg = cooperative_groups;

constexpr int kManyThreads = 512;  // of a block
constexpr int kFewThreads = 256;
constexpr uint32_t kBlockItems = 10240;  // positions of a block at a time
constexpr unsigned kMaxBlocks = 8;       // blocks of a cluster that every GPU with clusters can run
constexpr unsigned kManyBlocks = 264;    // blocks of all clusters: two for each multiprocessor
constexpr unsigned kFewBlocks = 64;      // with fewer positions other sorts are faster
constexpr int64_t kMinIds = 1 << 16;

// Shared memory of a block. kBits: of a digit. Low: type of the pairs' values.
template <int kSortThreads, int kBits, typename Low>
struct SharedSortState {
  static constexpr int kSortWarps = kSortThreads / kWarp;
  static constexpr uint32_t kDigits = 1u << kBits;
  static constexpr uint32_t kHotDigit = kDigits;     // of a slot that leaves the sort
  static constexpr int kCounts = kHotDigit + kWarp;  // of digits, in whole warps
  static_assert(kCounts <= kSortThreads);

  uint32_t keys[kBlockItems];  // staged, in the order of their digits
  Low lows[kBlockItems];
  uint16_t counts[kSortWarps][kCounts];  // keys of a digit in this warp, then in earlier warps
  uint32_t totals[kCounts];              // keys of a digit in the block
  uint32_t starts[kCounts];              // first place of a digit among the staged keys
  uint32_t to[kCounts];                  // place in memory minus place among the staged keys
  uint32_t warp_sums[2][kCounts / kWarp];
  uint32_t num_hot;
};

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900

// A slot gets its own digit if it has this many positions of a sample of kWarp.
constexpr int kHotOfSample = 8;
constexpr uint32_t kNoHotSlot = ~0u;

// Removes from `same` the lanes whose digit differs from the lane's in this bit. Called by all
// lanes. Four instructions; the compiler generates seven.
__device__ __forceinline__ void keep_equal(unsigned& same, uint32_t digit, uint32_t bit) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      ".reg .b32 masked, set, flip;\n"
      "and.b32 masked, %1, %2;\n"
      "setp.ne.u32 p, masked, 0;\n"
      "vote.sync.ballot.b32 set, p, 0xffffffff;\n"
      "selp.b32 flip, 0, 0xffffffff, p;\n"
      "xor.b32 set, set, flip;\n"
      "and.b32 %0, %0, set;\n"
      "}\n"
      : "+r"(same)
      : "r"(digit), "r"(bit));
}

#endif

// hot_slots: as in UpdateScratch. Not called on GPUs before sm_90.
template <int kSortThreads, int kBits, typename Low>
__global__ void __launch_bounds__(kSortThreads, 2 * kManyThreads / kSortThreads)
    sort_by_table_kernel(const TableView* __restrict__ tables, const __grid_constant__ Batch batch,
                         const __grid_constant__ Pairs pairs, const __grid_constant__ Pairs other,
                         int passes, uint32_t* hot_slots) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  using Shared = SharedSortState<kSortThreads, kBits, Low>;
  constexpr int kCounts = Shared::kCounts, kSortWarps = Shared::kSortWarps;
  constexpr int kItems = kBlockItems / kSortThreads;  // positions of a thread
  constexpr bool kKeysInRegisters = kSortThreads == kManyThreads;
  constexpr int kKeys = kKeysInRegisters ? kItems : 8;      // in registers
  constexpr int kInFlight = kKeysInRegisters ? 10 : kKeys;  // values in flight
  static_assert(kItems % kKeys == 0 && kItems % kInFlight == 0);
  extern __shared__ __align__(16) char memory[];
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  wait_for_kernel_before();
  cg::cluster_group cluster = cg::this_cluster();
  const unsigned blocks = cluster.num_blocks(), block = cluster.block_rank();
  const int thread = threadIdx.x, warp = thread / kWarp, lane = thread % kWarp;
  const auto feature = static_cast<int32_t>(blockIdx.x / blocks);
  // Invalid offsets must not lead out of the arrays; no row is updated then.
  const auto start_of = [&](int32_t f) {
    return static_cast<uint32_t>(min(max(batch.feature_start(f), int64_t{0}), batch.num_ids));
  };
  const uint32_t begin = start_of(feature);
  uint32_t end = max(begin, start_of(feature + 1));
  const TableView& table = tables[batch.feature_tables[feature]];
  const auto first_slot = static_cast<uint32_t>(table.first_slot);
  const auto num_slots = static_cast<uint32_t>(table.num_slots);
  const int shift = pairs.format.shift;
  uint16_t* const counts = shared.counts[warp];

  // All blocks of a cluster find the same slot. Only the first pass writes its positions, so it
  // must write to the same buffer as the last pass.
  uint32_t hot = kNoHotSlot;
  if (passes % 2 == 1 && end > begin) {
    const uint64_t length = end - begin;
    const auto at = begin + static_cast<uint32_t>(length * lane / kWarp);
    const uint32_t slot = __ldcg(static_cast<const uint32_t*>(pairs.keys) + at) >> shift;
    const int same = __popc(__match_any_sync(kAllLanes, slot));
    const unsigned many = __ballot_sync(kAllLanes, same >= kHotOfSample);
    if (many) hot = __shfl_sync(kAllLanes, slot, __ffs(static_cast<int>(many)) - 1);
  }

  for (int pass = 0; pass < passes; ++pass) {
    const Pairs& from = pass % 2 == 0 ? pairs : other;
    const Pairs& to = pass % 2 == 0 ? other : pairs;
    const uint32_t* const from_keys = static_cast<const uint32_t*>(from.keys);
    const Low* const from_lows = static_cast<const Low*>(from.values);
    const uint32_t block_items = (end - begin + blocks - 1) / blocks;
    const uint32_t block_begin = min(begin + block * block_items, end);
    const uint32_t block_end = min(block_begin + block_items, end);
    const uint32_t rounds = max(1u, (block_items + kBlockItems - 1) / kBlockItems);
    const int low_bit = pass * kBits;
    // Positions without a slot have the key after that of the last slot.
    const auto digit_of = [&](uint32_t key) {
      const uint32_t slot = key >> shift;
      const uint32_t digit = min(slot - first_slot, num_slots) >> low_bit & (Shared::kDigits - 1);
      return slot == hot ? Shared::kHotDigit : digit;
    };
    // All warps have equally many items, kWarp positions each; the lane has one of each.
    const uint32_t warp_items =
        (min(block_items, kBlockItems) + kSortThreads - 1) / kSortThreads * kWarp;
    uint32_t keys[kKeys], ranks[kItems / 2];
    // first: the lane's first position of the round, if remaining > 0. remaining: the warp's
    // positions from there on.
    const auto load_keys = [&](uint32_t first, int remaining, int item) {
#pragma unroll
      for (int k = 0; k < kKeys; ++k) {
        const int at = (item + k) * kWarp;
        keys[k] = at < remaining ? __ldcg(from_keys + first + at) : 0;
      }
    };
    const auto rank = [&](uint32_t first, int remaining) {
      if (kKeysInRegisters) load_keys(first, remaining, 0);
      for (int i = lane; i < kCounts / 2; i += kWarp) reinterpret_cast<uint32_t*>(counts)[i] = 0;
      __syncwarp();
#pragma unroll
      for (int i = 0; i < kItems; ++i) {
        if (i * kWarp >= remaining + lane) break;  // taken by all lanes
        if (!kKeysInRegisters && i % kKeys == 0) load_keys(first, remaining, i);
        const bool is_valid = i * kWarp < remaining;
        const uint32_t digit = digit_of(keys[i % kKeys]);
        unsigned same = __ballot_sync(kAllLanes, is_valid);
#pragma unroll
        for (int bit = 0; bit < kBits; ++bit) keep_equal(same, digit, 1u << bit);
        if (hot != kNoHotSlot) keep_equal(same, digit, 1u << kBits);
        const uint32_t before = __popc(same & ((1u << lane) - 1));
        const uint32_t earlier = counts[digit];
        if (i % 2 == 0) {
          ranks[i / 2] = earlier + before;
        } else {
          ranks[i / 2] |= (earlier + before) << 16;
        }
        __syncwarp();
        if (is_valid && before == 0) counts[digit] = static_cast<uint16_t>(earlier + __popc(same));
        __syncwarp();
      }
    };
    // Replaces each warp's count by the sum of earlier warps. Returns the total.
    const auto scan_warps = [&]() {
      uint32_t sum = 0;
#pragma unroll
      for (int w = 0; w < kSortWarps; ++w) {
        const uint32_t other_count = shared.counts[w][thread];
        shared.counts[w][thread] = static_cast<uint16_t>(sum);
        sum += other_count;
      }
      return sum;
    };
    // Computes the begins of the digits of a round among the staged keys. digit_count: number of
    // keys with the thread's digit.
    const auto find_starts = [&](uint32_t digit_count) {
      uint32_t sum = 0;
      if (thread < kCounts) {
        sum = inclusive_scan(digit_count);
        if (lane == kWarp - 1) shared.warp_sums[0][warp] = sum;
      }
      __syncthreads();
      if (thread < kCounts) {
        for (int w = 0; w < warp; ++w) sum += shared.warp_sums[0][w];
        shared.starts[thread] = sum - digit_count;
      }
      __syncthreads();
      return sum - digit_count;
    };
    const auto stage = [&](uint32_t first, int remaining) {
      Low lows[kInFlight];
#pragma unroll
      for (int i = 0; i < kItems; ++i) {
        if (i % kInFlight == 0) {
          if (i * kWarp >= remaining + lane) break;  // taken by all lanes
          if (!kKeysInRegisters) load_keys(first, remaining, i);
#pragma unroll
          for (int k = 0; k < kInFlight; ++k) {
            const int at = (i + k) * kWarp;
            lows[k] = at < remaining ? __ldcg(from_lows + first + at) : Low{0};
          }
        }
        if (i * kWarp >= remaining) continue;
        const uint32_t key = keys[i % kKeys];
        const uint32_t digit = digit_of(key);
        const uint32_t rank_in_block = i % 2 == 0 ? ranks[i / 2] & 0xffff : ranks[i / 2] >> 16;
        const uint32_t place = rank_in_block + shared.starts[digit] + counts[digit];
        shared.keys[place] = key;
        shared.lows[place] = lows[i % kInFlight];
      }
    };
    // Computes the place of keys with the thread's digit, from the counts of the cluster's blocks.
    const auto find_digit_place = [&]() {
      uint32_t sum = 0, before = 0, all = 0;
      if (thread < kCounts) {
        uint32_t other_count[kMaxBlocks];
#pragma unroll
        for (unsigned b = 0; b < kMaxBlocks; ++b) {
          other_count[b] = b < blocks ? cluster.map_shared_rank(shared.totals, b)[thread] : 0;
        }
#pragma unroll
        for (unsigned b = 0; b < kMaxBlocks; ++b) {
          if (b < block) before += other_count[b];
          all += other_count[b];
        }
        sum = inclusive_scan(all);
        if (lane == kWarp - 1) shared.warp_sums[1][warp] = sum;
        if (thread == static_cast<int>(Shared::kHotDigit)) shared.num_hot = all;
      }
      __syncthreads();
      if (thread < kCounts) {
        for (int w = 0; w < warp; ++w) sum += shared.warp_sums[1][w];
      }
      return begin + sum - all + before;
    };
    if (rounds > 1) {
      if (thread < kCounts) shared.totals[thread] = 0;
      __syncthreads();
      for (uint32_t at = block_begin + thread; at < block_end; at += kSortThreads) {
        atomicAdd(&shared.totals[digit_of(__ldcg(from_keys + at))], 1u);
      }
    }
    uint32_t place = 0;
    for (uint32_t round = 0; round < rounds; ++round) {
      const uint32_t first = min(block_begin + round * kBlockItems, block_end);
      const uint32_t count = min(block_end - first, kBlockItems);
      const uint32_t skipped = min(warp * warp_items, count);
      const int remaining = static_cast<int>(min(count - skipped, warp_items)) - lane;
      uint32_t digit_count = 0;  // of the thread's digit
      rank(first + skipped + lane, remaining);
      __syncthreads();
      if (thread < kCounts) {
        digit_count = scan_warps();
        if (rounds == 1) shared.totals[thread] = digit_count;
      }
      // The blocks exchange counts while keys are staged.
      cg::cluster_group::arrival_token arrival;
      if (round == 0) arrival = cluster.barrier_arrive();
      const uint32_t start = find_starts(digit_count);
      stage(first + skipped + lane, remaining);
      if (round == 0) {
        cluster.barrier_wait(std::move(arrival));
        place = find_digit_place();
      }
      if (thread < kCounts) shared.to[thread] = place - start;
      place += digit_count;
      __syncthreads();
      uint32_t* const to_keys = static_cast<uint32_t*>(to.keys);
      Low* const to_lows = static_cast<Low*>(to.values);
#pragma unroll 4
      for (uint32_t i = thread; i < count; i += kSortThreads) {
        const uint32_t key = shared.keys[i];
        const uint32_t at = shared.to[digit_of(key)] + i;
        to_keys[at] = key;
        to_lows[at] = shared.lows[i];
      }
      if (round + 1 < rounds) __syncthreads();
    }
    cluster.sync();  // before keys of other blocks are read, or totals written
    end -= shared.num_hot;
    if (pass == 0 && block == 0 && thread == 0) {
      if (shared.num_hot > kLongest) *hot_slots = 1;
    }
    hot = kNoHotSlot;
  }
#endif
}

// Blocks of a cluster: as many as can run at the same time.
unsigned blocks_of_table(int32_t num_tables) {
  unsigned blocks = kMaxBlocks;
  while (blocks > 1 && blocks * static_cast<unsigned>(num_tables) > kManyBlocks) blocks /= 2;
  return blocks;
}

}  // namespace

bool sorts_by_table(const GroupShape& shape, const Batch& batch, const PairFormat& format,
                    const UpdateHint* hint) {
  if (shape.num_unshared_features == 0 || batch.num_features != shape.num_unshared_features)
    return false;
  if (batch.num_ids < kMinIds) return false;
  if (format.wide || compute_capability() < 9) return false;
  const unsigned blocks = blocks_of_table(batch.num_features);
  const int64_t known = static_cast<const volatile UpdateHint*>(hint)->longest_feature;
  const int64_t longest = max(known, batch.num_ids / batch.num_features);
  return blocks * static_cast<unsigned>(batch.num_features) >= kFewBlocks &&
         longest <= int64_t{blocks} * kBlockItems;
}

void sort_by_table(const TableView* tables, const Batch& batch, SortedPairs* pairs,
                   int64_t max_slots, uint32_t* hot_slots, bool on_side_stream,
                   cudaStream_t stream) {
  int bits = 1;
  while ((int64_t{1} << bits) <= max_slots) ++bits;  // one more key, for no slot
  const int passes = (bits + 7) / 8;
  const unsigned blocks = blocks_of_table(batch.num_features);
  const auto launch_of = [&]<int kSortThreads, int kBits, typename Low>() {
    const LaunchShape shape{dim3(blocks * static_cast<unsigned>(batch.num_features)), kSortThreads,
                            sizeof(SharedSortState<kSortThreads, kBits, Low>),
                            static_cast<int>(blocks)};
    launch_dependent(sort_by_table_kernel<kSortThreads, kBits, Low>, shape, stream, tables, batch,
                     pairs->pairs, pairs->other, passes, hot_slots);
  };
  const auto launch = [&]<int kBits, typename Low>() {
    if constexpr (kBits == 7) {  // kFewThreads serve these digits only
      if (on_side_stream) return launch_of.template operator()<kFewThreads, kBits, Low>();
    }
    launch_of.template operator()<kManyThreads, kBits, Low>();
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
