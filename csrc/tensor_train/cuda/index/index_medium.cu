// The index of a batch with at most one id per thread of the device, in one launch, whose blocks
// all run at the same time and wait for each other. It sorts through memory, least significant
// digit first, then numbers distinct ids and prefixes. For batches of this size, launches would
// take most of the time of a radix sort.
#include <cooperative_groups.h>

#include "common/cuda_check.h"
#include "tensor_train/cuda/contract/tensor_core.cuh"
#include "tensor_train/cuda/index/block_digits.cuh"
#include "tensor_train/cuda/index/index.cuh"

namespace torchrec_hkv::tensor_train::cuda {
namespace {

namespace cg = cooperative_groups;

constexpr int kMaxThreads = 1024;

// Data that blocks exchange. Reads bypass L1, which is not coherent.
struct BlockExchange {
  uint64_t* pairs[2];  // [n] key << 32 | position, for this pass and the next
  int32_t* counts;     // [digits][stride] counts of blocks
  int32_t* heads;      // [3][stride] distinct ids, prefixes and slots that begin in each block
  uint32_t* places;    // [n] by position
  float* factors;      // [n] by position; null if rows are not scaled
  int32_t stride;      // number of blocks, rounded up to a multiple of 4
};

size_t allocate(const Plan& plan, const BatchCuda& batch, void* memory, BlockExchange* exchange) {
  BufferAllocator allocator{static_cast<char*>(memory)};
  exchange->stride = (plan.multiprocessors + 3) / 4 * 4;
  for (uint64_t*& pairs : exchange->pairs) pairs = allocator.take<uint64_t>(batch.num_ids);
  exchange->counts = allocator.take<int32_t>(kDigits * exchange->stride);
  exchange->heads = allocator.take<int32_t>(3 * exchange->stride);
  exchange->places = allocator.take<uint32_t>(batch.num_ids);
  exchange->factors = is_scaled(batch) ? allocator.take<float>(batch.num_ids) : nullptr;
  return allocator.used;
}

struct Shared {
  BlockDigits digits;
  int32_t totals[kDigits];   // counts of all blocks
  int32_t earlier[kDigits];  // counts of earlier blocks
  int32_t starts[kDigits];   // first place of this block's ids with each digit
  int32_t warp_sums[kDigits / 32];
  int32_t warp_heads[3][kMaxWarps];
  int32_t heads_before[3];
  int32_t heads_all[3];
};

struct MediumSortItem {
  uint32_t key;
  int32_t position;
};

__device__ __forceinline__ MediumSortItem item_of(uint64_t pair) {
  return {static_cast<uint32_t>(pair >> 32), static_cast<int32_t>(static_cast<uint32_t>(pair))};
}

__device__ __forceinline__ uint64_t read_pair(const uint64_t* pair) {
  return __ldcg(reinterpret_cast<const unsigned long long*>(pair));
}

// Sums a row of [stride] counts over all blocks and over earlier blocks, with four lanes.
__device__ __forceinline__ void sum_blocks(const int32_t* row, int blocks, int* all, int* before) {
  const int block = blockIdx.x;
  *all = *before = 0;
  for (int first = threadIdx.x % 4 * 4; first < blocks; first += 16) {
    const int4 four = __ldcg(reinterpret_cast<const int4*>(row + first));
    const int counts[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (first + i < blocks) *all += counts[i];
      if (first + i < block) *before += counts[i];
    }
  }
#pragma unroll
  for (int step = 2; step > 0; step /= 2) {
    *all += __shfl_xor_sync(kAllLanes, *all, step);
    *before += __shfl_xor_sync(kAllLanes, *before, step);
  }
}

// One pass, which sorts by 8 bits of the key and is stable. Item `at` of the order belongs to
// thread at % per of block at / per. here: whether the item exists.
__device__ __forceinline__ void sort_pass(cg::grid_group& grid, Shared& shared,
                                          const BlockExchange& exchange, uint64_t* to, int shift,
                                          int at, bool here, MediumSortItem& item) {
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
  const int blocks = gridDim.x;
  const uint32_t digit = item.key >> shift & (kDigits - 1);
  int ranks[1];
  count_digits<1>(&shared.digits, {digit}, here, ranks);
  if (thread < kDigits) {
    exchange.counts[thread * exchange.stride + blockIdx.x] = shared.digits.all[thread];
  }
  grid.sync();
  for (int d = thread / 4; d < kDigits; d += static_cast<int>(blockDim.x) / 4) {
    int all, before;
    sum_blocks(exchange.counts + d * exchange.stride, blocks, &all, &before);
    if (thread % 4 == 0) {
      shared.totals[d] = all;
      shared.earlier[d] = before;
    }
  }
  __syncthreads();
  int32_t all = 0, sum = 0;
  if (thread < kDigits) {
    all = shared.totals[thread];
    sum = inclusive_scan(all);
    if (lane == 31) shared.warp_sums[warp] = sum;
  }
  __syncthreads();
  if (thread < kDigits) {
    int32_t start = sum - all + shared.earlier[thread];
    for (int w = 0; w < warp; ++w) start += shared.warp_sums[w];
    shared.starts[thread] = start;
  }
  __syncthreads();
  if (here) {
    to[shared.starts[digit] + shared.digits.before[warp][digit] + ranks[0]] =
        static_cast<uint64_t>(item.key) << 32 | static_cast<uint32_t>(item.position);
  }
  grid.sync();
  if (here) item = item_of(read_pair(to + at));
}

// blockDim.x: a multiple of 128, at least kDigits.
__global__ void __launch_bounds__(kMaxThreads, 1)
    index_grid(IndexInput in, Index index, BlockExchange exchange, int per, int bits) {
  __shared__ Shared shared;
  begin_dependent_kernel();
  cg::grid_group grid = cg::this_grid();
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
  const int block = blockIdx.x, blocks = gridDim.x;
  const int warps = blockDim.x / 32;
  const int n = static_cast<int>(in.batch.num_ids);
  const int at = block * per + thread;
  const bool here = thread < per && at < n;
  const auto outside = static_cast<uint32_t>(in.num_keys);
  clear_on_the_way(in);
  MediumSortItem item = {0xffffffffu, at};
  if (here) {
    const int64_t bag = bag_between(in.batch.offsets, 0, in.batch.num_bags(), at);
    const RowPosition place = place_of(in, at, bag);
    item.key = static_cast<uint32_t>(key_of(in, in.batch.ids[at], bag));
    exchange.places[at] = place.row;
    if (exchange.factors != nullptr) exchange.factors[at] = place.factor;
  }
  int pass = 1;
  for (int shift = 0; shift < bits; shift += 8) {
    pass ^= 1;
    sort_pass(grid, shared, exchange, exchange.pairs[pass], shift, at, here, item);
  }

  const uint64_t* const sorted = exchange.pairs[pass];
  const bool inside = here && item.key != outside;
  const uint32_t previous = here && at > 0 ? item_of(read_pair(sorted + at - 1)).key : outside;
  const uint32_t next = here && at + 1 < n ? item_of(read_pair(sorted + at + 1)).key : outside;
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
    if (lane == 31) exchange.heads[warp * exchange.stride + block] = sum;
  }
  grid.sync();
  if (thread < 32) {  // all lanes of a warp take part; the first three groups of four lanes sum
    int all, before;
    const int row = min(thread / 4, 2);
    sum_blocks(exchange.heads + row * exchange.stride, blocks, &all, &before);
    if (thread < 12 && thread % 4 == 0) {
      shared.heads_all[row] = all;
      shared.heads_before[row] = before;
    }
  }
  __syncthreads();
  const unsigned up_to = lane == 31 ? kAllLanes : (2u << lane) - 1;
  s.at = at;
  s.position = item.position;
  s.distinct = shared.heads_before[0] + shared.warp_heads[0][warp] + __popc(ids & up_to) - 1;
  s.prefix = shared.heads_before[1] + shared.warp_heads[1][warp] + __popc(prefixes & up_to) - 1;
  s.slot = shared.heads_before[2] + shared.warp_heads[2][warp] + __popc(slots & up_to) - 1;
  if (block == 0 && thread == 0) {
    write_counts(in, index, shared.heads_all[0], shared.heads_all[1], shared.heads_all[2]);
  }
  if (!here) return;
  const uint32_t place = __ldcg(exchange.places + item.position);
  const float factor =
      exchange.factors != nullptr ? __ldcg(exchange.factors + item.position) : 1.0f;
  if (inside) {
    write_sorted(in, index, s, parts, place, factor);
  } else {
    write_outside(index, at, item.position, place);
  }
}

}  // namespace

bool is_medium(const Plan& plan, const BatchCuda& batch) {
  return plan.cooperative && !is_small(plan, batch) && plan.num_keys < 0xffffffffu &&
         batch.num_ids <= static_cast<int64_t>(plan.multiprocessors) * kMaxThreads;
}

size_t medium_scratch_bytes(const Plan& plan, const BatchCuda& batch) {
  BlockExchange exchange;
  return allocate(plan, batch, nullptr, &exchange);
}

void index_medium(const Plan& plan, const IndexInput& in, const Index& index, void* scratch,
                  cudaStream_t stream) {
  BlockExchange exchange;
  allocate(plan, in.batch, scratch, &exchange);
  const int n = static_cast<int>(in.batch.num_ids);
  const int per = (n + plan.multiprocessors - 1) / plan.multiprocessors;
  const int threads = max(kDigits, (per + 127) / 128 * 128);
  int bits = 1;
  while ((uint64_t{1} << bits) <= in.num_keys) ++bits;
  LaunchShape shape = {dim3(static_cast<unsigned>((n + per - 1) / per)), threads};
  shape.together = true;
  launch_dependent(index_grid, shape, stream, in, index, exchange, per, bits);
}

}  // namespace torchrec_hkv::tensor_train::cuda
