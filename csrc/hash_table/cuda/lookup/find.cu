// The find on the GPU. A warp works on 32 ids. Each lane hashes one id, compares it with the stored
// id if a digest matches, and touches the entry, so that 32 loads are in flight. Tiles of four
// lanes compare digests: a lane reads 32 of a line's 128 bytes, and a tile has two lines in flight.
// Ids that are not in their first bucket are distributed to the tiles again, so that no tile is
// idle.
//
// Lines are read through L1, which serves hot ids: thousands of requests to one sector of L2 would
// be serialised.
#include "common/cuda_check.h"
#include "common/dependent_launch.cuh"
#include "hash_table/cuda/bucket.cuh"
#include "hash_table/cuda/entry.cuh"
#include "hash_table/cuda/insert/lane_feature.cuh"
#include "hash_table/cuda/lookup/find.cuh"
#include "hash_table/cuda/score_update.cuh"
#include "hash_table/kernels.h"

namespace torchrec_hkv::hash_table::cuda {
namespace {

constexpr int kFindLanes = 4;
constexpr int kTilesOfWarp = kWarp / kFindLanes;
constexpr int kLinesAhead = 2;  // lines of a tile in flight
constexpr int kFindBlocks = 6;  // per multiprocessor; this limits the registers of a thread
constexpr int kTouchers = 512;  // entries of a block's table of slots and touching threads
// An entry holds the number of a thread and, in higher bits, the number of others with the same
// slot.
constexpr uint32_t kOtherToucher = kThreads;

constexpr uint32_t kNotFound = ~0u;

// The request of an id's lane to a tile: the line's address in two words, and the digest in both
// halves of a third. The answers of the tile's lanes replace it, see compare.
struct alignas(16) LineRequest {
  uint32_t words[kFindLanes];
};
constexpr int kRequestDigest = 2;

// The digests of a lane that differ from the one in both halves of `pair`. Bit 7 - j stands for the
// lower half of word j, bit 23 - j for its upper half.
__device__ __forceinline__ uint32_t compare(const uint4& first, const uint4& last, uint32_t pair) {
  const uint32_t words[8] = {first.x, first.y, first.z, first.w, last.x, last.y, last.z, last.w};
  uint32_t differ = 0;
#pragma unroll
  for (uint32_t word : words) differ = differ * 2 + __vminu2(word ^ pair, 0x00010001u);
  return differ;
}
// The number of a lane's digests of occupied slots, in the highest byte. The second byte has no
// meaning; the others are zeros.
__device__ __forceinline__ uint32_t count_taken(const uint4& first, const uint4& last) {
  const uint32_t words[8] = {first.x, first.y, first.z, first.w, last.x, last.y, last.z, last.w};
  static_assert(kEmptyDigest == 0);
  uint32_t taken = 0;  // of the lower halves of words, and of the upper
#pragma unroll
  for (uint32_t word : words) taken += __vminu2(word, 0x00010001u);
  return taken * 0x01000100u;
}
// The number of free slots in a line, from the tile's answer.
__device__ __forceinline__ int number_free(const uint4& answer) {
  const uint32_t taken = __byte_perm(__byte_perm(answer.x, answer.y, 0x0073),
                                     __byte_perm(answer.z, answer.w, 0x0073), 0x5410);
  return kBucketDigests - static_cast<int>(__dp4a(taken, 0x01010101u, 0u));
}

// Iterates over the matching digests of a line.
struct Matches {
  uint32_t low;   // of the tile's lanes 0 and 1
  uint32_t high;  // of lanes 2 and 3

  // From the answers of a tile: bytes 0 and 2 of each word.
  __device__ __forceinline__ explicit Matches(const uint4& answer) {
    low = ~__byte_perm(answer.x, answer.y, 0x6240);
    high = ~__byte_perm(answer.z, answer.w, 0x6240);
  }
  __device__ __forceinline__ bool any() const { return (low | high) != 0; }
  // Position of the next match in the bucket.
  __device__ __forceinline__ uint32_t position() const {
    const uint32_t bit =
        low != 0 ? __ffs(static_cast<int>(low)) - 1 : __ffs(static_cast<int>(high)) + 31;
    const uint32_t word = 7 - (bit & 7);
    const uint32_t lane = (bit >> 5) * 2 + (bit >> 3 & 1);
    return (word / 4 * kFindLanes + lane) * kVectorDigests + word % 4 * 2 + (bit >> 4 & 1);
  }
  __device__ __forceinline__ void drop() {
    if (low != 0) {
      low &= low - 1;
    } else {
      high &= high - 1;
    }
  }
};

// The tiles of a warp process the requests of its lanes. Returns the answers to the lane's request.
// Called by all lanes. kFree: also counts free slots.
template <bool kFree>
__device__ __forceinline__ uint4 compare_lines(LineRequest* requests, bool is_active,
                                               const TableView& table, uint32_t bucket,
                                               uint16_t digest) {
  const int warp_lane = threadIdx.x % kWarp;
  const int lane = threadIdx.x % kFindLanes;
  const int tile = warp_lane / kFindLanes;
  const unsigned active_lanes = __ballot_sync(kAllLanes, is_active);
  const int n = __popc(active_lanes);
  const int number = __popc(active_lanes & ((1u << warp_lane) - 1));
  auto* const mine = reinterpret_cast<uint4*>(&requests[number]);
  if (is_active) {
    const auto line = reinterpret_cast<uint64_t>(digest_line(table, bucket));
    *mine = uint4{static_cast<uint32_t>(line), static_cast<uint32_t>(line >> 32),
                  digest * 0x00010001u, 0};
  }
  __syncwarp();
  // Tiles without a request repeat the last one, and do not answer.
  const auto request_at = [&](int at) -> LineRequest& { return requests[min(at, n - 1)]; };
#pragma unroll 1
  for (int base = 0; base < n; base += kLinesAhead * kTilesOfWarp) {
    uint4 first[kLinesAhead], last[kLinesAhead];
#pragma unroll
    for (int k = 0; k < kLinesAhead; ++k) {
      if (k == 0 || base + k * kTilesOfWarp < n) {
        const LineRequest& it = request_at(base + k * kTilesOfWarp + tile);
        const auto address = *reinterpret_cast<const uint64_t*>(it.words);
        const uint4* const line = reinterpret_cast<const uint4*>(address) + lane;
        first[k] = load_vector_cached(line);
        last[k] = load_vector_cached(line + kFindLanes);
      }
    }
#pragma unroll
    for (int k = 0; k < kLinesAhead; ++k) {
      if (k == 0 || base + k * kTilesOfWarp < n) {
        const int at = base + k * kTilesOfWarp + tile;
        LineRequest& it = request_at(at);
        uint32_t answer = compare(first[k], last[k], it.words[kRequestDigest]);
        if (kFree) answer += count_taken(first[k], last[k]);
        __syncwarp();  // all lanes have read the requests
        if (at < n) it.words[lane] = answer;
      }
    }
  }
  __syncwarp();
  const uint4 answer = is_active ? *mine : uint4{~0u, ~0u, ~0u, ~0u};
  __syncwarp();  // the next call overwrites `requests`
  return answer;
}

// Adds the `counted` threads to their entries, those of the first lane's entry in one operation:
// with a hot id these are most of the warp. Called by all lanes.
__device__ __forceinline__ void count_touchers(uint32_t* touchers, uint32_t entry, bool counted) {
  const unsigned lanes = __ballot_sync(kAllLanes, counted);
  if (lanes == 0) return;
  const int first = __ffs(static_cast<int>(lanes)) - 1;
  // All lanes must take part in the shuffle, so it must not come after `counted &&`.
  const uint32_t first_entry = __shfl_sync(kAllLanes, entry, first);
  const bool same = counted && entry == first_entry;
  const unsigned peers = __ballot_sync(kAllLanes, same);
  const bool leads = static_cast<int>(threadIdx.x % kWarp) == first;
  if (leads || (counted && !same)) {
    atomicAdd(&touchers[entry], kOtherToucher * (leads ? __popc(peers) : 1));
  }
}

// exclusive: returns whether this position is the first of the call to touch the slot. This needs
// an atomic exchange, which is faster than a write if ids are spread.
__device__ __forceinline__ bool write_step(uint32_t* last_step, uint32_t now, bool exclusive) {
  if (exclusive) return atomicExch(last_step, now) != now;
  store_l2(last_step, now);
  return false;
}

// kOneTable: the view is a parameter of the launch. mostly_unique: most ids occur at one position
// only. Steps are then exchanged, and steps of many tables are prefetched before the ids have been
// compared. Otherwise steps are written without a test, because waiting for a hot id's step costs
// more than the saved writes; usually only one of a block's threads with the same slot writes.
// kPacked: packed entries, one table. kScores: whether a table stores scores. sums: whether lookups
// add to some scores; the block then counts its threads with the same slot (score_update.cuh).
template <bool kTouch, bool kOneTable, bool kPacked, bool kScores>
__global__ void __launch_bounds__(kThreads, kFindBlocks)
    find_kernel(const __grid_constant__ TableView only, const TableView* __restrict__ tables,
                const Batch batch, const CallContext context, int64_t* __restrict__ slots,
                const Found found, const MissingLists missing, bool mostly_unique, bool sums,
                bool begun) {
  __shared__ LineRequest block_requests[kThreads];
  // By thread: its id (packed: the hash), to save registers; later the slot that it touches.
  __shared__ int64_t by_thread[kThreads];
  // By slot modulo kTouchers: one of the threads that touch it.
  __shared__ uint32_t touchers[kTouch ? kTouchers : 1];
  __shared__ BlockListRanges parts;
  LineRequest* const requests = block_requests + threadIdx.x / kWarp * kWarp;
  if (kTouch) let_next_kernel_start();
  if (kTouch && !begun) wait_for_kernel_before();
  const int64_t at = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const bool is_valid = at < batch.num_ids;
  // Loads the id and the data of its feature at once.
  const int64_t id = is_valid ? batch.ids[at] : 0;
  const TableView& table =
      kOneTable ? only : tables[batch.feature_tables[feature_of_lane(batch, at)]];
  const uint32_t num_buckets = table.num_buckets;
  const uint64_t hash = hash_of_id(id);
  by_thread[threadIdx.x] = kPacked ? static_cast<int64_t>(hash) : id;
  // Clears the scratch of the following kernels, at most four entries for each thread.
  if (kTouch && at * 4 <= missing.mask) {
    reinterpret_cast<uint4*>(missing.table)[at] = uint4{0, 0, 0, 0};
  }
  const BucketChoice choice = choose_buckets_of_hash(hash, num_buckets);
  uint32_t bucket = choice.first;
  uint32_t position = kNotFound;
  bool searching = is_valid;
  bool has_free_slot = false;   // whether a free slot was seen
  bool first_has_room = false;  // whether a new id takes the first bucket
#pragma unroll 1
  for (int turn = 0; turn < 2 && __any_sync(kAllLanes, searching); ++turn) {
    const uint4 answer = compare_lines<kTouch>(requests, searching, table, bucket, choice.digest);
    if (searching) {
      if (kTouch) {
        const int free = number_free(answer);
        has_free_slot |= free > 0;
        if (turn == 0) first_has_room = prefers_first(table.bucket_slots, free, kBucketDigests);
      }
      const int64_t first_slot = static_cast<int64_t>(bucket) * table.bucket_slots;
      for (Matches matches(answer); matches.any(); matches.drop()) {
        const uint32_t candidate = matches.position();
        const int64_t slot = first_slot + candidate;
        if (kPacked) {
          const auto wanted = static_cast<uint64_t>(by_thread[threadIdx.x]);
          if (is_entry_of<!kTouch>(entry_at(table, bucket, candidate), wanted)) {
            position = candidate;
            break;
          }
          continue;
        }
        // A find in one table is 4 % faster if ids do not occupy L1.
        const int64_t stored = kOneTable && !kTouch ? load_once(&table.ids[slot]) : table.ids[slot];
        if (kTouch && !kOneTable && mostly_unique) {
          prefetch_l2(&table.last_steps[slot]);  // most are hits
        }
        if (stored == by_thread[threadIdx.x]) {
          position = candidate;
          break;
        }
      }
      // A table of one bucket has no second one to look at.
      searching = position == kNotFound && bucket != choice.second;
      if (searching) bucket = choice.second;
    }
  }
  const bool present = position != kNotFound;
  const bool listed = is_valid && !present;
  const bool full = kTouch && !has_free_slot && missing.sorts_full;
  bool any_listed = false;
  const int64_t slot = present ? static_cast<int64_t>(bucket) * table.bucket_slots + position : 0;
  if (kTouch) {
    if (begun) wait_for_kernel_before();  // for the clock and the flags
    if (present) {
      by_thread[threadIdx.x] = table.first_slot + slot;
      atomicExch(&touchers[static_cast<uint32_t>(slot) % kTouchers], threadIdx.x);
    }
    any_listed = count_listed(parts, missing, listed, full);
  }
  int64_t result = kNoSlot;
  if (kTouch)
    result = first_has_room ? kMissingFromFirst : has_free_slot ? kNoSlot : kMissingFromFull;
  bool first = false;  // whether it is the first position of the call to touch its slot, if wanted
  const uint32_t entry = static_cast<uint32_t>(slot) % kTouchers;
  bool adds = false;              // this thread adds the block's lookups to the slot's score
  bool counted = false;           // another thread adds this thread's score
  bool combines_in_warp = false;  // the warp's lanes with this slot update its score together
  if (present) {
    result = table.first_slot + slot;
    if (kTouch) {
      const uint32_t toucher = touchers[entry] % kOtherToucher;
      const bool shares = by_thread[toucher] == result;
      if (toucher == threadIdx.x || !shares) {
        uint32_t* const step =
            kPacked ? entry_at(table, bucket, position).step() : &table.last_steps[slot];
        first = write_step(step, context.now(), mostly_unique || found.writer != nullptr);
      }
      if constexpr (kScores) {
        if (table.scores != nullptr) {
          combines_in_warp = !shares || context.scores != nullptr;
          adds = !combines_in_warp && toucher == threadIdx.x;
          counted = !combines_in_warp && !adds;
        }
      }
    }
  }
  if (is_valid) {
    slots[at] = result;
    if (kTouch && found.present != nullptr) found.present[at] = present;
    if (kTouch && found.writer != nullptr) found.writer[at] = first;
  }
  if constexpr (kScores) {
    const unsigned lanes = __ballot_sync(kAllLanes, combines_in_warp);
    if (combines_in_warp) {
      const unsigned peers = __match_any_sync(lanes, static_cast<unsigned long long>(result));
      update_score_of_lanes(table, slot, peers, context, context.given(at));
    }
    const uint32_t epoch = context.epoch();  // loaded while the others are counted
    if (sums) {
      count_touchers(touchers, entry, counted);
      __syncthreads();
    }
    if (adds) {
      const uint32_t others = sums ? touchers[entry] / kOtherToucher : 0;
      update_score(table, slot, context, others + 1, epoch);
    }
  }
  if (kTouch && any_listed) append_listed(parts, missing, listed, full, at);
}

// A touching find follows the kernel that starts the clock or one that ages the tables.
template <bool kTouch>
void launch_find(const TableView* tables, const TableView* only, const Batch& batch,
                 const CallContext& context, int64_t* slots, const Found& found,
                 const MissingLists& missing, bool mostly_unique, StoredScores scores, bool begun,
                 cudaStream_t stream) {
  if (batch.num_ids == 0) return;
  const unsigned grid = grid_for(batch.num_ids);
  const auto launch = [&](auto kernel, auto... arguments) {
    if (kTouch) {
      launch_dependent(kernel, grid, kThreads, stream, arguments...);
    } else {
      kernel<<<grid, kThreads, 0, stream>>>(arguments...);
      HKV_CUDA_CHECK_LAUNCH();
    }
  };
  const bool sums = scores == StoredScores::kSums;
  const auto choose = [&]<bool kScores>() {
    if (only != nullptr) {
      const bool packed = only->entries.words != nullptr;
      launch(packed && !kScores ? find_kernel<kTouch, true, true, false>
                                : find_kernel<kTouch, true, false, kScores>,
             *only, static_cast<const TableView*>(nullptr), batch, context, slots, found, missing,
             mostly_unique, sums, begun);
    } else {
      launch(find_kernel<kTouch, false, false, kScores>, TableView{}, tables, batch, context, slots,
             found, missing, mostly_unique, sums, begun);
    }
  };
  if constexpr (kTouch) {
    if (scores != StoredScores::kNone) return choose.template operator()<true>();
  }
  choose.template operator()<false>();
}

}  // namespace

void find(const TableView* tables, const TableView* only, const Batch& batch, int64_t* slots,
          cudaStream_t stream) {
  launch_find<false>(tables, only, batch, CallContext{}, slots, Found{}, MissingLists{}, false,
                     StoredScores::kNone, false, stream);
}

void find_and_touch(const TableView* tables, const TableView* only, const Batch& batch,
                    const CallContext& context, int64_t* slots, const Found& found,
                    const MissingLists& missing, bool mostly_unique, StoredScores scores,
                    bool begun, cudaStream_t stream) {
  launch_find<true>(tables, only, batch, context, slots, found, missing, mostly_unique, scores,
                    begun, stream);
}

}  // namespace torchrec_hkv::hash_table::cuda
