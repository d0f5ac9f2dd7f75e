// Dispatcher ops of the row-wise input distribution. Fakes are in torchrec_hkv/hash_table/ops.py.
#include <ATen/Parallel.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#ifdef TORCHREC_HKV_CUDA
#include <c10/cuda/CUDAStream.h>
#endif

#include <tuple>

#include "bindings/checks.h"
#include "routing/bucketize.h"

namespace torchrec_hkv::bindings {
namespace {

at::Tensor exclusive_sums(const at::Tensor& lengths) {
  at::Tensor sums = at::zeros({lengths.numel() + 1}, lengths.options());
  at::Tensor tail = sums.slice(0, 1);
  at::cumsum_out(tail, lengths, 0);
  return sums;
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> bucketize(
    const at::Tensor& lengths, const at::Tensor& values, const at::Tensor& block_sizes,
    int64_t world_size, const std::optional<at::Tensor>& weights) {
  const at::Device device = values.device();
  TORCH_CHECK_TYPE(lengths.scalar_type() == at::kLong || lengths.scalar_type() == at::kInt,
                   "lengths must be of an integer dtype, but are of dtype ", lengths.scalar_type(),
                   ".");
  check_vector(lengths, "lengths");
  check_device(lengths, "lengths", device);
  check_dtype(values, "values", at::kLong);
  check_vector(values, "values");
  check_dtype(block_sizes, "block_sizes", at::kLong);
  check_vector(block_sizes, "block_sizes");
  check_device(block_sizes, "block_sizes", device);
  TORCH_CHECK_VALUE(world_size >= 1, "world_size is ", world_size, ", but must be at least 1.");
  const int64_t features = block_sizes.numel();
  TORCH_CHECK_VALUE(features >= 1 && lengths.numel() % features == 0,
                    "lengths must have a multiple of ", features, " elements, but have ",
                    lengths.numel(), ".");
  if (weights) {
    check_dtype(*weights, "weights", at::kFloat);
    check_device(*weights, "weights", device);
    check_length(*weights, "weights", values.numel());
  }
  const at::Tensor ids = values.contiguous();
  const at::Tensor blocks = block_sizes.contiguous();
  const at::Tensor offsets = exclusive_sums(lengths.to(at::kLong).contiguous());
  if (device.is_cpu()) {
    const int64_t total = offsets.data_ptr<int64_t>()[offsets.numel() - 1];
    TORCH_CHECK_VALUE(total == values.numel(), "lengths must add up to the number of values, ",
                      values.numel(), ", but add up to ", total, ".");
  }
  const at::Tensor in_weights = weights ? weights->contiguous() : at::Tensor();
  at::Tensor out_lengths = at::empty({world_size * lengths.numel()}, offsets.options());
  at::Tensor out_ids = at::empty_like(ids);
  at::Tensor out_weights =
      at::empty({weights ? values.numel() : 0}, ids.options().dtype(at::kFloat));
  at::Tensor permute = at::empty_like(ids);

  const routing::Bags bags{ids.const_data_ptr<int64_t>(),
                           weights ? in_weights.const_data_ptr<float>() : nullptr,
                           offsets.const_data_ptr<int64_t>(),
                           blocks.const_data_ptr<int64_t>(),
                           lengths.numel(),
                           std::max<int64_t>(1, lengths.numel() / features)};
  const routing::Bucketized out{out_ids.data_ptr<int64_t>(),
                                weights ? out_weights.data_ptr<float>() : nullptr,
                                permute.data_ptr<int64_t>()};
  const auto ranks = static_cast<int32_t>(world_size);
#ifdef TORCHREC_HKV_CUDA
  if (device.is_cuda()) {
    const c10::OptionalDeviceGuard guard(device);
    const cudaStream_t stream = c10::cuda::getCurrentCUDAStream(device.index());
    routing::cuda::count(bags, ranks, out_lengths.data_ptr<int64_t>(), stream);
    const at::Tensor starts = exclusive_sums(out_lengths);
    routing::cuda::scatter(bags, ranks, starts.const_data_ptr<int64_t>(), out, stream);
    return {out_lengths.to(lengths.scalar_type()), out_ids, out_weights, permute};
  }
#endif
  const int threads = at::get_num_threads();
  routing::cpu::count(bags, ranks, out_lengths.data_ptr<int64_t>(), threads);
  const at::Tensor starts = exclusive_sums(out_lengths);
  routing::cpu::scatter(bags, ranks, starts.const_data_ptr<int64_t>(), out, threads);
  return {out_lengths.to(lengths.scalar_type()), out_ids, out_weights, permute};
}

// For checks and tools, on the CPU.
at::Tensor owner_ranks(const at::Tensor& ids, int64_t world_size) {
  check_dtype(ids, "ids", at::kLong);
  TORCH_CHECK_VALUE(world_size >= 1, "world_size is ", world_size, ", but must be at least 1.");
  const at::Tensor from = ids.contiguous();
  at::Tensor ranks = at::empty_like(from);
  const int64_t* in = from.const_data_ptr<int64_t>();
  int64_t* out = ranks.data_ptr<int64_t>();
  for (int64_t i = 0; i < from.numel(); ++i) {
    out[i] = owner_rank(in[i], static_cast<int32_t>(world_size));
  }
  return ranks;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(torchrec_hkv, m) {
  m.def(
      "bucketize(Tensor lengths, Tensor values, Tensor block_sizes, int world_size, "
      "Tensor? weights=None) -> (Tensor, Tensor, Tensor, Tensor)");
  m.def("owner_ranks(Tensor ids, int world_size) -> Tensor");
}

TORCH_LIBRARY_IMPL(torchrec_hkv, CPU, m) {
  m.impl("bucketize", &bucketize);
  m.impl("owner_ranks", &owner_ranks);
}
#ifdef TORCHREC_HKV_CUDA
TORCH_LIBRARY_IMPL(torchrec_hkv, CUDA, m) { m.impl("bucketize", &bucketize); }
#endif

}  // namespace torchrec_hkv::bindings
