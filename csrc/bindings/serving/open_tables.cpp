// Opens and closes sets of read-only tables. A handle identifies a set. Lookups take it as a
// tensor, so that it is an input of programs that torch.export writes. Fakes of these ops are in
// torchrec_hkv/serving/ops.py.
#include "bindings/serving/open_tables.h"

#include <torch/library.h>

#include <algorithm>
#include <string>
#include <unordered_map>

#include "runtime/checks.h"
#include "runtime/initial_rows.h"

namespace torchrec_hkv::bindings {
using namespace runtime;
namespace {

using serving::HotRowCache;
using serving::Layer;
using serving::RowFormat;
using serving::Table;

class OpenTables {
 public:
  int64_t add(std::shared_ptr<const ServingTables> tables) {
    const std::lock_guard<std::mutex> guard(mutex_);
    open_.emplace(++last_, std::move(tables));
    return last_;
  }
  void remove(int64_t handle) {
    const std::lock_guard<std::mutex> guard(mutex_);
    open_.erase(handle);
  }
  std::shared_ptr<const ServingTables> get(int64_t handle) {
    const std::lock_guard<std::mutex> guard(mutex_);
    const auto found = open_.find(handle);
    TORCH_CHECK_VALUE(found != open_.end(), "handle ", handle,
                      " names no open read-only tables: they were closed, or never opened.");
    return found->second;
  }

 private:
  std::mutex mutex_;
  std::unordered_map<int64_t, std::shared_ptr<const ServingTables>> open_;
  int64_t last_ = 0;
};

OpenTables& all_open() {
  static OpenTables instance;
  return instance;
}

Layer layer_of(const at::Tensor& buckets, const at::Tensor& rows, int64_t row_bytes, int64_t table,
               at::Device device_of_rows) {
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
  check_device(rows, "rows", device_of_rows);
  return Layer{reinterpret_cast<const serving::Bucket*>(buckets.const_data_ptr<int64_t>()),
               {static_cast<uint32_t>(buckets.size(0)), static_cast<uint32_t>(buckets.size(1))},
               reinterpret_cast<const char*>(rows.const_data_ptr<uint8_t>())};
}

// The hot rows of a table whose rows are in host memory.
HotRowCache hot_rows_of(const at::Tensor& words, const at::Tensor& hot_rows,
                        const at::Tensor& counts, const at::Tensor& host_lookups,
                        const at::Tensor& rows, int64_t table, at::Device device) {
  TORCH_CHECK_VALUE(device.is_cuda(), "table ", table, " has hot rows, but is on ", device,
                    ": only tables on a GPU have.");
  const int64_t n = rows.size(0);
  check_dtype(words, "hot_words", at::kInt);
  TORCH_CHECK_VALUE(words.is_contiguous() && words.numel() == 2 * ((n + serving::kHotMaskRows - 1) /
                                                                   serving::kHotMaskRows),
                    "hot_words of table ", table, " must have two numbers for each 32 of ", n,
                    " rows, but have shape ", words.sizes(), ".");
  check_dtype(hot_rows, "hot_rows", at::kByte);
  TORCH_CHECK_VALUE(
      hot_rows.dim() == 2 && hot_rows.size(1) == rows.size(1) && hot_rows.is_contiguous(),
      "hot_rows of table ", table, " must be contiguous and of shape [hot rows, ", rows.size(1),
      "], but have shape ", hot_rows.sizes(), ".");
  HotRowCache made{};
  made.words = reinterpret_cast<const serving::HotMaskWord*>(words.const_data_ptr<int32_t>());
  made.rows = reinterpret_cast<const char*>(hot_rows.const_data_ptr<uint8_t>());
  if (counts.numel() > 0) {
    check_dtype(counts, "lookup_counts", at::kInt);
    check_length(counts, "lookup_counts", n);
    made.counts = reinterpret_cast<uint32_t*>(counts.data_ptr<int32_t>());
  }
  if (host_lookups.numel() > 0) {
    check_dtype(host_lookups, "host_lookups", at::kLong);
    check_length(host_lookups, "host_lookups", 1);
    made.host_lookups = reinterpret_cast<unsigned long long*>(host_lookups.data_ptr<int64_t>());
  }
  return made;
}

int64_t open_tables(const std::vector<at::Tensor>& buckets, const std::vector<at::Tensor>& rows,
                    const std::vector<at::Tensor>& changed_buckets,
                    const std::vector<at::Tensor>& changed_rows,
                    const std::vector<at::Tensor>& hot_words,
                    const std::vector<at::Tensor>& hot_rows,
                    const std::vector<at::Tensor>& lookup_counts,
                    const std::vector<at::Tensor>& host_lookups,
                    const std::vector<at::Tensor>& default_rows, at::IntArrayRef dims,
                    at::IntArrayRef formats, at::ArrayRef<double> units, at::IntArrayRef seeds,
                    const std::vector<std::string>& distributions, at::ArrayRef<double> ranges,
                    const at::Tensor& counters, at::IntArrayRef tt_groups,
                    at::IntArrayRef tt_core_counts, const std::vector<at::Tensor>& tt_cores) {
  const size_t n = buckets.size();
  TORCH_CHECK_VALUE(rows.size() == n && changed_buckets.size() == n && changed_rows.size() == n &&
                        hot_words.size() == n && hot_rows.size() == n &&
                        lookup_counts.size() == n && host_lookups.size() == n &&
                        default_rows.size() == n && dims.size() == n && formats.size() == n &&
                        units.size() == n && seeds.size() == n && distributions.size() == n &&
                        ranges.size() == 4 * n,
                    "all lists must have an element for each table, and ranges four.");
  check_dtype(counters, "counters", at::kLong);
  TORCH_CHECK_VALUE(counters.is_contiguous() && counters.numel() == static_cast<int64_t>(2 * n),
                    "counters must have shape [", n, ", 2], but have ", counters.sizes(), ".");
  auto made = std::make_shared<ServingTables>();
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
    const bool tiered = hot_words[t].numel() > 0;
    table.base = layer_of(buckets[t], rows[t], table.row_bytes, t,
                          tiered ? at::Device(at::kCPU) : made->device);
    table.changes = layer_of(changed_buckets[t], changed_rows[t], table.row_bytes, t, made->device);
    if (tiered) {
      table.hot = hot_rows_of(hot_words[t], hot_rows[t], lookup_counts[t], host_lookups[t], rows[t],
                              t, made->device);
      table.hot.bytes_before = made->host_bytes;
      made->host_bytes += rows[t].numel();
      made->host_row_bytes = std::max(made->host_row_bytes, table.row_bytes);
    }
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
    for (const at::Tensor& tensor :
         {buckets[t], changed_buckets[t], changed_rows[t], hot_words[t], hot_rows[t],
          lookup_counts[t], host_lookups[t], default_rows[t]}) {
      if (tensor.numel() > 0) check_device(tensor, "a tensor of a table", made->device);
      made->memory.push_back(tensor);
    }
    made->memory.push_back(rows[t]);
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

}  // namespace

void close_tables(int64_t handle) { all_open().remove(handle); }

at::Tensor bytes_on(at::Device device, const void* from, size_t bytes) {
  const at::Tensor host =
      at::from_blob(const_cast<void*>(from), {static_cast<int64_t>(bytes)}, at::dtype(at::kByte));
  return host.to(device);
}

std::shared_ptr<const ServingTables> tables_of(const at::Tensor& handle, const at::Tensor& ids) {
  check_dtype(handle, "handle", at::kLong);
  TORCH_CHECK_VALUE(handle.numel() == 1 && handle.is_cpu(),
                    "handle must be one number in host memory.");
  std::shared_ptr<const ServingTables> tables = all_open().get(*handle.const_data_ptr<int64_t>());
  check_device(ids, "ids", tables->device);
  return tables;
}

TORCH_LIBRARY_FRAGMENT(torchrec_hkv, m) {
  m.def(
      "serving_open(Tensor[] buckets, Tensor[] rows, Tensor[] changed_buckets, "
      "Tensor[] changed_rows, Tensor[] hot_words, Tensor[] hot_rows, Tensor[] lookup_counts, "
      "Tensor[] host_lookups, Tensor[] default_rows, int[] dims, int[] formats, float[] units, "
      "int[] seeds, str[] distributions, float[] ranges, Tensor counters, int[] tt_groups, "
      "int[] tt_core_counts, Tensor[] tt_cores) -> int",
      &open_tables);
}

}  // namespace torchrec_hkv::bindings
