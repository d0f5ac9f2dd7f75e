// torchrec_hkv::serving_rows: rows of read-only tables, one per id.
#include <torch/library.h>

#include <vector>

#include "bindings/serving/batch.h"
#include "bindings/serving/lookups.h"
#include "runtime/checks.h"
#include "runtime/dtypes.h"
#include "runtime/on_device.h"
#include "serving/kernels_cpu.h"

#ifdef TORCHREC_HKV_CUDA
#include "bindings/serving/staging.h"
#endif

namespace torchrec_hkv::bindings {
using namespace runtime;
namespace {

using serving::Feature;

// The rows of ids [first, first + count) in a table with `dim` columns.
at::Tensor rows_of(const ServingTables& open, const at::Tensor& ids, int64_t first, int64_t count,
                   int64_t table, int64_t dim, at::ScalarType dtype, RowType type) {
  at::Tensor out = at::empty({count, dim}, ids.options().dtype(dtype));
  Feature made = feature_of(open, ids, table);
  made.ids += first;
  made.bags = count;
  made.type = type;
  made.stride = dim * element_size(type);
  made.out = static_cast<char*>(out.data_ptr());
#ifdef TORCHREC_HKV_CUDA
  if (ids.is_cuda()) {
    const auto* const tables = static_cast<const serving::Table*>(open.on_device.const_data_ptr());
    const serving::Table& served_table = *made.table;
    const c10::OptionalDeviceGuard guard(open.device);
    const bool tiered = served_table.hot.words != nullptr;
    const StagingMemory staging(open, tiered ? count : 0, ids.options());
    serving::cuda::look_up_rows(
        {tables + table, served_table.format, served_table.dim, served_table.row_bytes, made.ids,
         count, type, made.out, open.counters.data_ptr<int64_t>() + 2 * table, staging.arguments,
         phase_of_call(open)},
        c10::cuda::getCurrentCUDAStream(open.device.index()));
    return out;
  }
#endif
  count_lookups(open, table, count);
  serving::cpu::look_up(made, at::get_num_threads());
  return out;
}

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
  for (size_t i = 0; i < features.size(); ++i) {
    check_feature(batch, features[i]);
    const int32_t dim = feature_of(*open, batch.ids, tables[i]).table->dim;
    TORCH_CHECK_VALUE(dim == dims[i], "dims[", i, "] is ", dims[i], ", but table ", tables[i],
                      " has ", dim, " columns.");
  }
  const std::vector<int64_t> offsets = feature_offsets(batch);  // sizes of outputs
  std::vector<at::Tensor> out;
  for (size_t i = 0; i < features.size(); ++i) {
    const int64_t first = offsets[features[i]];
    out.push_back(rows_of(*open, batch.ids, first, offsets[features[i] + 1] - first, tables[i],
                          dims[i], dtype, type));
  }
  return out;
}

at::Tensor serving_table_rows(const at::Tensor& handle, const at::Tensor& ids, int64_t table,
                              at::ScalarType dtype) {
  const std::shared_ptr<const ServingTables> open = tables_of(handle, ids);
  const RowType type = row_type_of(dtype, "the output");
  check_dtype(ids, "ids", at::kLong);
  check_vector(ids, "ids");
  const at::Tensor contiguous_ids = ids.contiguous();
  const int32_t dim = feature_of(*open, contiguous_ids, table).table->dim;
  return rows_of(*open, contiguous_ids, 0, contiguous_ids.numel(), table, dim, dtype, type);
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
