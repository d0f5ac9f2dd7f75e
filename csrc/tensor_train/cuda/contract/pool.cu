// Computes the output of a lookup from rows in scratch memory. If most ids repeat, bags gather the
// rows of their distinct ids. Otherwise the rows of repeated ids are added to the output, which
// already has the rows of ids that occur once. Only the device knows the case, so one kernel has
// both.

#include "common/scan.cuh"
#include "tensor_train/cuda/contract/tensor_core.cuh"
#include "tensor_train/cuda/index/repeats.cuh"

namespace torchrec_hkv::tensor_train::cuda {
namespace {

constexpr int kMaxThreads = 256;
constexpr int kMaxRunning = 2048;  // threads per multiprocessor
constexpr int kBlocks = 5;         // blocks per multiprocessor; gathering waits for rows
constexpr int kSpan = 128;         // sorted positions that a warp processes at once

// Lists the repeats among the kSpan positions from `first` on, in order, for the warp. Returns
// their number.
__device__ __forceinline__ int list_repeats(const RepeatsInput& in, int64_t first, uint8_t* list) {
  static_assert(kSpan == 4 * 32, "four positions a lane");
  const int lane = threadIdx.x % 32;
  const int64_t at = first + 4 * lane;
  int32_t slots[4] = {kNoSlot, kNoSlot, kNoSlot, kNoSlot};
  if (at + 4 <= in.num_ids) {
    *reinterpret_cast<int4*>(slots) = *reinterpret_cast<const int4*>(in.slots + at);
  } else {
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      if (at + k < in.num_ids) slots[k] = in.slots[at + k];
    }
  }
  int num_valid = 0;
#pragma unroll
  for (int k = 0; k < 4; ++k) num_valid += slots[k] >= 0 ? 1 : 0;
  int to = inclusive_scan(num_valid);
  const int all = __shfl_sync(kAllLanes, to, 31);
  to -= num_valid;
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    if (slots[k] >= 0) list[to++] = static_cast<uint8_t>(4 * lane + k);
  }
  __syncwarp();
  return all;
}

struct GatherInput {
  BatchCuda batch;
  const TableCuda* tables;
  const IndexCounts* counts;
  const int32_t* distinct_of;
  const float* rows;
  int32_t widest;
  int64_t num_bags;  // number of bags, or of positions without pooling
};

// kLanes threads per row, kWidth columns per thread, kGroups rows of a bag at once.
template <int kLanes, int kWidth, int kGroups, bool kWeighted>
__device__ __forceinline__ void gather_bags(const GatherInput& in, float* out) {
  constexpr int kTeam = kLanes * kGroups;  // threads per bag
  constexpr int kAhead = 4;                // rows per lane that are read before the first is used
  static_assert(kTeam <= 32);
  const BatchCuda& batch = in.batch;
  const int64_t bag = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) / kTeam;
  if (bag >= in.num_bags) return wait_for_kernel_before();
  const int lane = threadIdx.x % kTeam;
  const int group = lane / kLanes;
  const unsigned lanes =
      kTeam == 32 ? kAllLanes : ((1u << (kTeam % 32)) - 1) << (threadIdx.x % 32 / kTeam * kTeam);
  auto begin = static_cast<uint32_t>(bag), end = begin + 1;  // positions are fewer than 2^31
  float* to = out + bag * batch.stride;
  int32_t dim = in.widest;
  float scale = 1.0f;
  if (batch.pooled) {
    const uint32_t feature = feature_of(batch, bag);
    const int64_t from = batch.offsets[bag];
    begin = static_cast<uint32_t>(from);
    // Compared before the conversion to 32 bits, so that a negative offset does not become a large
    // offset.
    end = static_cast<uint32_t>(max(from, batch.offsets[bag + 1]));
    const int64_t sample = bag - static_cast<int64_t>(feature) * batch.batch_size;
    to = out + sample * batch.stride + batch.feature_columns[feature];
    dim = in.tables[batch.feature_tables[feature]].dim;
    if (batch.mean && end > begin) scale = 1.0f / static_cast<float>(end - begin);
  } else {
    dim = in.tables[0].dim;
  }
  // Loads the first ids before it waits for rows.
  auto read = [&](uint32_t at, int32_t* row, float* weight) {
    *row = -1;
    *weight = scale;  // multiplied with the weight if there are weights
    if (at >= end) return;
    *row = in.distinct_of[at];
    if (kWeighted) *weight *= batch.weights[at];
  };
  int32_t first_row;
  float first_weight;
  read(begin + lane, &first_row, &first_weight);
  wait_for_kernel_before();
  for (int first = 0; first < dim; first += kLanes * kWidth) {
    const int column = first + lane % kLanes * kWidth;
    float sum[kWidth] = {};
    const auto* const rows = reinterpret_cast<const char*>(in.rows + column);
    const auto step = static_cast<uint32_t>(in.widest) * 4u;  // bytes per row
    const bool exists = column < dim;
    for (uint32_t base = begin; base < end; base += kTeam) {
      int32_t lane_row = first_row;
      float weight = first_weight;
      if (base > begin) read(base + lane, &lane_row, &weight);
      const int limit = min(kTeam, static_cast<int>(end - base));
#pragma unroll 1
      for (int j = 0; j < limit; j += kAhead * kGroups) {  // lanes after the end have row -1
        GradColumns<kWidth> ahead[kAhead];
        float factors[kAhead];
#pragma unroll
        for (int k = 0; k < kAhead; ++k) {
          const int of = j + k * kGroups + group;
          const int32_t row = __shfl_sync(lanes, lane_row, of, kTeam);
          const float factor = kWeighted ? __shfl_sync(lanes, weight, of, kTeam) : 1.0f;
          ahead[k] = {};
          factors[k] = 1.0f;
          if (of < limit && row >= 0 && exists) {
            ahead[k].read(reinterpret_cast<const float*>(
                rows + static_cast<uint64_t>(static_cast<uint32_t>(row)) * step));
            factors[k] = factor;
          }
        }
#pragma unroll
        for (int k = 0; k < kAhead; ++k) {
#pragma unroll
          for (int i = 0; i < kWidth; ++i) sum[i] += ahead[k].v[i] * factors[k];
        }
      }
    }
    if (!kWeighted) {
#pragma unroll
      for (int i = 0; i < kWidth; ++i) sum[i] *= scale;
    }
#pragma unroll
    for (int step = kLanes; step < kTeam; step *= 2) {
#pragma unroll
      for (int i = 0; i < kWidth; ++i) sum[i] += __shfl_xor_sync(lanes, sum[i], step, kTeam);
    }
    if (group > 0 || column >= dim) continue;
    if constexpr (kWidth == 4) {
      *reinterpret_cast<float4*>(to + column) = make_float4(sum[0], sum[1], sum[2], sum[3]);
    } else {
      to[column] = sum[0];
    }
  }
}

// kLanes lanes per row, kWidth columns per lane.
template <int kLanes, int kWidth>
__device__ __forceinline__ void spread_rows(const RepeatsInput& in,
                                            const float* __restrict__ slot_rows, bool store,
                                            float* out) {
  constexpr int kAtOnce = 32 / kLanes;  // rows per warp
  constexpr int kAhead = 4;             // rows per lane that are read before the first is used
  // Small, because the rest of shared memory is the L1 cache, from which bags gather.
  __shared__ uint8_t lists[kMaxThreads / 32][kSpan];
  const int lane = threadIdx.x % 32;
  uint8_t* const list = lists[threadIdx.x / 32];
  const int64_t warps = static_cast<int64_t>(gridDim.x) * (blockDim.x / 32);
  const int64_t warp = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) / 32;
  bool waits = true;  // whether it must still wait for the rows
  for (int64_t first = warp * kSpan; first < in.num_ids; first += warps * kSpan) {
    const int all = list_repeats(in, first, list);
    if (waits) wait_for_kernel_before();
    waits = false;
    for (int base = 0; base < in.widest; base += kLanes * kWidth) {
      const int column = base + lane % kLanes * kWidth;
      for (int i = lane / kLanes; i < all; i += kAtOnce * kAhead) {
        GradColumns<kWidth> rows[kAhead];
        float* to[kAhead];
#pragma unroll
        for (int j = 0; j < kAhead; ++j) {
          to[j] = nullptr;
          if (i + j * kAtOnce >= all) continue;
          const int64_t at = first + list[i + j * kAtOnce];
          const int32_t slot = in.slots[at];
          const int32_t dim = in.slot_dims != nullptr ? in.slot_dims[slot] : in.dim;
          if (column >= dim) continue;
          rows[j].load(slot_rows + static_cast<size_t>(slot) * in.widest + column,
                       in.place_factors != nullptr ? in.place_factors[at] : 1.0f);
          to[j] = out + static_cast<size_t>(in.places[at]) * in.unit + column;
        }
#pragma unroll
        for (int j = 0; j < kAhead; ++j) {
          if (to[j] == nullptr) continue;
          if (store) {
            rows[j].store(to[j]);
          } else {
            rows[j].add_to(to[j]);
          }
        }
      }
    }
    __syncwarp();  // the list has been used
  }
  if (waits) wait_for_kernel_before();
}

// kAlways: bags gather for any number of repeats. The previous kernels let this kernel start when
// the index is complete, so it only waits for rows.
template <int kLanes, int kWidth, int kGroups, bool kAlways>
__global__ void __launch_bounds__(kMaxThreads, kBlocks)
    pool_kernel(GatherInput in, RepeatsInput repeats, bool store, float* out) {
  let_next_kernel_start();
  if (kAlways || in.counts->gather != 0) {
    if (in.batch.weights == nullptr) {
      gather_bags<kLanes, kWidth, kGroups, false>(in, out);
    } else {
      gather_bags<kLanes, kWidth, kGroups, true>(in, out);
    }
  } else {
    spread_rows<kLanes, kWidth>(repeats, in.rows, store, out);
  }
}

// If there are few bags, distributes them over the device in small blocks, and over lanes of a
// warp.
template <int kLanes, int kWidth>
void launch(const GatherInput& in, const RepeatsInput& repeats, bool always, bool store, float* out,
            cudaStream_t stream) {
  auto run = [&](auto kernel, int team, int threads) {
    int64_t blocks = (in.num_bags * team + threads - 1) / threads;
    if (!always) {
      const int64_t spans = (in.batch.num_ids + kSpan - 1) / kSpan;  // one per warp, if all run
      const int64_t most = int64_t{kMaxRunning / threads} * repeats.multiprocessors;
      blocks = max(blocks, min((spans * 32 + threads - 1) / threads, most));
    }
    if (blocks == 0) return;
    launch_dependent(kernel, {dim3(static_cast<unsigned>(blocks)), threads}, stream, in, repeats,
                     store, out);
  };
  if (in.batch.num_ids <= kSmallBatch) {
    run(pool_kernel<kLanes, kWidth, 32 / kLanes, true>, 32, 64);
  } else if (always) {
    run(pool_kernel<kLanes, kWidth, 1, true>, kLanes, kMaxThreads);
  } else {
    run(pool_kernel<kLanes, kWidth, 1, false>, kLanes, kMaxThreads);
  }
}

}  // namespace

void pool_rows(const Plan& plan, const BatchCuda& batch, const Index& index, const float* rows,
               bool always, float* out, cudaStream_t stream) {
  const GatherInput in = {batch,
                          plan.tables,
                          index.counts,
                          index.distinct_of,
                          rows,
                          plan.widest,
                          batch.pooled ? batch.num_bags() : batch.num_ids};
  const RepeatsInput repeats = repeats_of(plan, batch, index);
  const bool store = !batch.pooled;
  if (unit_of(plan, batch) == 1) {
    launch<32, 1>(in, repeats, always, store, out, stream);
  } else if (plan.widest <= 32) {
    launch<8, 4>(in, repeats, always, store, out, stream);
  } else if (plan.widest <= 64) {
    launch<16, 4>(in, repeats, always, store, out, stream);
  } else {
    launch<32, 4>(in, repeats, always, store, out, stream);
  }
}

}  // namespace torchrec_hkv::tensor_train::cuda
