// Pooling by gathering the rows of distinct ids: what a lookup does where most ids repeat.
#include "common/cuda_check.h"
#include "tensor_train/repeats.cuh"
#include "tensor_train/tensor_core.cuh"

namespace torchrec_hkv::tensor_train::cuda {
namespace {

constexpr int kMostThreads = 256;

struct GatherInput {
  Batch batch;
  const TableView* tables;
  const Counts* counts;
  const int32_t* distinct_of;
  const float* rows;
  int32_t widest;
  int64_t num_bags;  // or positions
  bool always;       // whatever the number of repeats
};

// kLanes threads a row, kWidth columns a thread; kGroups rows of a bag at once.
template <int kLanes, int kWidth, int kGroups>
__global__ void __launch_bounds__(kMostThreads) gather_kernel(GatherInput in, float* out) {
  constexpr int kTeam = kLanes * kGroups;  // threads of a bag
  static_assert(kTeam <= 32);
  enter_chain();
  if (!in.always && in.counts->gather == 0) return;
  const Batch& batch = in.batch;
  const int64_t bag = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) / kTeam;
  if (bag >= in.num_bags) return;
  const int lane = threadIdx.x % kTeam;
  const int group = lane / kLanes;
  const unsigned lanes =
      kTeam == 32 ? kAllLanes : ((1u << (kTeam % 32)) - 1) << (threadIdx.x % 32 / kTeam * kTeam);
  int64_t begin = bag, end = bag + 1;
  float* to = out + bag * batch.stride;
  int32_t dim = in.widest;
  float scale = 1.0f;
  if (batch.pooled) {
    const uint32_t feature = feature_of(batch, bag);
    begin = batch.offsets[bag];
    end = batch.offsets[bag + 1];
    const int64_t sample = bag - static_cast<int64_t>(feature) * batch.batch_size;
    to = out + sample * batch.stride + batch.feature_columns[feature];
    dim = in.tables[batch.feature_tables[feature]].dim;
    if (batch.mean && end > begin) scale = 1.0f / static_cast<float>(end - begin);
  } else {
    dim = in.tables[0].dim;
  }
  for (int first = 0; first < dim; first += kLanes * kWidth) {
    const int column = first + lane % kLanes * kWidth;
    float sum[kWidth] = {};
    for (int64_t base = begin; base < end; base += kTeam) {
      int32_t mine = -1;
      float weight = scale;
      if (base + lane < end) {
        mine = in.distinct_of[base + lane];
        if (batch.weights != nullptr) weight *= batch.weights[base + lane];
      }
      const int limit = static_cast<int>(min(static_cast<int64_t>(kTeam), end - base));
#pragma unroll 8
      for (int j = 0; j < limit; j += kGroups) {  // lanes behind the end have row -1
        const int32_t row = __shfl_sync(lanes, mine, j + group, kTeam);
        const float factor = __shfl_sync(lanes, weight, j + group, kTeam);
        if (row < 0 || column >= dim) continue;
        const float* from = in.rows + static_cast<size_t>(row) * in.widest + column;
        if constexpr (kWidth == 4) {
          const float4 v = *reinterpret_cast<const float4*>(from);
          sum[0] += v.x * factor;
          sum[1] += v.y * factor;
          sum[2] += v.z * factor;
          sum[3] += v.w * factor;
        } else {
          sum[0] += *from * factor;
        }
      }
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

// Few bags are spread over the device in small blocks, and over the lanes of a warp. Many end
// sooner in large blocks where there is nothing to gather.
template <int kLanes, int kWidth>
void launch(const GatherInput& in, float* out, cudaStream_t stream) {
  auto run = [&](auto kernel, int team, int threads) {
    const int64_t blocks = (in.num_bags * team + threads - 1) / threads;
    if (blocks == 0) return;
    launch_chained(kernel, {dim3(static_cast<unsigned>(blocks)), threads}, stream, in, out);
  };
  if (in.batch.num_ids <= kSmallBatch) {
    run(gather_kernel<kLanes, kWidth, 32 / kLanes>, 32, 64);
  } else {
    run(gather_kernel<kLanes, kWidth, 1>, kLanes, kMostThreads);
  }
}

}  // namespace

void gather_rows(const Plan& plan, const Batch& batch, const Index& index, const float* rows,
                 bool always, float* out, cudaStream_t stream) {
  const GatherInput in = {batch,
                          plan.tables,
                          index.counts,
                          index.distinct_of,
                          rows,
                          plan.widest,
                          batch.pooled ? batch.num_bags() : batch.num_ids,
                          always};
  if (unit_of(plan, batch) == 1) {
    launch<32, 1>(in, out, stream);
  } else if (plan.widest <= 32) {
    launch<8, 4>(in, out, stream);
  } else if (plan.widest <= 64) {
    launch<16, 4>(in, out, stream);
  } else {
    launch<32, 4>(in, out, stream);
  }
}

}  // namespace torchrec_hkv::tensor_train::cuda
