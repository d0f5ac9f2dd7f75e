// Bags on the GPU, for rows of any type, dim and location.
#pragma once

#include <cstdint>

#include "hash_table/cuda/bucket.cuh"
#include "hash_table/cuda/offsets.cuh"
#include "hash_table/cuda/row_vector.cuh"
#include "hash_table/table_view.h"

namespace torchrec_hkv::hash_table::cuda {

// One bag of one feature, for a tile of lanes.
struct Bag {
  int64_t first;  // positions [first, last)
  int64_t last;
  float scale;  // of the whole bag
  int32_t feature;
  int64_t output;  // position of its outputs
};

// A bag with invalid offsets is reported, and has no ids.
template <int kLanes>
__device__ __forceinline__ Bag bag_at(const Batch& batch, int64_t number, bool mean,
                                      int64_t stride) {
  Bag bag;
  bag.feature = batch.feature_of_bag(number);
  bag.first = batch.offsets[number];
  bag.last = batch.offsets[number + 1];
  if (is_bad_bag(batch, number, bag.first, bag.last)) {
    if (threadIdx.x % kLanes == 0) refuse_bag(batch, number, bag.first, bag.last);
    bag.first = bag.last = 0;
  }
  bag.scale = mean && bag.last > bag.first ? 1.0f / static_cast<float>(bag.last - bag.first) : 1.0f;
  bag.output = batch.output_of(bag.feature, number - batch.first_bag(bag.feature), stride);
  return bag;
}

template <int kWidth>
__device__ __forceinline__ Columns<kWidth> row_or_initial(const TableView& table, int64_t slot,
                                                          int64_t id, int32_t column) {
  return table.has(slot)
             ? Columns<kWidth>::load_any(table.rows.type, table.row(slot - table.first_slot),
                                         column)
             : Columns<kWidth>::initial(table.initial_rows, id, table.column_offset + column);
}

template <int kLanes, int kWidth>
__device__ void pool_bag(const TableView& table, const Batch& batch, const int64_t* slots,
                         const float* weights, const Bag& bag, const Output<char>& out) {
  const int lane = threadIdx.x % kLanes;
  for (int32_t column = lane * kWidth; column < table.dim(); column += kLanes * kWidth) {
    Columns<kWidth> sum = Columns<kWidth>::zero();
#pragma unroll 4
    for (int64_t at = bag.first; at < bag.last; ++at) {
      const float scale = weights != nullptr ? weights[at] * bag.scale : bag.scale;
      sum.add(scale, row_or_initial<kWidth>(table, slots[at], batch.ids[at], column));
    }
    sum.store(out.type, out.at(bag.output), column);
  }
}

}  // namespace torchrec_hkv::hash_table::cuda
