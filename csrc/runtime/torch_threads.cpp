#include "runtime/torch_threads.h"

#include <ATen/TensorIterator.h>

#include <algorithm>
#include <functional>

#include "common/parallel.h"
#include "runtime/tensor.h"

namespace torchrec_hkv::runtime {
namespace {

// at::parallel_for would be compiled into this library and use its own OpenMP threads. A loop over
// a tensor runs in torch's library, on torch's threads. The tensor here has one element for each
// thread; its elements are neither read nor written.
void run_on_torch_threads(int threads, const std::function<void()>& work) {
  constexpr int64_t kMax = 4096;
  static char elements[kMax];
  const int64_t n = std::min<int64_t>(threads, kMax);
  at::Tensor tensor = at::from_blob(elements, {n}, at::dtype(at::kByte));
  at::TensorIterator loop = at::TensorIterator::nullary_op(tensor);
  loop.for_each([&work](char**, const int64_t*, int64_t, int64_t) { work(); }, 1);
}

}  // namespace

void use_torch_threads() {
#ifndef __SANITIZE_THREAD__  // it does not detect the synchronization of OpenMP threads
  run_on(run_on_torch_threads);
#endif
}

}  // namespace torchrec_hkv::runtime
