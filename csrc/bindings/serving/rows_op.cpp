// torchrec_hkv::serving_rows: rows of read-only tables, one for each id.
#include <torch/library.h>

#include <vector>

#include "bindings/serving/batch.h"
#include "bindings/serving/lookups.h"
#include "runtime/dtypes.h"
#include "runtime/on_device.h"
#include "serving/kernels_cpu.h"

#ifdef TORCHREC_HKV_CUDA
#include "serving/kernels_cuda.h"
#endif

namespace torchrec_hkv::bindings {
using namespace runtime;
namespace {

using serving::Feature;

#ifdef TORCHREC_HKV_CUDA
void rows_on_gpu(const ServingTables& open, const Feature& feature, int64_t table) {
  const serving::Table& its = *feature.table;
  const auto* const tables = static_cast<const serving::Table*>(open.on_device.const_data_ptr());
  open.counters.select(0, table).select(0, 0).add_(feature.bags);
  const c10::OptionalDeviceGuard guard(open.device);
  serving::cuda::look_up_rows(
      {tables + table, its.format, its.dim, its.row_bytes, feature.ids, feature.bags, feature.type,
       feature.out, reinterpret_cast<unsigned long long*>(feature.unknown)},
      c10::cuda::getCurrentCUDAStream(open.device.index()));
}
#endif

}  // namespace

std::vector<at::Tensor> serving_rows(const at::Tensor& handle, const at::Tensor& ids,
                                     const at::Tensor& lengths, at::IntArrayRef features,
                                     at::IntArrayRef tables, at::IntArrayRef dims,
                                     at::ScalarType dtype) {
  const std::shared_ptr<const ServingTables> open = tables_of(handle, ids);
  const RowType type = row_type_of(dtype, "the output");
  TORCH_CHECK_VALUE(features.size() == tables.size() && features.size() == dims.size(),
                    "features, tables and dims must be of one length, but have ", features.size(),
                    ", ", tables.size(), " and ", dims.size(), ".");
  const ServingBatch batch = check_serving_batch(ids, lengths, std::nullopt);
  const at::Tensor on_host = batch.offsets.cpu();  // sizes of outputs: waits for a GPU
  const int64_t* const offsets = on_host.const_data_ptr<int64_t>();
  check_total_length(offsets[on_host.numel() - 1], ids.numel());
  std::vector<at::Tensor> out;
  for (size_t i = 0; i < features.size(); ++i) {
    Feature made = feature_of(*open, batch, features[i], tables[i]);
    TORCH_CHECK_VALUE(made.table->dim == dims[i], "dims[", i, "] is ", dims[i], ", but table ",
                      tables[i], " has ", made.table->dim, " columns.");
    const int64_t first = offsets[features[i] * batch.batch_size];
    made.bags = offsets[(features[i] + 1) * batch.batch_size] - first;
    made.ids += first;
    made.type = type;
    made.stride = dims[i] * element_size(type);
    out.push_back(at::empty({made.bags, dims[i]}, ids.options().dtype(dtype)));
    made.out = static_cast<char*>(out.back().data_ptr());
#ifdef TORCHREC_HKV_CUDA
    if (ids.is_cuda()) {
      rows_on_gpu(*open, made, tables[i]);
      continue;
    }
#endif
    count_lookups(*open, tables[i], made.bags);
    serving::cpu::look_up(made, at::get_num_threads());
  }
  return out;
}

TORCH_LIBRARY_FRAGMENT(torchrec_hkv, m) {
  m.def(
      "serving_rows(Tensor handle, Tensor ids, Tensor lengths, int[] features, int[] tables, "
      "int[] dims, ScalarType dtype) -> Tensor[]");
}

TORCH_LIBRARY_IMPL(torchrec_hkv, CPU, m) { m.impl("serving_rows", &serving_rows); }

#ifdef TORCHREC_HKV_CUDA
TORCH_LIBRARY_IMPL(torchrec_hkv, CUDA, m) { m.impl("serving_rows", &serving_rows); }
#endif

}  // namespace torchrec_hkv::bindings
