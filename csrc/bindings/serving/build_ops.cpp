// Ops that build the rows of a read-only table. Fakes are in torchrec_hkv/serving/ops.py.
#include <ATen/Parallel.h>
#include <torch/library.h>

#include <tuple>

#include "runtime/checks.h"
#include "serving/kernels_cpu.h"

namespace torchrec_hkv::bindings {
using namespace runtime;
namespace {

void check_bytes(const at::Tensor& data, const char* name, int64_t rows, int64_t row_bytes) {
  check_dtype(data, name, at::kByte);
  TORCH_CHECK_VALUE(
      data.dim() == 2 && data.is_contiguous() && data.size(0) == rows && data.size(1) == row_bytes,
      name, " must be contiguous and of shape [", rows, ", ", row_bytes, "], but have shape ",
      data.sizes(), ".");
}

std::tuple<int64_t, double, int64_t> serving_quantize(const at::Tensor& rows, int64_t bits,
                                                      double unit, double limit, at::Tensor out) {
  check_dtype(rows, "rows", at::kFloat);
  TORCH_CHECK_VALUE(
      rows.dim() == 2 && rows.is_contiguous() && rows.size(1) >= 1 && rows.size(1) <= 1 << 20,
      "rows must be contiguous and of shape [n, 1 to 2^20], but have shape ", rows.sizes(), ".");
  TORCH_CHECK_VALUE(bits == 8 || bits == 4, "bits is ", bits, ", but must be 8 or 4.");
  const auto format = bits == 8 ? serving::RowFormat::kInt8 : serving::RowFormat::kInt4;
  const auto dim = static_cast<int32_t>(rows.size(1));
  check_bytes(out, "out", rows.size(0), serving::row_bytes_of(format, dim));
  const serving::cpu::QuantizeResult done = serving::cpu::quantize(
      {rows.const_data_ptr<float>(), rows.size(0), dim, format, static_cast<float>(unit),
       static_cast<float>(limit), reinterpret_cast<char*>(out.data_ptr<uint8_t>())},
      at::get_num_threads());
  return {done.rows, done.largest, done.headroom};
}

void serving_lower(at::Tensor data, int64_t doublings) {
  check_dtype(data, "data", at::kByte);
  TORCH_CHECK_VALUE(data.dim() == 2 && data.is_contiguous() && data.size(1) >= 4,
                    "data must be contiguous and of shape [rows, bytes], but have shape ",
                    data.sizes(), ".");
  serving::cpu::lower(reinterpret_cast<char*>(data.data_ptr<uint8_t>()), data.size(0), data.size(1),
                      static_cast<int>(doublings));
}

void serving_gather(const at::Tensor& data, const at::Tensor& order, at::Tensor out) {
  TORCH_CHECK_VALUE(data.dim() == 2, "data must have shape [rows, bytes], but have shape ",
                    data.sizes(), ".");
  check_bytes(data, "data", data.size(0), data.size(1));
  check_dtype(order, "order", at::kLong);
  check_vector(order, "order");
  check_bytes(out, "out", order.numel(), data.size(1));
  const at::Tensor in = order.contiguous();
  const int64_t* const numbers = in.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < in.numel(); ++i) {
    TORCH_CHECK_INDEX(numbers[i] >= 0 && numbers[i] < data.size(0), "order has ", numbers[i],
                      ", but there are ", data.size(0), " rows.");
  }
  serving::cpu::gather({reinterpret_cast<const char*>(data.const_data_ptr<uint8_t>()), numbers,
                        in.numel(), data.size(1), reinterpret_cast<char*>(out.data_ptr<uint8_t>())},
                       at::get_num_threads());
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> serving_split(const at::Tensor& ids, int64_t parts) {
  check_dtype(ids, "ids", at::kLong);
  check_vector(ids, "ids");
  TORCH_CHECK_VALUE(parts >= 1 && parts < int64_t{1} << 31, "parts is ", parts,
                    ", but must be from 1 to 2^31 - 1.");
  const at::Tensor in = ids.contiguous();
  at::Tensor order = at::empty_like(in), sorted = at::empty_like(in);
  at::Tensor counts = at::empty({parts}, in.options());
  serving::cpu::split(
      in.const_data_ptr<int64_t>(), in.numel(), static_cast<uint32_t>(parts),
      {order.data_ptr<int64_t>(), sorted.data_ptr<int64_t>(), counts.data_ptr<int64_t>()},
      at::get_num_threads());
  return {order, sorted, counts};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(torchrec_hkv, m) {
  m.def(
      "serving_quantize(Tensor rows, int bits, float unit, float limit, Tensor(a!) out) "
      "-> (int, float, int)");
  m.def("serving_lower(Tensor(a!) data, int doublings) -> ()");
  m.def("serving_gather(Tensor data, Tensor order, Tensor(a!) out) -> ()");
  m.def("serving_split(Tensor ids, int parts) -> (Tensor, Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(torchrec_hkv, CPU, m) {
  m.impl("serving_quantize", &serving_quantize);
  m.impl("serving_lower", &serving_lower);
  m.impl("serving_gather", &serving_gather);
  m.impl("serving_split", &serving_split);
}

}  // namespace torchrec_hkv::bindings
