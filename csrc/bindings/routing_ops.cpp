// Dispatcher ops of the row-wise input distribution. Fakes: torchrec_hkv/hash_table/routing.py.
#include <ATen/Parallel.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#ifdef TORCHREC_HKV_CUDA
#include <c10/cuda/CUDAStream.h>
#endif

#include <numeric>
#include <tuple>
#include <vector>

#include "routing/blocks.h"
#include "routing/bucketize.h"
#include "runtime/checks.h"

namespace torchrec_hkv::bindings {
using namespace runtime;
namespace {

// Exclusive sums of int64 lengths, followed by their total.
at::Tensor exclusive_sums(const at::Tensor& lengths) {
  if (lengths.is_cpu()) {
    at::Tensor sums = at::empty({lengths.numel() + 1}, lengths.options());
    const int64_t* const in = lengths.const_data_ptr<int64_t>();
    int64_t* const out = sums.data_ptr<int64_t>();
    out[0] = 0;
    std::partial_sum(in, in + lengths.numel(), out + 1);
    return sums;
  }
  at::Tensor sums = at::zeros({lengths.numel() + 1}, lengths.options());
  at::Tensor tail = sums.slice(0, 1);
  at::cumsum_out(tail, lengths, 0);
  return sums;
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> bucketize(
    const at::Tensor& lengths, const at::Tensor& values, const at::Tensor& block_sizes,
    int64_t world_size, const std::optional<at::Tensor>& weights, bool blocks, bool permutes) {
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
  const at::Tensor sizes = block_sizes.contiguous();
  const at::Tensor offsets = exclusive_sums(lengths.to(at::kLong).contiguous());
  if (device.is_cpu()) {
    const int64_t total = offsets.data_ptr<int64_t>()[offsets.numel() - 1];
    TORCH_CHECK_VALUE(total == values.numel(), "lengths must add up to the number of values, ",
                      values.numel(), ", but add up to ", total, ".");
  }
  const at::Tensor in_weights = weights ? weights->contiguous() : at::Tensor();
  at::Tensor out_lengths = at::empty({world_size * lengths.numel()}, offsets.options());
  at::Tensor out_ids = at::empty({ids.numel() + (blocks ? out_lengths.numel() : 0)}, ids.options());
  at::Tensor out_weights =
      at::empty({weights ? values.numel() : 0}, ids.options().dtype(at::kFloat));
  at::Tensor permute = at::empty({permutes ? ids.numel() : 0}, ids.options());

  const routing::Bags bags{ids.const_data_ptr<int64_t>(),
                           weights ? in_weights.const_data_ptr<float>() : nullptr,
                           offsets.const_data_ptr<int64_t>(),
                           sizes.const_data_ptr<int64_t>(),
                           lengths.numel(),
                           std::max<int64_t>(1, lengths.numel() / features)};
  const routing::Bucketized out{out_ids.data_ptr<int64_t>(),
                                weights ? out_weights.data_ptr<float>() : nullptr,
                                permutes ? permute.data_ptr<int64_t>() : nullptr, blocks};
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

// The counts to send before the blocks, followed by space for the received counts.
at::Tensor count_ids(const at::Tensor& lengths, const at::Tensor& at, const at::Tensor& samples_at,
                     int64_t batch_size, int64_t size) {
  const at::Device device = lengths.device();
  TORCH_CHECK_TYPE(lengths.scalar_type() == at::kLong || lengths.scalar_type() == at::kInt,
                   "lengths must be of an integer dtype, but are of dtype ", lengths.scalar_type(),
                   ".");
  check_dtype(at, "at", at::kLong);
  check_vector(at, "at");
  check_device(at, "at", device);
  check_dtype(samples_at, "samples_at", at::kLong);
  check_vector(samples_at, "samples_at");
  check_device(samples_at, "samples_at", device);
  TORCH_CHECK_VALUE(batch_size >= 0, "batch_size is ", batch_size, ", but must not be negative.");
  check_length(lengths, "lengths", at.numel() * batch_size);
  TORCH_CHECK_VALUE(at.numel() + samples_at.numel() <= size, "size is ", size,
                    ", but must be at least ", at.numel() + samples_at.numel(), ".");
  const at::Tensor in = lengths.contiguous(), to = at.contiguous(),
                   samples_to = samples_at.contiguous();
  if (device.is_cpu()) {
    for (const at::Tensor& places : {to, samples_to}) {
      const int64_t* const place = places.const_data_ptr<int64_t>();
      for (int64_t i = 0; i < places.numel(); ++i) {
        TORCH_CHECK_VALUE(place[i] >= 0 && place[i] < size, "a count was to go to ", place[i],
                          ", but must go to a place from 0 to ", size - 1, ".");
      }
    }
  }
  at::Tensor counts = at::empty({size}, to.options());
  const routing::Counts out{to.const_data_ptr<int64_t>(),
                            samples_to.const_data_ptr<int64_t>(),
                            to.numel(),
                            samples_to.numel(),
                            batch_size,
                            counts.data_ptr<int64_t>()};
  const bool narrow = lengths.scalar_type() == at::kInt;
#ifdef TORCHREC_HKV_CUDA
  if (device.is_cuda()) {
    const c10::OptionalDeviceGuard guard(device);
    routing::cuda::count_ids(in.const_data_ptr(), narrow, out,
                             c10::cuda::getCurrentCUDAStream(device.index()));
    return counts;
  }
#endif
  routing::cpu::count_ids(in.const_data_ptr(), narrow, out, at::get_num_threads());
  return counts;
}

// The blocks of all ranks, concatenated: lengths of the bags of a rank's features, then their ids.
at::Tensor pack_blocks(const at::Tensor& lengths, const at::Tensor& values,
                       at::IntArrayRef num_lengths, at::IntArrayRef num_values) {
  check_vector(lengths, "lengths");
  check_dtype(values, "values", at::kLong);
  check_vector(values, "values");
  TORCH_CHECK_VALUE(num_lengths.size() == num_values.size(),
                    "num_lengths and num_values must have a number for each rank, but have ",
                    num_lengths.size(), " and ", num_values.size(), ".");
  const at::Tensor words = lengths.to(at::kLong);
  std::vector<at::Tensor> parts;
  parts.reserve(2 * num_lengths.size());
  int64_t first_length = 0, first_value = 0;
  for (size_t r = 0; r < num_lengths.size(); ++r) {
    parts.push_back(words.narrow(0, first_length, num_lengths[r]));
    parts.push_back(values.narrow(0, first_value, num_values[r]));
    first_length += num_lengths[r];
    first_value += num_values[r];
  }
  return at::cat(parts);
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> merge_blocks(
    const at::Tensor& words, const std::optional<at::Tensor>& weights, const at::Tensor& counts,
    const at::Tensor& order, int64_t num_ranks, int64_t batch_size, at::ScalarType lengths_dtype) {
  const at::Device device = words.device();
  check_dtype(words, "words", at::kLong);
  check_vector(words, "words");
  TORCH_CHECK_VALUE(num_ranks >= 1, "num_ranks is ", num_ranks, ", but must be at least 1.");
  TORCH_CHECK_VALUE(batch_size >= 0, "batch_size is ", batch_size, ", but must not be negative.");
  TORCH_CHECK_VALUE(order.numel() % num_ranks == 0, "order must have a multiple of ", num_ranks,
                    " elements, but has ", order.numel(), ".");
  check_dtype(order, "order", at::kInt);
  check_vector(order, "order");
  check_device(order, "order", device);
  check_dtype(counts, "counts", at::kLong);
  check_length(counts, "counts", order.numel() + num_ranks);
  check_device(counts, "counts", device);
  TORCH_CHECK_TYPE(lengths_dtype == at::kLong || lengths_dtype == at::kInt,
                   "lengths_dtype must be an integer dtype, Long or Int, but is ", lengths_dtype,
                   ".");
  const int64_t bags = order.numel() * batch_size, ids = words.numel() - bags;
  TORCH_CHECK_VALUE(ids >= 0, "words must have at least ", bags, " elements, but have ",
                    words.numel(), ".");
  if (weights) {
    check_dtype(*weights, "weights", at::kFloat);
    check_device(*weights, "weights", device);
    check_length(*weights, "weights", ids);
  }
  const at::Tensor in_words = words.contiguous(), in_counts = counts.contiguous(),
                   in_order = order.contiguous();
  const at::Tensor in_weights = weights ? weights->contiguous() : at::Tensor();
  if (device.is_cpu()) {
    const auto features = order.numel() / num_ranks;
    const int64_t* const count = in_counts.const_data_ptr<int64_t>();
    const int32_t* const segments = in_order.const_data_ptr<int32_t>();
    std::vector<bool> seen(order.numel());
    int64_t total = 0;
    for (int64_t s = 0; s < order.numel(); ++s) {
      const int64_t n = count[s + s / features], at = segments[s];
      TORCH_CHECK_VALUE(n >= 0, "counts must not be negative, but have ", n, ".");
      TORCH_CHECK_VALUE(at >= 0 && at < order.numel() && !seen[at],
                        "order must be a permutation, but has ", at, " at ", s, ".");
      seen[at] = true;
      total += n;
    }
    TORCH_CHECK_VALUE(total == ids, "counts must add up to the number of ids, ", ids,
                      ", but add up to ", total, ".");
  }
  at::Tensor lengths = at::empty({bags}, words.options().dtype(lengths_dtype));
  at::Tensor offsets = at::empty({bags + 1}, words.options());
  at::Tensor values = at::empty({ids}, words.options());
  at::Tensor out_weights = at::empty({weights ? ids : 0}, words.options().dtype(at::kFloat));
  const routing::Blocks blocks{in_words.const_data_ptr<int64_t>(),
                               weights ? in_weights.const_data_ptr<float>() : nullptr,
                               in_counts.const_data_ptr<int64_t>(),
                               in_order.const_data_ptr<int32_t>(),
                               num_ranks,
                               order.numel() / num_ranks,
                               batch_size,
                               ids};
  const routing::MergedBatch out{lengths.data_ptr(), lengths_dtype == at::kInt,
                                 offsets.data_ptr<int64_t>(), values.data_ptr<int64_t>(),
                                 weights ? out_weights.data_ptr<float>() : nullptr};
#ifdef TORCHREC_HKV_CUDA
  if (device.is_cuda()) {
    const c10::OptionalDeviceGuard guard(device);
    const cudaStream_t stream = c10::cuda::getCurrentCUDAStream(device.index());
    const at::Tensor scratch = at::empty({routing::cuda::merge_blocks_scratch(order.numel())},
                                         words.options().dtype(at::kByte));
    routing::cuda::merge_blocks(blocks, out, scratch.data_ptr(), stream);
    return {lengths, offsets, values, out_weights};
  }
#endif
  routing::cpu::merge_blocks(blocks, out, at::get_num_threads());
  return {lengths, offsets, values, out_weights};
}

// For checks and tools. CPU only.
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
      "Tensor? weights=None, bool blocks=False, bool permutes=True) -> "
      "(Tensor, Tensor, Tensor, Tensor)");
  m.def(
      "count_ids(Tensor lengths, Tensor at, Tensor samples_at, int batch_size, int size) -> "
      "Tensor");
  m.def(
      "pack_blocks(Tensor lengths, Tensor values, int[] num_lengths, int[] num_values) -> Tensor");
  m.def(
      "merge_blocks(Tensor words, Tensor? weights, Tensor counts, Tensor order, int num_ranks, "
      "int batch_size, ScalarType lengths_dtype) -> (Tensor, Tensor, Tensor, Tensor)");
  m.def("owner_ranks(Tensor ids, int world_size) -> Tensor");
}

TORCH_LIBRARY_IMPL(torchrec_hkv, CPU, m) {
  m.impl("bucketize", &bucketize);
  m.impl("count_ids", &count_ids);
  m.impl("pack_blocks", &pack_blocks);
  m.impl("merge_blocks", &merge_blocks);
  m.impl("owner_ranks", &owner_ranks);
}
#ifdef TORCHREC_HKV_CUDA
TORCH_LIBRARY_IMPL(torchrec_hkv, CUDA, m) {
  m.impl("bucketize", &bucketize);
  m.impl("count_ids", &count_ids);
  m.impl("pack_blocks", &pack_blocks);
  m.impl("merge_blocks", &merge_blocks);
}
#endif

}  // namespace torchrec_hkv::bindings
