#include "common/cuda_check.h"
#include "hash_table/bucket_cuda.cuh"
#include "hash_table/kernels.h"
#include "hash_table/pool_tiles_cuda.h"
#include "hash_table/row_vector.cuh"

namespace torchrec_hkv::hash_table::cuda {
namespace {

// One bag of one feature, as a warp works on it.
struct Bag {
  int64_t first;  // positions [first, last)
  int64_t last;
  float scale;     // of the whole bag
  int32_t column;  // first column in the output
  int64_t sample;
};

__device__ __forceinline__ Bag bag_at(const Batch& batch, int64_t number, bool mean) {
  // Numbers of bags fit 32 bits, whose division is much quicker.
  const uint32_t feature = static_cast<uint32_t>(number) / static_cast<uint32_t>(batch.batch_size);
  Bag bag;
  bag.sample = number - feature * batch.batch_size;
  bag.first = batch.offsets[number];
  bag.last = batch.offsets[number + 1];
  bag.scale = mean && bag.last > bag.first ? 1.0f / static_cast<float>(bag.last - bag.first) : 1.0f;
  bag.column = batch.feature_columns[feature];
  return bag;
}

template <int kWidth>
__device__ __forceinline__ Columns<kWidth> row_or_initial(const TableView& table, int64_t slot,
                                                          int64_t id, int32_t column) {
  return slot != kNoSlot
             ? Columns<kWidth>::load(table.rows.type, table.row(slot - table.first_slot), column)
             : Columns<kWidth>::initial(table.initial_rows, id, table.column_offset + column);
}

template <int kWidth>
__device__ void pool_bag(const TableView& table, const Batch& batch, const int64_t* slots,
                         const float* weights, const Bag& bag, float* to) {
  const int lane = threadIdx.x % kWarp;
  for (int32_t column = lane * kWidth; column < table.dim(); column += kWarp * kWidth) {
    Columns<kWidth> sum = Columns<kWidth>::zero();
#pragma unroll 4
    for (int64_t at = bag.first; at < bag.last; ++at) {
      const float scale = weights != nullptr ? weights[at] * bag.scale : bag.scale;
      sum.add(scale, row_or_initial<kWidth>(table, slots[at], batch.ids[at], column));
    }
    sum.store(to + column);
  }
}

constexpr int kBagsOfWarp = 4;

// Has the rows of a warp's bags brought into the second-level cache all at once: a lane an id.
__device__ __forceinline__ void prefetch_rows(const TableView& table, const int64_t* slots,
                                              int64_t first, int64_t last) {
  const uint32_t bytes = static_cast<uint32_t>(table.dim()) * element_size(table.rows.type);
  if (bytes % 16 != 0) return;
  constexpr int64_t kMost = 2 * kWarp;  // of long bags the first ids will do
  for (int64_t at = first + threadIdx.x % kWarp; at < min(last, first + kMost); at += kWarp) {
    const int64_t slot = slots[at];
    if (slot == kNoSlot) continue;
    const int64_t frame = table.frames.frame_of(slot - table.first_slot);
    if (!table.in_hbm(frame)) continue;
    prefetch_l2(table.rows.at(slot - table.first_slot, frame), bytes);
  }
}

// A warp takes a few neighbouring bags.
__global__ void __launch_bounds__(kThreads)
    pool_kernel(const TableView* __restrict__ tables, Batch batch,
                const int64_t* __restrict__ slots, Pooling pooling, Output<float> out) {
  const int64_t first =
      (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) / kWarp * kBagsOfWarp;
  const int64_t end = min(first + kBagsOfWarp, batch.num_features * batch.batch_size);
  if (first >= end) return;
  const int64_t feature = first / batch.batch_size;
  const int64_t last_of_feature = min(end, (feature + 1) * batch.batch_size);
  prefetch_rows(tables[batch.feature_tables[feature]], slots, batch.offsets[first],
                batch.offsets[last_of_feature]);
  for (int64_t number = first; number < end; ++number) {
    const Bag bag = bag_at(batch, number, pooling.mean);
    const TableView& table = tables[batch.feature_tables[number / batch.batch_size]];
    float* to = out.data + bag.sample * out.stride + bag.column;
    if (four_wide(table.dim(), bag.column, out.stride)) {
      pool_bag<4>(table, batch, slots, pooling.weights, bag, to);
    } else {
      pool_bag<1>(table, batch, slots, pooling.weights, bag, to);
    }
  }
}

template <int kWidth>
__device__ void weights_grad_bag(const TableView& table, const Batch& batch, const int64_t* slots,
                                 const Bag& bag, const float* from, float* weights_grad) {
  const int lane = threadIdx.x % kWarp;
  for (int64_t at = bag.first; at < bag.last; ++at) {
    float dot = 0.0f;
    for (int32_t column = lane * kWidth; column < table.dim(); column += kWarp * kWidth) {
      dot += Columns<kWidth>::load(from + column)
                 .dot(row_or_initial<kWidth>(table, slots[at], batch.ids[at], column));
    }
    dot = warp_sum(dot);
    if (lane == 0) weights_grad[at] = dot * bag.scale;
  }
}

__global__ void __launch_bounds__(kThreads)
    weights_grad_kernel(const TableView* __restrict__ tables, Batch batch,
                        const int64_t* __restrict__ slots, bool mean, Output<const float> grad,
                        float* __restrict__ weights_grad) {
  const int64_t number = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) / kWarp;
  if (number >= batch.num_features * batch.batch_size) return;
  const Bag bag = bag_at(batch, number, mean);
  const TableView& table = tables[batch.feature_tables[number / batch.batch_size]];
  const float* from = grad.data + bag.sample * grad.stride + bag.column;
  if (four_wide(table.dim(), bag.column, grad.stride)) {
    weights_grad_bag<4>(table, batch, slots, bag, from, weights_grad);
  } else {
    weights_grad_bag<1>(table, batch, slots, bag, from, weights_grad);
  }
}

__global__ void __launch_bounds__(kThreads)
    initial_rows_kernel(InitialRows init, const int64_t* __restrict__ ids, int64_t values,
                        int32_t dim, int32_t column_offset, float* __restrict__ out) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= values) return;
  out[i] = initial_value(init, ids[i / dim], static_cast<uint32_t>(column_offset + i % dim));
}

}  // namespace

void pool_rows(const TableView* tables, const Batch& batch, const int64_t* slots, Pooling pooling,
               Output<float> out, const GroupShape& shape, cudaStream_t stream) {
  const int64_t bags = batch.num_features * batch.batch_size;
  if (bags == 0) return;
  if (shape.four_wide && out.stride % 4 == 0) {
    pool_four_wide(tables, batch, slots, pooling, out, shape, stream);
    return;
  }
  const int64_t warps = (bags + kBagsOfWarp - 1) / kBagsOfWarp;
  pool_kernel<<<grid_for(warps * kWarp), kThreads, 0, stream>>>(tables, batch, slots, pooling, out);
  HKV_CUDA_CHECK_LAUNCH();
}

void pool_weights_grad(const TableView* tables, const Batch& batch, const int64_t* slots, bool mean,
                       Output<const float> grad, float* weights_grad, cudaStream_t stream) {
  const int64_t bags = batch.num_features * batch.batch_size;
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
