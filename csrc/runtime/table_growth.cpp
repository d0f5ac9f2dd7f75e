// When and how tables of a group grow; see TableGroup. csrc/hash_table/grow.h has the kernels.
#include <c10/core/DeviceGuard.h>

#include <algorithm>
#include <utility>

#include "hash_table/frames_kernels.h"
#include "hash_table/grow.h"
#include "hash_table/kernels.h"
#include "runtime/capture.h"
#include "runtime/on_device.h"
#include "runtime/table_group.h"

#ifdef TORCHREC_HKV_CUDA
#include "common/cuda_check.h"
#endif

namespace torchrec_hkv::runtime {
namespace {

// Consecutive calls that may read a table's size, and so wait for the device. After that the table
// grows until they need not: a table of constant size must not wait in every step.
constexpr int64_t kMostLooks = 16;

// Whether a table with this many entries has too few slots, if it can have more. Nothing is evicted
// before a table is 95 % full.
bool too_few(int64_t slots, int64_t entries) { return entries > slots - slots / 8; }

void wait_for([[maybe_unused]] at::Device device) {
#ifdef TORCHREC_HKV_CUDA
  if (device.is_cuda()) HKV_CUDA_CHECK(cudaDeviceSynchronize());
#endif
}

}  // namespace

int64_t TableGroup::buckets_for(int64_t table, int64_t entries) const {
  const hash_table::Geometry& geometry = memory_[table].geometry();
  int64_t buckets = memory_[table].num_buckets();
  while (buckets < geometry.num_buckets && too_few(buckets * geometry.bucket_slots, entries)) {
    buckets *= 2;
  }
  return buckets;
}

void TableGroup::make_room(const hash_table::Batch& batch, const at::Tensor& ids,
                           const std::optional<at::Tensor>& offsets, at::IntArrayRef first_bags) {
  if (!growing_ || batch.num_ids == 0 || batch.num_bags == 0) return;
  const c10::OptionalDeviceGuard guard(device_);
  for (int64_t t = 0; t < num_tables(); ++t) {
    // A replayed graph inserts without the host's knowledge.
    TORCH_CHECK(!memory_[t].grows() || !is_capturing(device_), "table '", configs_[t].name,
                "' has ", memory_[t].num_slots(), " of its ", memory_[t].full_slots(),
                " slots and can't grow in a CUDA graph: reserve its whole capacity before "
                "capturing.");
  }
  const std::vector<int64_t> unsure =
      order_->run(kHostOnly, [&] { return expect_ids(batch.num_ids); });
  if (unsure.empty()) return;
  order_->run(kWriteAll, [&] { look_and_grow(batch, ids, offsets, first_bags, unsure); });
}

std::vector<int64_t> TableGroup::expect_ids(int64_t n) {
  std::vector<int64_t> unsure;
  for (int64_t t = 0; t < num_tables(); ++t) {
    if (!memory_[t].grows()) continue;
    growth_[t].most_entries += n;
    if (too_few(memory_[t].num_slots(), growth_[t].most_entries)) {
      unsure.push_back(t);
    } else {
      growth_[t].looks = 0;
    }
  }
  return unsure;
}

void TableGroup::look_and_grow(const hash_table::Batch& batch, const at::Tensor& ids,
                               const std::optional<at::Tensor>& offsets, at::IntArrayRef first_bags,
                               const std::vector<int64_t>& tables) {
  const at::Tensor sizes = this->sizes().cpu();
  const std::vector<int64_t> added = count_new(batch, ids, offsets, first_bags);
  for (int64_t t = 0; t < num_tables(); ++t) {
    growth_[t].most_entries = sizes.const_data_ptr<int64_t>()[t] + added[t];
  }
  for (const int64_t t : tables) {
    const bool often = ++growth_[t].looks >= kMostLooks;
    const int64_t entries = growth_[t].most_entries + (often ? batch.num_ids : 0);
    if (too_few(memory_[t].num_slots(), entries)) {
      grow(t, buckets_for(t, entries));
      growth_[t].looks = 0;
    }
  }
}

std::vector<int64_t> TableGroup::count_new(const hash_table::Batch& batch, const at::Tensor& ids,
                                           const std::optional<at::Tensor>& offsets,
                                           at::IntArrayRef first_bags) const {
  at::Tensor slots = at::empty_like(ids);
  int64_t* out = slots.data_ptr<int64_t>();
  HKV_ON_DEVICE(device_, hash_table::cpu::find(views(), batch, out, threads),
                hash_table::cuda::find(views(), only_view_now(), batch, out, stream));
  const at::Tensor missing = slots.lt(0);
  // First id of each feature.
  const at::Tensor starts = offsets
                                ? offsets->cpu().index_select(0, at::tensor(first_bags, at::kLong))
                                : at::tensor({int64_t{0}, batch.num_ids}, at::kLong);
  const int64_t* start = starts.const_data_ptr<int64_t>();
  std::vector<int64_t> added(num_tables());
  for (int64_t t = 0; t < num_tables(); ++t) {
    if (!memory_[t].grows()) continue;
    std::vector<at::Tensor> parts;
    for (int64_t f = 0; f < num_features(); ++f) {
      if (feature_table_list_[f] != t) continue;
      const at::Tensor its = missing.slice(0, start[f], start[f + 1]);
      parts.push_back(ids.slice(0, start[f], start[f + 1]).masked_select(its));
    }
    if (parts.empty()) continue;
    added[t] = std::get<0>(at::_unique2(at::cat(parts), /*sorted=*/false)).numel();
  }
  return added;
}

void TableGroup::expect_entries(int64_t table, int64_t n) {
  check_index(table);
  order_->run(kHostOnly, [&] { growth_[table].most_entries += n; });
}

void TableGroup::reserve(int64_t table, int64_t rows) {
  check_index(table);
  const int64_t most = memory_[table].full_slots();
  TORCH_CHECK_VALUE(rows >= 0 && rows <= most, "table '", configs_[table].name, "': ", rows,
                    " rows were to be reserved, but must be from 0 to its capacity, ", most, ".");
  grow(table, buckets_for(table, rows));
}

bool TableGroup::reserve_buckets(int64_t table, int64_t num_buckets, int64_t bucket_slots) {
  check_index(table);
  const hash_table::Geometry& geometry = memory_[table].geometry();
  int64_t buckets = memory_[table].num_buckets();
  while (buckets < num_buckets && buckets < geometry.num_buckets) buckets *= 2;
  if (buckets != num_buckets || bucket_slots != geometry.bucket_slots) return false;
  grow(table, buckets);
  return true;
}

int64_t TableGroup::present_slots(int64_t table) const {
  check_index(table);
  return memory_[table].num_slots();
}

int64_t TableGroup::full_slots(int64_t table) const {
  check_index(table);
  return memory_[table].full_slots();
}

void TableGroup::grow(int64_t table, int64_t num_buckets) {
  TableMemory& memory = memory_[table];
  if (num_buckets <= memory.num_buckets()) return;
  const c10::OptionalDeviceGuard guard(device_);
  TORCH_CHECK(!is_capturing(device_), "table '", configs_[table].name,
              "' can't grow while a CUDA graph is being captured.");
  wait_for(device_);  // calls that use the present slots and views
  try {
    memory.back(num_buckets);
  } catch (const c10::Error& error) {
    TORCH_CHECK(false, "table '", configs_[table].name, "' can't grow from ", memory.num_slots(),
                " to ", num_buckets * memory.geometry().bucket_slots,
                " slots: ", error.what_without_backtrace());
  }
  const bool at_home = bring_home(table, num_buckets);
  at::Tensor scratch;
#ifdef TORCHREC_HKV_CUDA
  if (device_.is_cuda()) {
    scratch = at::empty({hash_table::cuda::kAstrayRoom + 1}, at::dtype(at::kLong).device(device_));
  }
#endif
  while (memory.num_buckets() < num_buckets) {
    HKV_ON_DEVICE(
        device_, hash_table::cpu::split_buckets(host_views_[table], threads),
        hash_table::cuda::split_buckets(host_views_[table], scratch.data_ptr<int64_t>(), stream));
    memory.resize(2 * memory.num_buckets());
    host_views_[table] =
        at_home && memory.num_buckets() < num_buckets ? view_at_home(table) : make_view(table);
  }
  fill_frames(table);
  upload_views();
  wait_for(device_);  // work of any stream
  growing_ = std::any_of(memory_.begin(), memory_.end(), [](const auto& m) { return m.grows(); });
  ++growths_;
}

hash_table::TableView TableGroup::view_at_home(int64_t table) const {
  hash_table::TableView view = make_view(table);
  view.rows.homes = memory_[table].rows_host.data();
  if (memory_[table].states_move()) view.states.homes = memory_[table].states_host.data();
  view.homes_on_host = true;
  view.frames = {};
  return view;
}

bool TableGroup::bring_home([[maybe_unused]] int64_t table, [[maybe_unused]] int64_t num_buckets) {
#ifdef TORCHREC_HKV_CUDA
  TableMemory& memory = memory_[table];
  const hash_table::TableView& view = host_views_[table];
  if (!memory.rows_on_host(num_buckets * memory.geometry().bucket_slots)) return false;
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream(device_.index());
  if (memory.rows_on_host()) {
    hash_table::cuda::write_home(view, stream);
  } else {
    const auto copy = [&](const SlotArray& from, const SlotArray& to, int64_t bytes) {
      if (bytes == 0) return;
      HKV_CUDA_CHECK(cudaMemcpyAsync(to.data(), from.data(), static_cast<size_t>(bytes),
                                     cudaMemcpyDefault, stream));
    };
    copy(memory.rows, memory.rows_host, memory.num_slots() * view.rows.bytes());
    if (memory.states_move()) {
      copy(memory.states, memory.states_host, memory.num_slots() * view.states.bytes());
    }
  }
  // A pending backward may have to write any slot's home.
  memory.empty_frames(clock_->now());
  host_views_[table] = view_at_home(table);
  return true;
#else
  return false;
#endif
}

int64_t TableGroup::loaded_buckets(int64_t table, const at::Tensor& ids,
                                   const at::Tensor& occupied) const {
  const hash_table::Geometry& geometry = memory_[table].geometry();
  const int64_t* id = ids.const_data_ptr<int64_t>();
  const bool* there = occupied.const_data_ptr<bool>();
  int64_t buckets = geometry.initial_buckets();
  for (int64_t slot = 0; slot < geometry.num_slots() && buckets < geometry.num_buckets;) {
    const auto bucket = static_cast<uint32_t>(slot / geometry.bucket_slots);
    if (!there[slot] ||
        (bucket < buckets &&
         !hash_table::is_astray(id[slot], bucket, static_cast<uint32_t>(buckets)))) {
      ++slot;
    } else {
      buckets *= 2;
      slot = 0;
    }
  }
  return buckets;
}

void TableGroup::begin_load(int64_t table, int64_t num_buckets) {
  TableMemory& memory = memory_[table];
  grow(table, num_buckets);
  if (num_buckets < memory.num_buckets()) {
    wait_for(device_);
    memory.resize(num_buckets);
    host_views_[table] = make_view(table);
    upload_views();
    wait_for(device_);
    growing_ = true;
    ++growths_;
  }
  growth_[table] = Growth{};
}

}  // namespace torchrec_hkv::runtime
