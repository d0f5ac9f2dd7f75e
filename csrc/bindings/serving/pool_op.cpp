// torchrec_hkv::serving_pool: pooled rows of read-only tables.
#include <torch/library.h>

#include <algorithm>
#include <vector>

#include "bindings/serving/batch.h"
#include "bindings/serving/lookups.h"
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
using serving::Mean;

// Flag of an output's kind, whose other bits are its Mean.
constexpr int64_t kFused = 256;

#ifdef TORCHREC_HKV_CUDA
void pool_on_gpu(const ServingTables& open, const ServingBatch& batch, const at::Tensor& offsets,
                 const std::vector<Feature>& outputs, at::IntArrayRef features,
                 at::IntArrayRef tables, at::IntArrayRef kinds, const at::Tensor& out,
                 RowType type) {
  std::vector<int64_t> key(features.begin(), features.end());
  key.insert(key.end(), tables.begin(), tables.end());
  key.insert(key.end(), kinds.begin(), kinds.end());
  std::vector<serving::cuda::PooledOutput> described;
  serving::cuda::PoolLaunch call{};
  int32_t column = 0, layers = 1;
  for (size_t i = 0; i < outputs.size(); ++i) {
    const Feature& feature = outputs[i];
    const auto layer =
        static_cast<int32_t>(std::count(features.begin(), features.begin() + i, features[i]));
    described.push_back({static_cast<int32_t>(tables[i]), static_cast<int32_t>(features[i]), column,
                         layer, feature.mean, feature.fused});
    column += feature.table->dim;
    layers = std::max(layers, layer + 1);
    const bool in_fours = feature.table->dim % 4 == 0;
    call.num_in_fours += in_fours;
    int32_t& widest = in_fours ? call.widest_in_fours : call.widest_other;
    widest = std::max(widest, feature.table->dim);
  }
  std::stable_partition(described.begin(), described.end(),
                        [&](const auto& output) { return open.tables[output.table].dim % 4 == 0; });
  at::Tensor on_device;
  {
    const std::lock_guard<std::mutex> guard(open.mutex);
    at::Tensor& cached = open.outputs[key];
    if (!cached.defined()) {
      cached = bytes_on(open.device, described.data(),
                        described.size() * sizeof(serving::cuda::PooledOutput));
    }
    on_device = cached;
  }
  const StagingMemory staging(open, layers * batch.ids.numel(), batch.ids.options());
  call.tables = static_cast<const serving::Table*>(open.on_device.const_data_ptr());
  call.outputs = static_cast<const serving::cuda::PooledOutput*>(on_device.const_data_ptr());
  call.num_outputs = static_cast<int32_t>(outputs.size());
  call.ids = batch.ids.const_data_ptr<int64_t>();
  call.n = batch.ids.numel();
  call.offsets = offsets.const_data_ptr<int64_t>();
  call.batch_size = batch.batch_size;
  call.weights = batch.weights_data();
  call.type = type;
  call.out = static_cast<char*>(out.data_ptr());
  call.columns = column;
  call.staging = staging.arguments;
  call.counters = open.counters.data_ptr<int64_t>();
  call.phase = phase_of_call(open);
  const c10::OptionalDeviceGuard guard(open.device);
  serving::cuda::pool(call, c10::cuda::getCurrentCUDAStream(open.device.index()));
}
#endif

}  // namespace

at::Tensor serving_pool(const at::Tensor& handle, const at::Tensor& ids, const at::Tensor& lengths,
                        const std::optional<at::Tensor>& weights, at::IntArrayRef features,
                        at::IntArrayRef tables, at::IntArrayRef kinds, int64_t columns,
                        at::ScalarType dtype) {
  const std::shared_ptr<const ServingTables> open = tables_of(handle, ids);
  const RowType type = row_type_of(dtype, "the output");
  TORCH_CHECK_VALUE(features.size() == tables.size() && features.size() == kinds.size(),
                    "features, tables and kinds must be of one length, but have ", features.size(),
                    ", ", tables.size(), " and ", kinds.size(), ".");
  const ServingBatch batch = check_serving_batch(ids, lengths, weights);
  at::Tensor out = at::empty({batch.batch_size, columns}, ids.options().dtype(dtype));
  const at::Tensor all_offsets = bag_offsets(batch);
  const int64_t* const offsets = all_offsets.const_data_ptr<int64_t>();
  std::vector<Feature> outputs;
  int64_t column = 0;
  for (size_t i = 0; i < features.size(); ++i) {
    check_feature(batch, features[i]);
    Feature made = feature_of(*open, batch.ids, tables[i]);
    const int64_t mean = kinds[i] & ~kFused;
    TORCH_CHECK_VALUE(mean >= 0 && mean <= 3, "kinds[", i, "] is ", kinds[i],
                      ", but must be from 0 to 3, or ", kFused, " more.");
    made.mean = static_cast<Mean>(mean);
    made.fused = kinds[i] & kFused;
    made.weights = batch.weights_data();
    made.offsets = offsets + features[i] * batch.batch_size;
    made.bags = batch.batch_size;
    made.type = type;
    made.stride = columns * element_size(type);
    made.out = static_cast<char*>(out.data_ptr()) + column * element_size(type);
    column += made.table->dim;
    outputs.push_back(made);
  }
  TORCH_CHECK_VALUE(column == columns, "columns is ", columns, ", but the tables have ", column,
                    " in all.");
#ifdef TORCHREC_HKV_CUDA
  if (ids.is_cuda()) {
    pool_on_gpu(*open, batch, all_offsets, outputs, features, tables, kinds, out, type);
    return out;
  }
#endif
  for (size_t i = 0; i < outputs.size(); ++i) {
    const Feature& feature = outputs[i];
    count_lookups(*open, tables[i], feature.offsets[feature.bags] - feature.offsets[0]);
    serving::cpu::look_up(feature, at::get_num_threads());
  }
  return out;
}

TORCH_LIBRARY_FRAGMENT(torchrec_hkv, m) {
  m.def(
      "serving_pool(Tensor handle, Tensor ids, Tensor lengths, Tensor? weights, int[] features, "
      "int[] tables, int[] kinds, int columns, ScalarType dtype) -> Tensor");
}

TORCH_LIBRARY_IMPL(torchrec_hkv, CPU, m) { m.impl("serving_pool", &serving_pool); }

#ifdef TORCHREC_HKV_CUDA
TORCH_LIBRARY_IMPL(torchrec_hkv, CUDA, m) { m.impl("serving_pool", &serving_pool); }
#endif

}  // namespace torchrec_hkv::bindings
