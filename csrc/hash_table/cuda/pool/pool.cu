// Pooling on the GPU: chooses the kernel of a group. Also has the kernels for rows of any width.
#include "common/cuda_check.h"
#include "common/dependent_launch.cuh"
#include "hash_table/cuda/bucket.cuh"
#include "hash_table/cuda/pool/bag.cuh"
#include "hash_table/cuda/pool/pool_launch.h"
#include "hash_table/cuda/row_vector.cuh"
#include "hash_table/kernels.h"

namespace torchrec_hkv::hash_table::cuda {
namespace {

constexpr int kBagsOfWarp = 4;

// Prefetches the rows of a warp's bags into L2, one id for each lane.
__device__ __forceinline__ void prefetch_rows(const TableView& table, const int64_t* slots,
                                              int64_t first, int64_t last) {
  const uint32_t bytes = static_cast<uint32_t>(table.rows.bytes());
  if (bytes % 16 != 0) return;
  constexpr int64_t kMax = 2 * kWarp;  // long bags: the first ids are enough
  const int64_t end = min(last, first + kMax);
  for (int64_t at = first + threadIdx.x % kWarp; at < end; at += kWarp) {
    const int64_t slot = slots[at];
    if (!table.has(slot)) continue;
    const int64_t frame = table.frames.frame_of(slot - table.first_slot);
    if (!table.in_hbm(frame)) continue;
    prefetch_l2(table.rows.at(slot - table.first_slot, frame), bytes);
  }
}

// A warp takes a few neighbouring bags.
__global__ void __launch_bounds__(kThreads)
    pool_kernel(const TableView* __restrict__ tables, Batch batch,
                const int64_t* __restrict__ slots, Pooling pooling, Output<char> out) {
  const int64_t first =
      (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) / kWarp * kBagsOfWarp;
  const int64_t end = min(first + kBagsOfWarp, batch.num_bags);
  if (first >= end) return;
  const int32_t feature = batch.feature_of_bag(first);
  const int64_t last_of_feature = min(end, batch.first_bag(feature + 1));
  prefetch_rows(tables[batch.feature_tables[feature]], slots, max(batch.offsets[first], int64_t{0}),
                min(batch.offsets[last_of_feature], batch.num_ids));
  for (int64_t number = first; number < end; ++number) {
    const Bag bag = bag_at<kWarp>(batch, number, pooling.mean, out.stride);
    const TableView& table = tables[batch.feature_tables[bag.feature]];
    if (four_wide(table.dim(), bag.output)) {
      pool_bag<kWarp, 4>(table, batch, slots, pooling.weights, bag, out);
    } else {
      pool_bag<kWarp, 1>(table, batch, slots, pooling.weights, bag, out);
    }
  }
}

template <int kWidth>
__device__ void weights_grad_bag(const TableView& table, const Batch& batch, const int64_t* slots,
                                 const Bag& bag, const Output<const char>& grad,
                                 float* weights_grad) {
  const int lane = threadIdx.x % kWarp;
  for (int64_t at = bag.first; at < bag.last; ++at) {
    float dot = 0.0f;
    for (int32_t column = lane * kWidth; column < table.dim(); column += kWarp * kWidth) {
      dot += Columns<kWidth>::load(grad.type, grad.at(bag.output), column)
                 .dot(row_or_initial<kWidth>(table, slots[at], batch.ids[at], column));
    }
    dot = warp_sum(dot);
    if (lane == 0) weights_grad[at] = dot * bag.scale;
  }
}

__global__ void __launch_bounds__(kThreads)
    weights_grad_kernel(const TableView* __restrict__ tables, Batch batch,
                        const int64_t* __restrict__ slots, bool mean, const Output<const char> grad,
                        float* __restrict__ weights_grad) {
  const int64_t number = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) / kWarp;
  if (number >= batch.num_bags) return;
  const Bag bag = bag_at<kWarp>(batch, number, mean, grad.stride);
  const TableView& table = tables[batch.feature_tables[bag.feature]];
  if (four_wide(table.dim(), bag.output)) {
    weights_grad_bag<4>(table, batch, slots, bag, grad, weights_grad);
  } else {
    weights_grad_bag<1>(table, batch, slots, bag, grad, weights_grad);
  }
}

// As many as fit a kernel's parameters. A launch copies them, so no host memory has to stay alive,
// not even for a CUDA graph.
constexpr int64_t kFeaturesOfCopy = 128;
struct FeatureBagsChunk {
  FeatureBags of[kFeaturesOfCopy];
};

__global__ void __launch_bounds__(kFeaturesOfCopy)
    feature_bags_kernel(const __grid_constant__ FeatureBagsChunk from, int n, FeatureBags* to) {
  if (static_cast<int>(threadIdx.x) < n) to[threadIdx.x] = from.of[threadIdx.x];
}

__global__ void __launch_bounds__(kThreads)
    initial_rows_kernel(InitialRows init, const int64_t* __restrict__ ids, int64_t values,
                        int32_t dim, int32_t column_offset, float* __restrict__ out) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= values) return;
  out[i] = initial_value(init, ids[i / dim], static_cast<uint32_t>(column_offset + i % dim));
}

}  // namespace

void launch_pool(PoolKernel kernel, int lanes, int blocks, const TileLength& length,
                 const PoolCall& call, int64_t max_bags) {
  // Long tiles spread the latency of their start over many bags, but there should be several rounds
  // of tiles. If all tiles can run at once with few chunks each, they do, and leave room for
  // concurrent kernels.
  const Batch& batch = call.batch;
  const int64_t at_once = int64_t{blocks} * multiprocessors() * kPoolThreads;  // positions
  const int64_t together = max(int64_t{1}, (batch.num_ids * 4 + at_once * 3 - 1) / (at_once * 3));
  const int64_t chunks =
      together <= length.together
          ? together
          : max(int64_t{1}, min(batch.num_ids / (at_once * length.rounds), int64_t{length.most}));
  const BagTiling tiling(batch, chunks * lanes, max_bags > 0 ? max_bags : chunks * lanes);
  const int64_t threads = tiling.tiles(batch) * lanes;
  launch_dependent(kernel, static_cast<unsigned>((threads + kPoolThreads - 1) / kPoolThreads),
                   kPoolThreads, call.stream, call.tables, batch, call.slots, call.pooling,
                   call.out, tiling);
}

void write_feature_bags(FeatureBags* to, const FeatureBags* from, int64_t n, cudaStream_t stream) {
  for (int64_t first = 0; first < n; first += kFeaturesOfCopy) {
    const int64_t count = min(kFeaturesOfCopy, n - first);
    FeatureBagsChunk some;
    for (int64_t i = 0; i < count; ++i) some.of[i] = from[first + i];
    feature_bags_kernel<<<1, kFeaturesOfCopy, 0, stream>>>(some, static_cast<int>(count),
                                                           to + first);
    HKV_CUDA_CHECK_LAUNCH();
  }
}

void pool_rows(const TableView* tables, const Batch& batch, const int64_t* slots, Pooling pooling,
               Output<char> out, const GroupShape& shape, const UpdateHint* hint,
               cudaStream_t stream) {
  const int64_t bags = batch.num_bags;
  if (bags == 0) return;
  if (shape.four_wide && out.stride % 4 == 0) {
    const PoolCall call{tables, batch, slots, pooling, out, stream};
    if (shape.rows_of_8_bits()) return pool_int8(call, shape);
    if (shape.float32_rows && shape.all_wide()) return pool_wide(call);
    const bool hot = static_cast<const volatile UpdateHint*>(hint)->hot_slots != 0;
    return pool_four_wide(call, shape, hot);
  }
  const int64_t warps = (bags + kBagsOfWarp - 1) / kBagsOfWarp;
  pool_kernel<<<grid_for(warps * kWarp), kThreads, 0, stream>>>(tables, batch, slots, pooling, out);
  HKV_CUDA_CHECK_LAUNCH();
}

void pool_weights_grad(const TableView* tables, const Batch& batch, const int64_t* slots, bool mean,
                       Output<const char> grad, float* weights_grad, cudaStream_t stream) {
  const int64_t bags = batch.num_bags;
  if (bags == 0) return;
  weights_grad_kernel<<<grid_for(bags * kWarp), kThreads, 0, stream>>>(tables, batch, slots, mean,
                                                                       grad, weights_grad);
  HKV_CUDA_CHECK_LAUNCH();
}

void initial_rows(const InitialRows& init, const int64_t* ids, int64_t n, int32_t dim,
                  int32_t column_offset, float* out, cudaStream_t stream) {
  if (n == 0) return;
  initial_rows_kernel<<<grid_for(n * dim), kThreads, 0, stream>>>(init, ids, n * dim, dim,
                                                                  column_offset, out);
  HKV_CUDA_CHECK_LAUNCH();
}

}  // namespace torchrec_hkv::hash_table::cuda
