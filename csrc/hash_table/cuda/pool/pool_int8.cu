// A tile of lanes pools a bag. A lane has four columns, which are one word of a row. The words and
// scales of several rows are in flight. Bags of other tables of the group use the general code.
#include "common/cuda_check.h"
#include "hash_table/cuda/pool/bag.cuh"
#include "hash_table/cuda/pool/pool_int8.h"

namespace torchrec_hkv::hash_table::cuda {
namespace {

constexpr int kAhead = 8;  // rows

// Four stored columns of a row.
struct Word {
  uint32_t bytes;
  float scale;  // of the row
};

template <int kLanes>
__device__ __forceinline__ void pool_words(const TableView& table, const Batch& batch,
                                           const int64_t* __restrict__ slots, const float* weights,
                                           const Bag& bag, const Output<char>& out) {
  const int lane = threadIdx.x % kLanes;
  for (int32_t column = lane * 4; column < table.dim(); column += kLanes * 4) {
    Columns<4> sum = Columns<4>::zero();
    for (int64_t first = bag.first; first < bag.last; first += kAhead) {
      const auto number = static_cast<int>(min(int64_t{kAhead}, bag.last - first));
      int64_t its[kAhead];
      Word words[kAhead];
#pragma unroll
      for (int k = 0; k < kAhead; ++k) its[k] = k < number ? slots[first + k] : kNoSlot;
#pragma unroll
      for (int k = 0; k < kAhead; ++k) {
        if (!table.has(its[k])) continue;
        const char* const row = table.row(its[k] - table.first_slot);
        words[k].scale = *reinterpret_cast<const float*>(row);
        words[k].bytes = *reinterpret_cast<const uint32_t*>(row + kInt8Start + column);
      }
#pragma unroll
      for (int k = 0; k < kAhead; ++k) {
        if (k >= number) break;
        const float by = weights != nullptr ? weights[first + k] * bag.scale : bag.scale;
        if (table.has(its[k])) {
          sum.add(by, Columns<4>::load_int8(reinterpret_cast<const char*>(&words[k].bytes),
                                            words[k].scale));
        } else {
          sum.add(by, Columns<4>::initial(table.initial_rows, batch.ids[first + k],
                                          table.column_offset + column));
        }
      }
    }
    sum.store(out.type, out.at(bag.output), column);
  }
}

template <int kLanes>
__global__ void __launch_bounds__(kThreads)
    pool_int8_kernel(const TableView* __restrict__ tables, const Batch batch,
                     const int64_t* __restrict__ slots, const Pooling pooling,
                     const Output<char> out) {
  const int64_t number = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) / kLanes;
  if (number >= batch.num_bags) return;
  const Bag bag = bag_at<kLanes>(batch, number, pooling.mean, out.stride);
  const TableView& table = tables[batch.feature_tables[bag.feature]];
  if (!four_wide(table.dim(), bag.output)) {
    pool_bag<kLanes, 1>(table, batch, slots, pooling.weights, bag, out);
  } else if (table.rows.type == RowType::kInt8) {
    pool_words<kLanes>(table, batch, slots, pooling.weights, bag, out);
  } else {
    pool_bag<kLanes, 4>(table, batch, slots, pooling.weights, bag, out);
  }
}

}  // namespace

void pool_int8(const TableView* tables, const Batch& batch, const int64_t* slots, Pooling pooling,
               Output<char> out, const GroupShape& shape, cudaStream_t stream) {
  const auto launch = [&]<int kLanes>() {
    pool_int8_kernel<kLanes><<<grid_for(batch.num_bags * kLanes), kThreads, 0, stream>>>(
        tables, batch, slots, pooling, out);
    HKV_CUDA_CHECK_LAUNCH();
  };
  if (shape.widest <= 32) {
    launch.template operator()<8>();
  } else if (shape.widest <= 64) {
    launch.template operator()<16>();
  } else {
    launch.template operator()<32>();
  }
}

}  // namespace torchrec_hkv::hash_table::cuda
