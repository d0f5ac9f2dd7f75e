// Ops of tables with rows in host memory and copies of hot rows in a GPU's memory. Fakes are in
// torchrec_hkv/serving/ops.py.
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <cstring>

#include "runtime/checks.h"
#include "runtime/growing_host_memory.h"
#include "runtime/on_device.h"
#include "serving/kernels_cpu.h"

#ifdef TORCHREC_HKV_CUDA
#include "common/cuda_check.h"
#include "serving/kernels_cuda.h"
#endif

namespace torchrec_hkv::bindings {
using namespace runtime;
namespace {

using serving::HotMaskWord;

int64_t hot_words_for(int64_t rows) {
  return (rows + serving::kHotMaskRows - 1) / serving::kHotMaskRows;
}

void check_words(const at::Tensor& words, const char* name, int64_t rows) {
  check_dtype(words, name, at::kInt);
  TORCH_CHECK_VALUE(words.is_contiguous() && words.dim() == 2 &&
                        words.size(0) == hot_words_for(rows) && words.size(1) == 2,
                    name, " must be contiguous and of shape [", hot_words_for(rows),
                    ", 2], but have shape ", words.sizes(), ".");
}

const HotMaskWord* words_of(const at::Tensor& words) {
  return reinterpret_cast<const HotMaskWord*>(words.const_data_ptr<int32_t>());
}

// A copy in host memory that a GPU reads in place. It is in huge pages if the system grants them.
at::Tensor serving_pinned(const at::Tensor& data, at::Device device) {
  check_dtype(data, "data", at::kByte);
  TORCH_CHECK_VALUE(data.is_cpu(), "data must be in host memory, but are on ", data.device(), ".");
  TORCH_CHECK_VALUE(device.is_cuda(), "device is ", device, ", but must be a CUDA GPU.");
#ifdef TORCHREC_HKV_CUDA
  if (data.numel() == 0) return at::empty_like(data);
  const auto index = device.has_index() ? device.index() : c10::cuda::current_device();
  const at::Device gpu(at::kCUDA, index);
  int same_address = 0;
  HKV_CUDA_CHECK(cudaDeviceGetAttribute(&same_address, cudaDevAttrCanUseHostPointerForRegisteredMem,
                                        gpu.index()));
  TORCH_CHECK(same_address, gpu, " reads host memory at other addresses than the host, which ",
              "tables with rows in host memory don't support: leave hbm_bytes None.");
  const auto memory = std::make_shared<GrowingPinnedMemory>(data.numel(), gpu);
  memory->grow(data.numel());
  at::Tensor copy =
      at::from_blob(memory->data(), data.sizes(), [memory](void*) {}, at::dtype(at::kByte));
  copy.copy_(data);
  return copy;
#else
  TORCH_CHECK(false, "this build of torchrec_hkv has no CUDA kernels.");
#endif
}

at::Tensor serving_choose_hot(const at::Tensor& counts, const std::optional<at::Tensor>& before,
                              int64_t wanted) {
  check_dtype(counts, "counts", at::kInt);
  check_vector(counts, "counts");
  TORCH_CHECK_VALUE(wanted >= 0, "wanted is ", wanted, ", but must not be negative.");
  TORCH_CHECK_VALUE(wanted < int64_t{1} << 32, "wanted is ", wanted,
                    ", but at most 2^32 - 1 rows of a table can be hot.");
  const at::Tensor in = counts.contiguous();
  at::Tensor words = at::empty({hot_words_for(in.numel()), 2}, in.options());
  if (before) check_words(*before, "before", in.numel());
  serving::cpu::choose_hot_rows(reinterpret_cast<const uint32_t*>(in.const_data_ptr<int32_t>()),
                                in.numel(), wanted, before ? words_of(*before) : nullptr,
                                reinterpret_cast<HotMaskWord*>(words.data_ptr<int32_t>()));
  return words;
}

// rows: in host memory that the device of the other tensors can read.
void serving_copy_hot(const at::Tensor& words, const at::Tensor& rows, at::Tensor out) {
  check_dtype(rows, "rows", at::kByte);
  TORCH_CHECK_VALUE(rows.dim() == 2 && rows.is_contiguous() && rows.is_cpu(),
                    "rows must be contiguous, in host memory and of shape [rows, bytes], but have ",
                    "shape ", rows.sizes(), " on ", rows.device(), ".");
  check_words(words, "words", rows.size(0));
  check_dtype(out, "out", at::kByte);
  check_device(out, "out", words.device());
  TORCH_CHECK_VALUE(out.dim() == 2 && out.is_contiguous() && out.size(1) == rows.size(1),
                    "out must be contiguous and of shape [hot rows, ", rows.size(1),
                    "], but has shape ", out.sizes(), ".");
  const HotMaskWord* const mask_words = words_of(words);
  if (words.is_cpu()) {
    const HotMaskWord last = words.numel() == 0 ? HotMaskWord{} : mask_words[words.size(0) - 1];
    const int64_t hot = int64_t{last.before} + serving::bits_of(last.mask);
    TORCH_CHECK_VALUE(out.size(0) == hot, "out has ", out.size(0), " rows, but ", hot, " are hot.");
  }
  const serving::HotRowCopy call{mask_words, rows.size(0),
                                 reinterpret_cast<const char*>(rows.const_data_ptr<uint8_t>()),
                                 rows.size(1), reinterpret_cast<char*>(out.data_ptr<uint8_t>())};
  HKV_ON_DEVICE(words.device(), serving::cpu::copy_hot_rows(call, threads),
                serving::cuda::copy_hot_rows(call, stream));
}

at::Tensor serving_row_numbers(const at::Tensor& index, const at::Tensor& ids) {
  check_dtype(index, "index", at::kLong);
  TORCH_CHECK_VALUE(index.dim() == 3 && index.size(2) == 8 && index.is_contiguous() &&
                        index.numel() > 0 &&
                        reinterpret_cast<uintptr_t>(index.const_data_ptr()) % 64 == 0,
                    "index must be contiguous, aligned to 64 bytes and of shape [blocks, buckets, ",
                    "8], but has shape ", index.sizes(), ".");
  check_dtype(ids, "ids", at::kLong);
  check_vector(ids, "ids");
  check_device(ids, "ids", index.device());
  const at::Tensor in = ids.contiguous();
  at::Tensor rows = at::empty_like(in);
  const serving::RowNumbers call{
      {reinterpret_cast<const serving::Bucket*>(index.const_data_ptr<int64_t>()),
       {static_cast<uint32_t>(index.size(0)), static_cast<uint32_t>(index.size(1))},
       nullptr},
      in.const_data_ptr<int64_t>(),
      in.numel(),
      rows.data_ptr<int64_t>()};
  HKV_ON_DEVICE(index.device(), serving::cpu::find_row_numbers(call, threads),
                serving::cuda::find_row_numbers(call, stream));
  return rows;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(torchrec_hkv, m) {
  m.def("serving_pinned(Tensor data, Device device) -> Tensor");
  m.def("serving_choose_hot(Tensor counts, Tensor? before, int wanted) -> Tensor");
  m.def("serving_row_numbers(Tensor index, Tensor ids) -> Tensor");
  m.def("serving_copy_hot(Tensor words, Tensor rows, Tensor(a!) out) -> ()");
}

TORCH_LIBRARY_IMPL(torchrec_hkv, CompositeExplicitAutograd, m) {
  m.impl("serving_pinned", &serving_pinned);
}

TORCH_LIBRARY_IMPL(torchrec_hkv, CPU, m) {
  m.impl("serving_choose_hot", &serving_choose_hot);
  m.impl("serving_row_numbers", &serving_row_numbers);
  m.impl("serving_copy_hot", &serving_copy_hot);
}

#ifdef TORCHREC_HKV_CUDA
TORCH_LIBRARY_IMPL(torchrec_hkv, CUDA, m) {
  m.impl("serving_row_numbers", &serving_row_numbers);
  m.impl("serving_copy_hot", &serving_copy_hot);
}
#endif

}  // namespace torchrec_hkv::bindings
