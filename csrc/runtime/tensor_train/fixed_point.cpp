#include "runtime/tensor_train/fixed_point.h"

#ifdef TORCHREC_HKV_CUDA

#include <ATen/core/grad_mode.h>

#include <vector>

namespace torchrec_hkv::runtime {
namespace {

using tensor_train::TableCpu;

// Upper bound on a sum of absolute values, with room for rounding below 2^63.
constexpr double kLargestSum = 0x1p60;

at::Tensor largest(const at::Tensor& values) { return values.abs().amax().to(at::kDouble); }

double times(int64_t a, int64_t b, int64_t c = 1) {
  return static_cast<double>(a) * static_cast<double>(b) * static_cast<double>(c);
}

}  // namespace

FixedPointGradients::FixedPointGradients(const TensorTrainGroup& group, const TensorTrainPlan& plan,
                                         at::TensorList cores, const at::Tensor& grad,
                                         const std::optional<at::Tensor>& weights, int64_t num_ids)
    : grads_(static_cast<const float*>(plan.zeros.const_data_ptr())) {
  const at::NoGradGuard no_grad;  // cores may be parameters
  // Upper bound on the sum of absolute values of all rows' gradients, in any column.
  at::Tensor rows = largest(grad) * static_cast<double>(num_ids);
  if (weights) rows = rows * largest(*weights);
  std::vector<at::Tensor> scales;
  size_t first = 0;
  for (int32_t t = 0; t < group.num_tables(); ++t) {
    const TableCpu& table = group.table(t);
    at::Tensor head = largest(cores[first]);
    if (table.cores == 4) head = head * largest(cores[first + 1]) * static_cast<double>(table.r[1]);
    const at::Tensor last = largest(cores[first + table.last_core()]);
    const at::Tensor middle =
        table.has_middle() ? largest(cores[first + table.middle_core()]) : at::ones_like(last);
    const at::Tensor prefixes = rows * last * static_cast<double>(table.last_q());
    const at::Tensor bounds[] = {
        prefixes * middle * times(table.middle_q(), table.last_r()),
        prefixes * head * static_cast<double>(table.head_q()),
        rows * head * middle * times(table.head_q(), table.middle_q(), table.head_r()),
    };
    for (const at::Tensor& bound : bounds) {
      scales.push_back(bound.clamp_min(1e-30).reciprocal() * kLargestSum);
    }
    first += table.cores;
  }
  scales_ = at::stack(scales);
  const auto floats = static_cast<int64_t>(plan.zeros.nbytes() / sizeof(float));
  sums_ = at::zeros({floats}, plan.zeros.options().dtype(at::kLong));
}

tensor_train::cuda::FixedPointSums FixedPointGradients::view() const {
  return {grads_, sums_.mutable_data_ptr<int64_t>(), scales_.const_data_ptr<double>()};
}

void FixedPointGradients::finish(const TensorTrainGroup& group, const TensorTrainPlan& plan) const {
  const at::NoGradGuard no_grad;
  const at::Tensor floats = plan.zeros.view(at::kFloat);
  const auto put = [&](const float* gradient, int64_t count, int64_t scale) {
    const int64_t begin = gradient - grads_;
    const at::Tensor sums = sums_.slice(0, begin, begin + count).to(at::kDouble);
    floats.slice(0, begin, begin + count).copy_(sums / scales_.select(0, scale));
  };
  size_t first = 0, next_head = 0;
  for (int32_t t = 0; t < group.num_tables(); ++t) {
    const TableCpu& table = group.table(t);
    const auto put_core = [&](size_t core, int64_t part) {
      const at::Tensor& gradient = plan.gradients[first + core];
      put(gradient.const_data_ptr<float>(), gradient.numel(), 3 * t + part);
    };
    if (table.cores == 4) {
      const int64_t values = table.heads() * table.head_q() * table.head_r();
      put(plan.heads[next_head++].heads_grad, values, 3 * t);
    } else {
      put_core(0, 0);
    }
    if (table.has_middle()) put_core(table.middle_core(), 1);
    put_core(table.last_core(), 2);
    first += table.cores;
  }
}

}  // namespace torchrec_hkv::runtime

#endif
