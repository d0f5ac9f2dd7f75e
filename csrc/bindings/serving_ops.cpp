// Dispatcher ops of read-only tables (serving/table.h). A set of tables is named by a handle, which
// lookups take as a tensor: a program that torch.export has written is given it with each call.
// Fakes are in torchrec_hkv/serving/ops.py.
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <algorithm>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "runtime/checks.h"
#include "runtime/initial_rows.h"
#include "runtime/on_device.h"
#include "serving/kernels_cpu.h"

#ifdef TORCHREC_HKV_CUDA
#include "serving/kernels_cuda.h"
#endif

namespace torchrec_hkv::bindings {
using namespace runtime;
namespace {

using serving::Feature;
using serving::Layer;
using serving::Mean;
using serving::RowFormat;
using serving::Table;

// What the kind of an output says besides its Mean.
constexpr int64_t kFused = 256;

// Tables that lookups read; nothing of them changes but the counters.
struct Tables {
  std::vector<Table> tables;
  std::vector<at::Tensor> memory;
  at::Tensor counters;  // int64 [tables, 2]: ids looked up, and those that were unknown
  at::Device device = at::kCPU;
  // Groups of Tensor-Train tables: what names each in ops, and its cores.
  std::vector<int64_t> tt_groups;
  std::vector<std::vector<at::Tensor>> tt_cores;
  // On a GPU, bytes of `tables` there, and of the outputs of each pooled lookup that was made.
  at::Tensor on_device;
  mutable std::mutex mutex;
  mutable std::map<std::vector<int64_t>, at::Tensor> outputs;
};

at::Tensor bytes_on(at::Device device, const void* from, size_t bytes) {
  const at::Tensor host =
      at::from_blob(const_cast<void*>(from), {static_cast<int64_t>(bytes)}, at::dtype(at::kByte));
  return host.to(device);
}

class OpenTables {
 public:
  int64_t add(std::shared_ptr<const Tables> tables) {
    const std::lock_guard<std::mutex> guard(mutex_);
    open_.emplace(++last_, std::move(tables));
    return last_;
  }
  void remove(int64_t handle) {
    const std::lock_guard<std::mutex> guard(mutex_);
    open_.erase(handle);
  }
  std::shared_ptr<const Tables> get(int64_t handle) {
    const std::lock_guard<std::mutex> guard(mutex_);
    const auto found = open_.find(handle);
    TORCH_CHECK_VALUE(found != open_.end(), "handle ", handle,
                      " names no open read-only tables: they were closed, or never opened.");
    return found->second;
  }

 private:
  std::mutex mutex_;
  std::unordered_map<int64_t, std::shared_ptr<const Tables>> open_;
  int64_t last_ = 0;
};

OpenTables& all_open() {
  static OpenTables instance;
  return instance;
}

Layer layer_of(const at::Tensor& buckets, const at::Tensor& rows, int64_t row_bytes,
               int64_t table) {
  if (buckets.numel() == 0) return Layer{};
  check_dtype(buckets, "buckets", at::kLong);
  TORCH_CHECK_VALUE(buckets.dim() == 3 && buckets.size(2) == 8 && buckets.is_contiguous() &&
                        reinterpret_cast<uintptr_t>(buckets.const_data_ptr()) % 64 == 0,
                    "buckets of table ", table, " must be contiguous, aligned to 64 bytes and of ",
                    "shape [blocks, buckets, 8], but have shape ", buckets.sizes(), ".");
  check_dtype(rows, "rows", at::kByte);
  TORCH_CHECK_VALUE(rows.dim() == 2 && rows.size(1) == row_bytes && rows.is_contiguous(),
                    "rows of table ", table, " must be contiguous and of shape [rows, ", row_bytes,
                    "], but have shape ", rows.sizes(), ".");
  check_device(rows, "rows", buckets.device());
  return Layer{reinterpret_cast<const serving::Bucket*>(buckets.const_data_ptr<int64_t>()),
               {static_cast<uint32_t>(buckets.size(0)), static_cast<uint32_t>(buckets.size(1))},
               reinterpret_cast<const char*>(rows.const_data_ptr<uint8_t>())};
}

int64_t open_tables(const std::vector<at::Tensor>& buckets, const std::vector<at::Tensor>& rows,
                    const std::vector<at::Tensor>& changed_buckets,
                    const std::vector<at::Tensor>& changed_rows,
                    const std::vector<at::Tensor>& default_rows, at::IntArrayRef dims,
                    at::IntArrayRef formats, at::ArrayRef<double> units, at::IntArrayRef seeds,
                    const std::vector<std::string>& distributions, at::ArrayRef<double> ranges,
                    const at::Tensor& counters, at::IntArrayRef tt_groups,
                    at::IntArrayRef tt_core_counts, const std::vector<at::Tensor>& tt_cores) {
  const size_t n = buckets.size();
  TORCH_CHECK_VALUE(rows.size() == n && changed_buckets.size() == n && changed_rows.size() == n &&
                        default_rows.size() == n && dims.size() == n && formats.size() == n &&
                        units.size() == n && seeds.size() == n && distributions.size() == n &&
                        ranges.size() == 4 * n,
                    "all lists must have an element for each table, and ranges four.");
  check_dtype(counters, "counters", at::kLong);
  TORCH_CHECK_VALUE(counters.is_contiguous() && counters.numel() == static_cast<int64_t>(2 * n),
                    "counters must have shape [", n, ", 2], but have ", counters.sizes(), ".");
  auto made = std::make_shared<Tables>();
  made->counters = counters;
  made->device = counters.device();
  for (size_t t = 0; t < n; ++t) {
    const auto format = static_cast<RowFormat>(formats[t]);
    TORCH_CHECK_VALUE(formats[t] >= 0 && formats[t] <= 4, "formats[", t, "] is ", formats[t],
                      ", but must be from 0 to 4.");
    TORCH_CHECK_VALUE(dims[t] >= 1 && dims[t] <= 1 << 20, "dims[", t, "] is ", dims[t],
                      ", but must be from 1 to 2^20.");
    Table table{};
    table.format = format;
    table.dim = static_cast<int32_t>(dims[t]);
    table.row_bytes = serving::row_bytes_of(format, table.dim);
    table.unit = static_cast<float>(units[t]);
    table.base = layer_of(buckets[t], rows[t], table.row_bytes, t);
    table.changes = layer_of(changed_buckets[t], changed_rows[t], table.row_bytes, t);
    if (default_rows[t].numel() > 0) {
      check_dtype(default_rows[t], "default_rows", at::kFloat);
      check_length(default_rows[t], "default_rows", table.dim);
      table.default_row = default_rows[t].const_data_ptr<float>();
    }
    const auto range = ranges.slice(4 * t, 4);
    table.initial_rows =
        make_initial_rows({distributions[t], range[0], range[1], range[2], range[3]},
                          static_cast<uint64_t>(seeds[t]), "");
    made->tables.push_back(table);
    for (const at::Tensor& its :
         {buckets[t], rows[t], changed_buckets[t], changed_rows[t], default_rows[t]}) {
      if (its.numel() > 0) check_device(its, "a tensor of a table", made->device);
      made->memory.push_back(its);
    }
  }
  TORCH_CHECK_VALUE(tt_groups.size() == tt_core_counts.size(),
                    "tt_groups and tt_core_counts must be of one length.");
  made->tt_groups = tt_groups.vec();
  auto core = tt_cores.begin();
  for (const int64_t count : tt_core_counts) {
    TORCH_CHECK_VALUE(count >= 0 && count <= tt_cores.end() - core,
                      "tt_core_counts must add up to the number of tt_cores, ", tt_cores.size(),
                      ".");
    made->tt_cores.emplace_back(core, core + count);
    core += count;
  }
  if (made->device.is_cuda()) {
    made->on_device =
        bytes_on(made->device, made->tables.data(), made->tables.size() * sizeof(Table));
  }
  return all_open().add(std::move(made));
}

void close_tables(int64_t handle) { all_open().remove(handle); }

std::shared_ptr<const Tables> tables_of(const at::Tensor& handle, const at::Tensor& ids) {
  check_dtype(handle, "handle", at::kLong);
  TORCH_CHECK_VALUE(handle.numel() == 1 && handle.is_cpu(),
                    "handle must be one number in host memory.");
  std::shared_ptr<const Tables> tables = all_open().get(*handle.const_data_ptr<int64_t>());
  check_device(ids, "ids", tables->device);
  return tables;
}

RowType row_type_of(at::ScalarType dtype) {
  switch (dtype) {
    case at::kFloat:
      return RowType::kFloat32;
    case at::kHalf:
      return RowType::kFloat16;
    case at::kBFloat16:
      return RowType::kBFloat16;
    default:
      TORCH_CHECK_VALUE(false, "dtype is ", dtype, ", but must be float32, float16 or bfloat16.");
  }
}

// Ids of all features, one after the other; where the bags of each begin.
struct RequestBatch {
  at::Tensor ids;
  at::Tensor weights;  // undefined: none
  at::Tensor offsets;  // int64 [features * batch_size + 1]
  int64_t features;
  int64_t batch_size;

  const float* weights_data() const {
    return weights.defined() ? weights.const_data_ptr<float>() : nullptr;
  }
};

void check_total(int64_t total, int64_t ids) {
  TORCH_CHECK_VALUE(total == ids, "lengths add up to ", total, ", but there are ", ids, " ids.");
}

RequestBatch check_batch(const at::Tensor& ids, const at::Tensor& lengths,
                         const std::optional<at::Tensor>& weights) {
  check_dtype(ids, "ids", at::kLong);
  check_vector(ids, "ids");
  TORCH_CHECK_TYPE(lengths.scalar_type() == at::kLong || lengths.scalar_type() == at::kInt,
                   "lengths must be of dtype Int or Long, but are of dtype ", lengths.scalar_type(),
                   ".");
  TORCH_CHECK_VALUE(lengths.dim() == 2, "lengths must have shape [features, samples], but have ",
                    lengths.sizes(), ".");
  check_device(lengths, "lengths", ids.device());
  RequestBatch batch;
  batch.ids = ids.contiguous();
  batch.features = lengths.size(0);
  batch.batch_size = lengths.size(1);
  if (weights) {
    check_dtype(*weights, "weights", at::kFloat);
    check_length(*weights, "weights", ids.numel());
    check_device(*weights, "weights", ids.device());
    batch.weights = weights->contiguous();
  }
  const int64_t bags = lengths.numel();
  if (ids.is_cuda()) {  // looking at the lengths would wait for the device
    batch.offsets = at::zeros({bags + 1}, ids.options());
    batch.offsets.narrow(0, 1, bags).copy_(at::cumsum(lengths.flatten(), 0, at::kLong));
    return batch;
  }
  batch.offsets = at::empty({bags + 1}, ids.options());
  const at::Tensor from = lengths.contiguous();
  int64_t* const offsets = batch.offsets.data_ptr<int64_t>();
  offsets[0] = 0;
  const auto add_up = [&](const auto* of) {
    for (int64_t bag = 0; bag < bags; ++bag) {
      TORCH_CHECK_VALUE(of[bag] >= 0, "lengths must not be negative, but have ", of[bag],
                        " for feature ", bag / batch.batch_size, ", sample ",
                        bag % batch.batch_size, ".");
      offsets[bag + 1] = offsets[bag] + of[bag];
    }
  };
  if (from.scalar_type() == at::kInt) {
    add_up(from.const_data_ptr<int32_t>());
  } else {
    add_up(from.const_data_ptr<int64_t>());
  }
  check_total(offsets[bags], ids.numel());
  return batch;
}

// One output, but for what differs between a pooled one and a sequence.
Feature feature_of(const Tables& tables, const RequestBatch& batch, int64_t feature,
                   int64_t table) {
  TORCH_CHECK_VALUE(feature >= 0 && feature < batch.features, "feature ", feature,
                    " is asked for, but there are lengths of ", batch.features, " features.");
  TORCH_CHECK_VALUE(table >= 0 && table < static_cast<int64_t>(tables.tables.size()), "table ",
                    table, " is asked for, but there are ", tables.tables.size(), " tables.");
  Feature made{};
  made.table = &tables.tables[table];
  made.ids = batch.ids.const_data_ptr<int64_t>();
  made.unknown = tables.counters.data_ptr<int64_t>() + 2 * table + 1;
  return made;
}

void count_lookups(const Tables& tables, int64_t table, int64_t n) {
  __atomic_fetch_add(tables.counters.data_ptr<int64_t>() + 2 * table, n, __ATOMIC_RELAXED);
}

#ifdef TORCHREC_HKV_CUDA
void pool_on_gpu(const Tables& open, const RequestBatch& batch, const std::vector<Feature>& outputs,
                 at::IntArrayRef features, at::IntArrayRef tables, at::IntArrayRef kinds,
                 const at::Tensor& out, RowType type) {
  std::vector<int64_t> key(features.begin(), features.end());
  key.insert(key.end(), tables.begin(), tables.end());
  key.insert(key.end(), kinds.begin(), kinds.end());
  std::vector<serving::cuda::PooledOutput> described;
  serving::cuda::PoolCall call{};
  call.in_fours = true;
  int32_t column = 0, layers = 1;
  for (size_t i = 0; i < outputs.size(); ++i) {
    const Feature& its = outputs[i];
    const auto layer =
        static_cast<int32_t>(std::count(features.begin(), features.begin() + i, features[i]));
    described.push_back({static_cast<int32_t>(tables[i]), static_cast<int32_t>(features[i]), column,
                         layer, its.mean, its.fused});
    column += its.table->dim;
    layers = std::max(layers, layer + 1);
    call.widest = std::max(call.widest, its.table->dim);
    call.in_fours = call.in_fours && its.table->dim % 4 == 0;
  }
  at::Tensor on_device;
  {
    const std::lock_guard<std::mutex> guard(open.mutex);
    at::Tensor& kept = open.outputs[key];
    if (!kept.defined()) {
      kept = bytes_on(open.device, described.data(),
                      described.size() * sizeof(serving::cuda::PooledOutput));
    }
    on_device = kept;
  }
  const at::Tensor found = at::empty({layers * batch.ids.numel()}, batch.ids.options());
  call.tables = static_cast<const Table*>(open.on_device.const_data_ptr());
  call.outputs = static_cast<const serving::cuda::PooledOutput*>(on_device.const_data_ptr());
  call.num_outputs = static_cast<int32_t>(outputs.size());
  call.ids = batch.ids.const_data_ptr<int64_t>();
  call.n = batch.ids.numel();
  call.offsets = batch.offsets.const_data_ptr<int64_t>();
  call.batch_size = batch.batch_size;
  call.weights = batch.weights_data();
  call.type = type;
  call.out = static_cast<char*>(out.data_ptr());
  call.columns = column;
  call.found = reinterpret_cast<const char**>(found.data_ptr<int64_t>());
  call.counters = open.counters.data_ptr<int64_t>();
  const c10::OptionalDeviceGuard guard(open.device);
  serving::cuda::pool(call, c10::cuda::getCurrentCUDAStream(open.device.index()));
}
#endif

at::Tensor pool(const at::Tensor& handle, const at::Tensor& ids, const at::Tensor& lengths,
                const std::optional<at::Tensor>& weights, at::IntArrayRef features,
                at::IntArrayRef tables, at::IntArrayRef kinds, int64_t columns,
                at::ScalarType dtype) {
  const std::shared_ptr<const Tables> open = tables_of(handle, ids);
  const RowType type = row_type_of(dtype);
  TORCH_CHECK_VALUE(features.size() == tables.size() && features.size() == kinds.size(),
                    "features, tables and kinds must be of one length, but have ", features.size(),
                    ", ", tables.size(), " and ", kinds.size(), ".");
  const RequestBatch batch = check_batch(ids, lengths, weights);
  at::Tensor out = at::empty({batch.batch_size, columns}, ids.options().dtype(dtype));
  const int64_t* const offsets = batch.offsets.const_data_ptr<int64_t>();
  std::vector<Feature> outputs;
  int64_t column = 0;
  for (size_t i = 0; i < features.size(); ++i) {
    Feature made = feature_of(*open, batch, features[i], tables[i]);
    const int64_t mean = kinds[i] & ~kFused;
    TORCH_CHECK_VALUE(mean >= 0 && mean <= 3, "kinds[", i, "] is ", kinds[i],
                      ", which is no kind of pooling.");
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
    pool_on_gpu(*open, batch, outputs, features, tables, kinds, out, type);
    return out;
  }
#endif
  for (size_t i = 0; i < outputs.size(); ++i) {
    const Feature& its = outputs[i];
    count_lookups(*open, tables[i], its.offsets[its.bags] - its.offsets[0]);
    serving::cpu::look_up(its, at::get_num_threads());
  }
  return out;
}

#ifdef TORCHREC_HKV_CUDA
void rows_on_gpu(const Tables& open, const Feature& feature, int64_t table) {
  const Table& its = *feature.table;
  const auto* const tables = static_cast<const Table*>(open.on_device.const_data_ptr());
  open.counters.select(0, table).select(0, 0).add_(feature.bags);
  const c10::OptionalDeviceGuard guard(open.device);
  serving::cuda::look_up_rows(
      {tables + table, its.format, its.dim, its.row_bytes, feature.ids, feature.bags, feature.type,
       feature.out, reinterpret_cast<unsigned long long*>(feature.unknown)},
      c10::cuda::getCurrentCUDAStream(open.device.index()));
}
#endif

std::vector<at::Tensor> rows(const at::Tensor& handle, const at::Tensor& ids,
                             const at::Tensor& lengths, at::IntArrayRef features,
                             at::IntArrayRef tables, at::IntArrayRef dims, at::ScalarType dtype) {
  const std::shared_ptr<const Tables> open = tables_of(handle, ids);
  const RowType type = row_type_of(dtype);
  TORCH_CHECK_VALUE(features.size() == tables.size() && features.size() == dims.size(),
                    "features, tables and dims must be of one length, but have ", features.size(),
                    ", ", tables.size(), " and ", dims.size(), ".");
  const RequestBatch batch = check_batch(ids, lengths, std::nullopt);
  const at::Tensor on_host = batch.offsets.cpu();  // sizes of outputs: waits for a GPU
  const int64_t* const offsets = on_host.const_data_ptr<int64_t>();
  check_total(offsets[on_host.numel() - 1], ids.numel());
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

// Tensor-Train tables of one group: pooled, one tensor of all outputs; else one of each output.
std::vector<at::Tensor> tensor_train(const at::Tensor& handle, const at::Tensor& ids,
                                     const at::Tensor& lengths,
                                     const std::optional<at::Tensor>& weights,
                                     at::IntArrayRef features, int64_t group, at::IntArrayRef dims,
                                     bool mean, bool pooled) {
  const std::shared_ptr<const Tables> open = tables_of(handle, ids);
  TORCH_CHECK_VALUE(group >= 0 && group < static_cast<int64_t>(open->tt_groups.size()), "group ",
                    group, " is asked for, but there are ", open->tt_groups.size(), ".");
  const RequestBatch batch = check_batch(ids, lengths, weights);
  const at::Tensor on_host = batch.offsets.cpu();  // waits for a GPU
  const int64_t* const offsets = on_host.const_data_ptr<int64_t>();
  check_total(offsets[on_host.numel() - 1], ids.numel());
  // The ids of these features, one feature after the other.
  std::vector<at::Tensor> of_ids, of_weights;
  std::vector<int64_t> counts;
  at::Tensor own_offsets =
      at::empty({static_cast<int64_t>(features.size()) * batch.batch_size + 1}, on_host.options());
  int64_t* to = own_offsets.data_ptr<int64_t>();
  *to++ = 0;
  int64_t total = 0;
  for (const int64_t feature : features) {
    TORCH_CHECK_VALUE(feature >= 0 && feature < batch.features, "feature ", feature,
                      " is asked for, but there are lengths of ", batch.features, " features.");
    const int64_t* const its = offsets + feature * batch.batch_size;
    const int64_t first = its[0], n = its[batch.batch_size] - first;
    of_ids.push_back(batch.ids.narrow(0, first, n));
    if (batch.weights.defined()) of_weights.push_back(batch.weights.narrow(0, first, n));
    for (int64_t bag = 1; bag <= batch.batch_size; ++bag) *to++ = total + its[bag] - first;
    total += n;
    counts.push_back(n);
  }
  std::optional<at::Tensor> its_weights;
  if (batch.weights.defined()) its_weights = at::cat(of_weights);
  using Lookup = at::Tensor(at::TensorList, int64_t, const at::Tensor&, const at::Tensor&,
                            const std::optional<at::Tensor>&, const std::optional<at::Tensor>&,
                            int64_t, bool, bool);
  static const auto lookup =
      c10::Dispatcher::singleton().findSchemaOrThrow("torchrec_hkv::tt_lookup", "").typed<Lookup>();
  const at::Tensor out = lookup.call(open->tt_cores[group], open->tt_groups[group], at::cat(of_ids),
                                     own_offsets.to(ids.device()), its_weights, std::nullopt,
                                     batch.batch_size, mean, pooled);
  int64_t columns = pooled ? 0 : out.size(1);
  for (const int64_t dim : dims) columns = pooled ? columns + dim : dim == columns ? columns : -1;
  TORCH_CHECK_VALUE(dims.size() == features.size() && columns == out.size(1), "dims are ", dims,
                    ", but the outputs of these tables have ", out.size(1), " columns.");
  if (pooled) return {out};
  std::vector<at::Tensor> rows_of;
  int64_t first = 0;
  for (const int64_t n : counts) {
    rows_of.push_back(out.narrow(0, first, n).clone());
    first += n;
  }
  return rows_of;
}

std::tuple<at::Tensor, at::Tensor> place(const at::Tensor& ids,
                                         const std::optional<at::Tensor>& erased, int64_t blocks,
                                         int64_t block_buckets, int64_t first_block,
                                         int64_t num_blocks, int64_t first_row) {
  check_dtype(ids, "ids", at::kLong);
  check_vector(ids, "ids");
  if (erased) {
    check_dtype(*erased, "erased", at::kBool);
    check_length(*erased, "erased", ids.numel());
  }
  TORCH_CHECK_VALUE(blocks >= 1 && blocks < int64_t{1} << 31 && block_buckets >= 1 &&
                        block_buckets < int64_t{1} << 31 && first_block >= 0 && num_blocks >= 0 &&
                        first_block + num_blocks <= blocks && first_row >= 0,
                    "blocks ", first_block, " to ", first_block + num_blocks, " of ", blocks,
                    " with ", block_buckets, " buckets from row ", first_row,
                    " on are no part of a table.");
  const at::Tensor in = ids.contiguous(), gone = erased ? erased->contiguous() : at::Tensor();
  const int64_t words = num_blocks * block_buckets * 8;
  // Aligned to a cache line, as the index of a table must be.
  at::Tensor buckets = at::empty({words}, ids.options());
  at::Tensor order = at::empty({ids.numel()}, ids.options());
  serving::cpu::Placement placement{};
  placement.ids = in.const_data_ptr<int64_t>();
  placement.n = in.numel();
  placement.geometry = {static_cast<uint32_t>(blocks), static_cast<uint32_t>(block_buckets)};
  placement.first_block = static_cast<uint32_t>(first_block);
  placement.blocks = static_cast<uint32_t>(num_blocks);
  placement.first_row = first_row;
  placement.erased = erased ? gone.const_data_ptr<bool>() : nullptr;
  placement.buckets = reinterpret_cast<serving::Bucket*>(buckets.data_ptr<int64_t>());
  placement.order = order.data_ptr<int64_t>();
  int64_t at = 0;
  const serving::cpu::Placed placed = serving::cpu::place(placement, &at, at::get_num_threads());
  const int64_t id = in.numel() == 0 ? 0 : placement.ids[at];
  TORCH_CHECK_VALUE(placed != serving::cpu::Placed::kRepeatedId, "id ", id, " is there twice.");
  TORCH_CHECK_VALUE(placed != serving::cpu::Placed::kForeignId, "id ", id,
                    " is not of these blocks.");
  TORCH_CHECK_VALUE(placed != serving::cpu::Placed::kFull, "id ", id,
                    " finds no place: ", "the table is too full.");
  return {buckets.view({num_blocks, block_buckets, 8}), order};
}

at::Tensor blocks_of(const at::Tensor& ids, int64_t blocks) {
  check_dtype(ids, "ids", at::kLong);
  const at::Tensor in = ids.contiguous();
  at::Tensor out = at::empty_like(in);
  const serving::Geometry geometry{static_cast<uint32_t>(blocks), 1};
  for (int64_t i = 0; i < in.numel(); ++i) {
    out.data_ptr<int64_t>()[i] =
        serving::block_of_mix(serving::mix_of_id(in.const_data_ptr<int64_t>()[i]), geometry);
  }
  return out;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(torchrec_hkv, m) {
  m.def(
      "serving_open(Tensor[] buckets, Tensor[] rows, Tensor[] changed_buckets, "
      "Tensor[] changed_rows, Tensor[] default_rows, int[] dims, int[] formats, float[] units, "
      "int[] seeds, str[] distributions, float[] ranges, Tensor counters, int[] tt_groups, "
      "int[] tt_core_counts, Tensor[] tt_cores) -> int",
      &open_tables);
  m.def("serving_close(int handle) -> ()", &close_tables);
  m.def(
      "serving_pool(Tensor handle, Tensor ids, Tensor lengths, Tensor? weights, int[] features, "
      "int[] tables, int[] kinds, int columns, ScalarType dtype) -> Tensor");
  m.def(
      "serving_rows(Tensor handle, Tensor ids, Tensor lengths, int[] features, int[] tables, "
      "int[] dims, ScalarType dtype) -> Tensor[]");
  m.def(
      "serving_tt(Tensor handle, Tensor ids, Tensor lengths, Tensor? weights, int[] features, "
      "int group, int[] dims, bool mean, bool pooled) -> Tensor[]");
  m.def(
      "serving_place(Tensor ids, Tensor? erased, int blocks, int block_buckets, int first_block, "
      "int num_blocks, int first_row) -> (Tensor, Tensor)");
  m.def("serving_blocks(Tensor ids, int blocks) -> Tensor");
}

#ifdef TORCHREC_HKV_CUDA
TORCH_LIBRARY_IMPL(torchrec_hkv, CUDA, m) {
  m.impl("serving_pool", &pool);
  m.impl("serving_rows", &rows);
  m.impl("serving_tt", &tensor_train);
}
#endif

TORCH_LIBRARY_IMPL(torchrec_hkv, CPU, m) {
  m.impl("serving_pool", &pool);
  m.impl("serving_rows", &rows);
  m.impl("serving_tt", &tensor_train);
  m.impl("serving_place", &place);
  m.impl("serving_blocks", &blocks_of);
}

}  // namespace torchrec_hkv::bindings
