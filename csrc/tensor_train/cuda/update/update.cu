// Applies the optimizer to slices of cores with a gradient, one block per slice. A slice is a row
// in the formulas of common/optimizers.h.
#include "common/cuda_check.h"
#include "common/rounding.h"
#include "tensor_train/cuda/contract/tensor_core.cuh"
#include "tensor_train/cuda/kernels.h"

namespace torchrec_hkv::tensor_train::cuda {
namespace {

constexpr int kThreads = 256;
// Up to this number of slices, slices without a gradient are read, too.
constexpr int64_t kMaxAhead = 2048;

// Returns the sum over the block to all of its threads.
__device__ __forceinline__ float block_sum(float value) {
  __shared__ float sums[kThreads / 32];
#pragma unroll
  for (int step = 16; step > 0; step /= 2) value += __shfl_xor_sync(kAllLanes, value, step);
  __syncthreads();  // all threads have read the previous sum
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = value;
  __syncthreads();
  float all = 0.0f;
#pragma unroll
  for (int w = 0; w < kThreads / 32; ++w) all += sums[w];
  return all;
}

// A slice: its values, gradient and state.
struct Slice {
  RowType type;
  GlobalPointer<char> values;
  GlobalPointer<float> grad;
  GlobalPointer<float> state;
  int32_t size;
  uint64_t key;  // for stochastic rounding
  bool by_chance;

  __device__ __forceinline__ void store(int32_t i, float value) const {
    if (by_chance) {
      reinterpret_cast<uint16_t*>(values.get())[i] =
          narrow_by_chance(type, value, rounding_draw(key, static_cast<uint32_t>(i)));
    } else {
      store_element(type, values, i, value);
    }
  }
};

// The sum of value_of(element)^2 over the slice.
template <typename Value>
__device__ __forceinline__ float squares_of(const Slice& slice, const Value& value_of) {
  float squares = 0.0f;
  for (int32_t i = threadIdx.x; i < slice.size; i += kThreads) {
    const float g = value_of(load_element(slice.type, slice.values, i), slice.grad[i]);
    squares += g * g;
  }
  return block_sum(squares);
}

// The terms of an update that are common to the slice, equal in all threads.
__device__ __forceinline__ RowTerms terms_of(const Slice& slice, const OptimizerConfig& config,
                                             float learning_rate, int64_t table_step) {
  float step = static_cast<float>(table_step);
  if (config.own_steps) {
    float* step_state = slice.state + own_step_column(config.kind, slice.size);
    step = *step_state + 1.0f;
    __syncthreads();  // all threads have read it
    if (threadIdx.x == 0) *step_state = step;
  }
  RowTerms terms = begin_row(config, learning_rate, step);
  if (clips_by_norm(config)) {
    clip_row(config,
             squares_of(slice, [&](float, float gradient) { return clipped(config, gradient); }),
             &terms);
  }
  if (adapts_by_row(config.kind)) {
    const float squares = squares_of(slice, [&](float value, float gradient) {
      return gradient_of(config, terms, value, gradient);
    });
    float* square = slice.state + row_square_column(config.kind, slice.size);
    const float old = *square;
    __syncthreads();
    const float now = adapt_row(config, squares, slice.size, old, &terms);
    if (threadIdx.x == 0) *square = now;
  }
  return terms;
}

template <Optimizer kKind>
__device__ __forceinline__ void update_element(const Slice& slice, const OptimizerConfig& config,
                                               const RowTerms& terms, int32_t i) {
  float none = 0.0f;
  float& first = column_states(kKind) > 0 ? slice.state[i] : none;
  float& second = column_states(kKind) > 1 ? slice.state[slice.size + i] : none;
  const float value = load_element(slice.type, slice.values, i);
  slice.store(i, update_column<kKind>(config, terms, value, slice.grad[i], first, second));
  slice.grad[i] = 0.0f;
}

// Updates four fp32 elements without stochastic rounding.
template <Optimizer kKind>
__device__ __forceinline__ void update_four(const Slice& slice, const OptimizerConfig& config,
                                            const RowTerms& terms, int32_t i) {
  constexpr int kStates = column_states(kKind);
  float4* values = reinterpret_cast<float4*>(slice.values.get()) + i;
  float4* grads = reinterpret_cast<float4*>(slice.grad.get()) + i;
  float4* states = reinterpret_cast<float4*>(slice.state.get()) + i;
  float value[4], grad[4], state[2][4] = {};
  *reinterpret_cast<float4*>(value) = *values;
  *reinterpret_cast<float4*>(grad) = *grads;
#pragma unroll
  for (int s = 0; s < kStates; ++s) {
    *reinterpret_cast<float4*>(state[s]) = states[s * (slice.size / 4)];
  }
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    value[k] = update_column<kKind>(config, terms, value[k], grad[k], state[0][k], state[1][k]);
  }
  *values = *reinterpret_cast<float4*>(value);
  *grads = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
  for (int s = 0; s < kStates; ++s) {
    states[s * (slice.size / 4)] = *reinterpret_cast<float4*>(state[s]);
  }
}

__device__ __forceinline__ bool quads(const void* pointer) {
  return reinterpret_cast<uintptr_t>(pointer) % 16 == 0;
}

// A slice of fp32 for an optimizer without states. It is read before it is known whether the slice
// has a gradient.
struct PrefetchedSlice {
  static constexpr int kMine = 4;  // groups of four elements per thread
  float4 values[kMine], grads[kMine];

  static __device__ __forceinline__ bool fits(const CoreView& core) {
    return core.type == RowType::kFloat32 && core.slice_size % 4 == 0 &&
           core.slice_size <= 4 * kMine * kThreads && quads(core.values) && quads(core.grad);
  }
  // Calls use(k, offset in the slice) for this thread's groups of four.
  template <typename Use>
  static __device__ __forceinline__ void each(const CoreView& core, const Use& use) {
#pragma unroll
    for (int k = 0; k < kMine; ++k) {
      const int i = static_cast<int>(threadIdx.x) + k * kThreads;
      if (4 * i < core.slice_size) use(k, i);
    }
  }
  // first: index in the core of the slice's first element.
  __device__ __forceinline__ void read_values(const CoreView& core, int64_t first) {
    const auto* const from = reinterpret_cast<const float4*>(core.values) + first / 4;
    each(core, [&](int k, int i) { values[k] = from[i]; });
  }
  __device__ __forceinline__ void read_grads(const CoreView& core, int64_t first) {
    const auto* const from = reinterpret_cast<const float4*>(core.grad) + first / 4;
    each(core, [&](int k, int i) { grads[k] = from[i]; });
  }
  template <Optimizer kKind>
  __device__ __forceinline__ void update(const CoreView& core, int64_t first,
                                         const OptimizerConfig& config, const RowTerms& terms) {
    auto* const to = reinterpret_cast<float4*>(core.values) + first / 4;
    auto* const grad_to = reinterpret_cast<float4*>(core.grad) + first / 4;
    each(core, [&](int k, int i) {
      float value[4], grad[4], none = 0.0f;
      *reinterpret_cast<float4*>(value) = values[k];
      *reinterpret_cast<float4*>(grad) = grads[k];
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        value[e] = update_column<kKind>(config, terms, value[e], grad[e], none, none);
      }
      to[i] = *reinterpret_cast<float4*>(value);
      grad_to[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    });
  }
};

// kAhead: slices are read before it is known whether they have a gradient.
template <Optimizer kKind, bool kAhead>
__global__ void __launch_bounds__(kThreads)
    update_kernel(const CoreView* __restrict__ cores, int32_t num_cores, OptimizerConfig config,
                  const float* __restrict__ learning_rate, const int64_t* __restrict__ step) {
  int32_t low = 0;
  int32_t high = num_cores;
  const int64_t number = blockIdx.x;
  while (high - low > 1) {
    const int32_t middle = (low + high) >> 1;
    if (cores[middle].first_slice <= number) {
      low = middle;
    } else {
      high = middle;
    }
  }
  const CoreView core = cores[low];
  const int64_t at = number - core.first_slice;
  const int64_t first = at * core.slice_size;
  [[maybe_unused]] PrefetchedSlice ahead;
  const bool is_ahead = kAhead && PrefetchedSlice::fits(core);
  let_next_kernel_start();
  // Only updates write values, and the previous update ended before the gradients of this update
  // began. So values can be read while gradients are computed, and gradients together with the
  // flag.
  if (is_ahead) ahead.read_values(core, first);
  wait_for_kernel_before();
  if (is_ahead) ahead.read_grads(core, first);
  if (core.touched[at] == 0) return;
  __syncthreads();  // all threads have read it
  if (threadIdx.x == 0) core.touched[at] = 0;
  Slice slice;
  slice.type = core.type;
  slice.values = static_cast<char*>(core.values) + first * element_size(core.type);
  slice.grad = core.grad + first;
  slice.state = core.state + at * state_width(config, core.slice_size);
  slice.size = core.slice_size;
  slice.by_chance = config.stochastic_rounding && core.type != RowType::kFloat32;
  slice.key =
      slice.by_chance ? rounding_key(config.rounding_seed, core.seed, at, *step) : uint64_t{0};
  const RowTerms terms = terms_of(slice, config, *learning_rate, *step);
  if (is_ahead) return ahead.update<kKind>(core, first, config, terms);
  const bool fours = core.type == RowType::kFloat32 && slice.size % 4 == 0 && quads(slice.values) &&
                     quads(slice.grad) && (column_states(kKind) == 0 || quads(slice.state));
  if (fours) {
#pragma unroll 4
    for (int32_t i = threadIdx.x; i < slice.size / 4; i += kThreads) {
      update_four<kKind>(slice, config, terms, i);
    }
  } else {
    for (int32_t i = threadIdx.x; i < slice.size; i += kThreads) {
      update_element<kKind>(slice, config, terms, i);
    }
  }
}

}  // namespace

void update_cores(const CoreView* cores, int32_t num_cores, int64_t num_slices,
                  const OptimizerConfig& config, const float* learning_rate, const int64_t* step,
                  cudaStream_t stream) {
  if (num_slices == 0 || config.kind == Optimizer::kNone) return;
  const LaunchShape shape = {dim3(static_cast<unsigned>(num_slices)), kThreads};
  auto run = [&](auto kernel) {
    launch_dependent(kernel, shape, stream, cores, num_cores, config, learning_rate, step);
  };
  switch (config.kind) {
    case Optimizer::kMomentum:
      return run(update_kernel<Optimizer::kMomentum, false>);
    case Optimizer::kAdagrad:
      return run(update_kernel<Optimizer::kAdagrad, false>);
    case Optimizer::kRowWiseAdagrad:
      return run(update_kernel<Optimizer::kRowWiseAdagrad, false>);
    case Optimizer::kAdam:
      return run(update_kernel<Optimizer::kAdam, false>);
    case Optimizer::kRowWiseAdam:
      return run(update_kernel<Optimizer::kRowWiseAdam, false>);
    case Optimizer::kFtrl:
      return run(update_kernel<Optimizer::kFtrl, false>);
    default:
      return num_slices <= kMaxAhead ? run(update_kernel<Optimizer::kSgd, true>)
                                     : run(update_kernel<Optimizer::kSgd, false>);
  }
}

}  // namespace torchrec_hkv::tensor_train::cuda
