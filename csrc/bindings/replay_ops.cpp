// Dispatcher op of the replay of logs. Its fake is in torchrec_hkv/replay/sample.py.
#include <torch/library.h>

#include <tuple>

#include "bindings/register.h"
#include "replay/sample.h"
#include "runtime/checks.h"

namespace torchrec_hkv::bindings {
using namespace runtime;
namespace {

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> sample_ids(const at::Tensor& ids,
                                                                      int64_t max_counted,
                                                                      int64_t max_sampled) {
  check_dtype(ids, "ids", at::kLong);
  check_vector(ids, "ids");
  TORCH_CHECK_VALUE(max_sampled <= max_counted, "max_sampled is ", max_sampled,
                    ", but must be at most most_counted, ", max_counted, ".");
  const at::Tensor from = ids.contiguous();
  const int64_t n = from.numel();
  const at::Tensor bits = at::empty({n}, from.options()), at = at::empty({n}, from.options()),
                   sampled = at::empty({n}, from.options());
  const replay::Taken taken =
      replay::take(from.const_data_ptr<int64_t>(), n, max_counted, max_sampled,
                   bits.data_ptr<int64_t>(), at.data_ptr<int64_t>(), sampled.data_ptr<int64_t>());
  at::Tensor bounds = at::empty({n == 0 ? 0 : 2}, from.options());
  if (n != 0) {
    bounds.data_ptr<int64_t>()[0] = taken.low;
    bounds.data_ptr<int64_t>()[1] = taken.high;
  }
  return {bits.narrow(0, 0, taken.counted).clone(), at.narrow(0, 0, taken.counted).clone(),
          sampled.narrow(0, 0, taken.sampled).clone(), bounds};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(torchrec_hkv, m) {
  m.def(
      "sample_ids(Tensor ids, int most_counted, int max_sampled) -> "
      "(Tensor, Tensor, Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(torchrec_hkv, CPU, m) { m.impl("sample_ids", &sample_ids); }

}  // namespace torchrec_hkv::bindings
