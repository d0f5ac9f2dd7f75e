// The backward on the GPU: one radix sort of (slot, position) brings equal slots together; the warp
// that stands at the first of a run adds up the run's gradients in the order of the batch and
// updates the row once. No gradient is stored for each id. Deterministic.
#include <cub/device/device_radix_sort.cuh>

#include "common/cuda_check.h"
#include "hash_table/apply_row.cuh"
#include "hash_table/bucket_cuda.cuh"
#include "hash_table/kernels.h"
#include "hash_table/row_vector.cuh"

namespace torchrec_hkv::hash_table::cuda {
namespace {

// Slots are sorted as unsigned numbers of as many bits as needed; kNoSlot, masked to those bits,
// comes last.
int sort_bits(int64_t num_slots) {
  int bits = 1;
  while ((int64_t{1} << bits) <= num_slots) ++bits;
  return bits;
}

struct Scratch {
  uint64_t* keys_in;
  uint64_t* keys;
  uint32_t* positions_in;
  uint32_t* positions;
  uint32_t* bags;  // by position
  void* sort;
  size_t sort_bytes;
};

size_t aligned(size_t bytes) { return (bytes + 255) / 256 * 256; }

size_t layout(int64_t n, int64_t num_slots, char* base, Scratch* scratch) {
  size_t at = 0;
  const auto take = [&](size_t bytes) {
    char* place = base + at;
    at += aligned(bytes);
    return place;
  };
  scratch->keys_in = reinterpret_cast<uint64_t*>(take(n * sizeof(uint64_t)));
  scratch->keys = reinterpret_cast<uint64_t*>(take(n * sizeof(uint64_t)));
  scratch->positions_in = reinterpret_cast<uint32_t*>(take(n * sizeof(uint32_t)));
  scratch->positions = reinterpret_cast<uint32_t*>(take(n * sizeof(uint32_t)));
  scratch->bags = reinterpret_cast<uint32_t*>(take(n * sizeof(uint32_t)));
  scratch->sort_bytes = 0;
  HKV_CUDA_CHECK(cub::DeviceRadixSort::SortPairs(
      nullptr, scratch->sort_bytes, static_cast<const uint64_t*>(nullptr),
      static_cast<uint64_t*>(nullptr), static_cast<const uint32_t*>(nullptr),
      static_cast<uint32_t*>(nullptr), n, 0, sort_bits(num_slots)));
  scratch->sort = take(scratch->sort_bytes);
  return at;
}

// The update counts before its rows are updated.
__device__ void count_update(const TableView* tables, int32_t num_tables) {
  if (blockIdx.x != 0) return;
  for (int32_t t = threadIdx.x; t < num_tables; t += kThreads) ++*tables[t].optimizer_step;
}

__global__ void __launch_bounds__(kThreads)
    count_kernel(const TableView* tables, int32_t num_tables) {
  count_update(tables, num_tables);
}

// A warp a bag: writes each position's sort key and its bag.
__global__ void __launch_bounds__(kThreads)
    prepare_kernel(const TableView* tables, int32_t num_tables, Batch batch,
                   const int64_t* __restrict__ slots, uint64_t no_slot, uint64_t* __restrict__ keys,
                   uint32_t* __restrict__ positions, uint32_t* __restrict__ bags) {
  count_update(tables, num_tables);
  const int64_t bag = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) / kWarp;
  if (bag >= batch.num_features * batch.batch_size) return;
  const int64_t end = batch.offsets[bag + 1];
  for (int64_t at = batch.offsets[bag] + threadIdx.x % kWarp; at < end; at += kWarp) {
    const int64_t slot = slots[at];
    keys[at] = slot == kNoSlot ? no_slot : static_cast<uint64_t>(slot);
    positions[at] = static_cast<uint32_t>(at);
    bags[at] = static_cast<uint32_t>(bag);
  }
}

// What the reduction of one run reads.
struct Run {
  const uint32_t* positions;  // of the run
  int64_t length;
  const uint32_t* bags;
};

template <int kWidth>
__device__ __forceinline__ Columns<kWidth> sum_run(const Run& run, const Batch& batch,
                                                   const Pooling& pooling,
                                                   const Output<const float>& grad,
                                                   int32_t column) {
  Columns<kWidth> sum = Columns<kWidth>::zero();
#pragma unroll 4
  for (int64_t k = 0; k < run.length; ++k) {
    const uint32_t position = run.positions[k];
    const uint32_t bag = run.bags[position];
    const int32_t feature = static_cast<int32_t>(bag / batch.batch_size);
    const int64_t sample = bag - feature * batch.batch_size;
    float scale = pooling.weights != nullptr ? pooling.weights[position] : 1.0f;
    if (pooling.mean) {
      scale *= 1.0f / static_cast<float>(batch.offsets[bag + 1] - batch.offsets[bag]);
    }
    sum.add(scale, Columns<kWidth>::load(grad.data + sample * grad.stride +
                                         batch.feature_columns[feature] + column));
  }
  return sum;
}

// Rows wider than a warp's registers are summed again whenever their gradient is asked for.
template <int kWidth, bool kColumnStates>
__device__ __forceinline__ void update_row(const TableView& table, int64_t slot, const Run& run,
                                           const Batch& batch, const Pooling& pooling,
                                           const Output<const float>& grad,
                                           const OptimizerConfig& optimizer, float learning_rate) {
  const int32_t mine = threadIdx.x % kWarp * kWidth;
  const bool one_pass = table.dim() <= kWarp * kWidth;
  Columns<kWidth> sum = Columns<kWidth>::zero();
  if (one_pass && mine < table.dim()) sum = sum_run<kWidth>(run, batch, pooling, grad, mine);
  const auto gradient = [&](int32_t column) {
    return one_pass ? sum : sum_run<kWidth>(run, batch, pooling, grad, column);
  };
  apply_row<kWidth, kColumnStates>(table, slot, optimizer, learning_rate, gradient);
}

__device__ bool all_four_wide(const Run& run, const TableView& table, const Batch& batch,
                              int64_t stride) {
  if (table.states.width > 1 && table.states.width % 4 != 0) return false;
  // Features of one table may stand at columns of different alignment; dims that are multiples of
  // four in every table of the group make this true for all.
  for (int64_t k = 0; k < run.length; ++k) {
    const uint32_t bag = run.bags[run.positions[k]];
    if (!four_wide(table.dim(), batch.feature_columns[bag / batch.batch_size], stride))
      return false;
  }
  return true;
}

template <bool kColumnStates>
__global__ void __launch_bounds__(kThreads, kColumnStates ? 3 : 4)
    update_kernel(const TableView* __restrict__ tables, Batch batch, Pooling pooling,
                  Output<const float> grad, OptimizerConfig optimizer,
                  const float* __restrict__ learning_rate, uint64_t no_slot, bool group_four_wide,
                  const uint64_t* __restrict__ keys, const uint32_t* __restrict__ positions,
                  const uint32_t* __restrict__ bags) {
  const int64_t at = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) / kWarp;
  if (at >= batch.num_ids) return;
  const uint64_t slot = keys[at];
  if (slot == no_slot || (at > 0 && keys[at - 1] == slot)) return;
  // The run's end: 32 keys at a time.
  int64_t end = at + 1;
  for (;;) {
    const int64_t look = end + threadIdx.x % kWarp;
    const unsigned same = __ballot_sync(kAllLanes, look < batch.num_ids && keys[look] == slot);
    if (same != kAllLanes) {
      end += __ffs(static_cast<int>(~same)) - 1;
      break;
    }
    end += kWarp;
  }
  const Run run{positions + at, end - at, bags};
  const TableView& table = tables[batch.feature_tables[bags[positions[at]] / batch.batch_size]];
  const int64_t local = static_cast<int64_t>(slot) - table.first_slot;
  if (group_four_wide || all_four_wide(run, table, batch, grad.stride)) {
    update_row<4, kColumnStates>(table, local, run, batch, pooling, grad, optimizer,
                                 *learning_rate);
  } else {
    update_row<1, kColumnStates>(table, local, run, batch, pooling, grad, optimizer,
                                 *learning_rate);
  }
}

}  // namespace

size_t update_rows_scratch(int64_t num_ids, int64_t num_slots) {
  Scratch scratch;
  return layout(num_ids, num_slots, nullptr, &scratch);
}

void update_rows(const TableView* tables, const Batch& batch, const int64_t* slots, Pooling pooling,
                 Output<const float> grad, const OptimizerConfig& optimizer,
                 const float* learning_rate, int32_t num_tables, int64_t num_slots,
                 bool group_four_wide, void* memory, cudaStream_t stream) {
  if (batch.num_ids == 0) {
    count_kernel<<<1, kThreads, 0, stream>>>(tables, num_tables);
    HKV_CUDA_CHECK_LAUNCH();
    return;
  }
  Scratch scratch;
  layout(batch.num_ids, num_slots, static_cast<char*>(memory), &scratch);
  const int bits = sort_bits(num_slots);
  const uint64_t no_slot = (uint64_t{1} << bits) - 1;
  const int64_t num_bags = batch.num_features * batch.batch_size;
  prepare_kernel<<<grid_for(num_bags * kWarp), kThreads, 0, stream>>>(
      tables, num_tables, batch, slots, no_slot, scratch.keys_in, scratch.positions_in,
      scratch.bags);
  HKV_CUDA_CHECK_LAUNCH();
  HKV_CUDA_CHECK(cub::DeviceRadixSort::SortPairs(
      scratch.sort, scratch.sort_bytes, static_cast<const uint64_t*>(scratch.keys_in), scratch.keys,
      static_cast<const uint32_t*>(scratch.positions_in), scratch.positions, batch.num_ids, 0, bits,
      stream));
  const auto kernel = has_column_states(optimizer) ? update_kernel<true> : update_kernel<false>;
  kernel<<<grid_for(batch.num_ids * kWarp), kThreads, 0, stream>>>(
      tables, batch, pooling, grad, optimizer, learning_rate, no_slot, group_four_wide,
      scratch.keys, scratch.positions, scratch.bags);
  HKV_CUDA_CHECK_LAUNCH();
}

}  // namespace torchrec_hkv::hash_table::cuda
