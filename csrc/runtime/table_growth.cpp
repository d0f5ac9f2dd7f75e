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

// On a CPU a table doubles in steps: each call that inserts splits some of its buckets. Doubling
// begins as above, and ends before the entries take 15/16 of the old number of slots.
int64_t split_begin(int64_t slots) { return slots - slots / 8; }
int64_t split_end(int64_t slots) { return slots - slots / 16; }

// Buckets that a call splits at least. A small table doubles in one call.
constexpr int64_t kLeastSplit = 64;

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
  const auto [unsure, splits] = order_->run(
      kHostOnly, [&] { return std::make_pair(expect_ids(batch.num_ids), splitting()); });
  if (unsure.empty() && !splits) return;
  order_->run(kWriteAll, [&] {
    std::vector<int64_t> sizes;
    if (!unsure.empty()) sizes = look_and_grow(batch, ids, offsets, first_bags, unsure);
    split_some(sizes);
  });
}

std::vector<int64_t> TableGroup::expect_ids(int64_t n) {
  std::vector<int64_t> unsure;
  for (int64_t t = 0; t < num_tables(); ++t) {
    if (!memory_[t].grows()) continue;
    growth_[t].most_entries += n;
    const bool few = memory_[t].unsplit() > 0
                         ? growth_[t].most_entries > split_end(memory_[t].split_slots())
                         : too_few(memory_[t].num_slots(), growth_[t].most_entries);
    if (few) {
      unsure.push_back(t);
    } else {
      growth_[t].looks = 0;
    }
  }
  return unsure;
}

std::vector<int64_t> TableGroup::look_and_grow(const hash_table::Batch& batch,
                                               const at::Tensor& ids,
                                               const std::optional<at::Tensor>& offsets,
                                               at::IntArrayRef first_bags,
                                               const std::vector<int64_t>& tables) {
  const at::Tensor sizes = this->sizes().cpu();
  const std::vector<int64_t> added = count_new(batch, ids, offsets, first_bags);
  std::vector<int64_t> after(num_tables());
  for (int64_t t = 0; t < num_tables(); ++t) {
    const int64_t size = sizes.const_data_ptr<int64_t>()[t];
    growth_[t].most_entries = after[t] = size + added[t];
    if (!device_.is_cpu()) continue;
    growth_[t].counted = size;
    growth_[t].misses = misses(t);
  }
  for (const int64_t t : tables) {
    const TableMemory& memory = memory_[t];
    if (memory.unsplit() > 0) {
      if (after[t] <= split_end(memory.split_slots())) continue;
      finish_split(t);
    }
    const bool often = ++growth_[t].looks >= kMostLooks;
    const int64_t entries = after[t] + (often ? batch.num_ids : 0);
    if (!too_few(memory.num_slots(), entries)) continue;
    const int64_t buckets = buckets_for(t, entries);
    if (device_.is_cpu() && buckets == 2 * memory.num_buckets() &&
        after[t] <= split_end(memory.num_slots())) {
      back(t, buckets);
      begin_split(t);
    } else {
      grow(t, buckets);
    }
    growth_[t].looks = 0;
  }
  return after;
}

int64_t TableGroup::misses(int64_t table) const {
  return counters_
      .const_data_ptr<int64_t>()[table * hash_table::kNumCounters + hash_table::kMisses];
}

bool TableGroup::splitting() const {
  return std::any_of(memory_.begin(), memory_.end(),
                     [](const auto& memory) { return memory.unsplit() > 0; });
}

void TableGroup::begin_split(int64_t table) {
  TableMemory& memory = memory_[table];
  const int64_t buckets = memory.num_buckets();
  memory.resize(2 * buckets);
  memory.set_unsplit(buckets);
  host_views_[table] = make_view(table);
  hash_table::cpu::empty_buckets(host_views_[table], buckets, 2 * buckets, at::get_num_threads());
}

void TableGroup::split(int64_t table, int64_t unsplit) {
  hash_table::cpu::split_buckets(host_views_[table], static_cast<uint32_t>(unsplit),
                                 at::get_num_threads());
  memory_[table].set_unsplit(unsplit);
  host_views_[table].unsplit = static_cast<uint32_t>(unsplit);
}

void TableGroup::split_some(const std::vector<int64_t>& sizes) {
  bool any = false;
  for (int64_t t = 0; t < num_tables(); ++t) {
    const TableMemory& memory = memory_[t];
    if (memory.unsplit() == 0) continue;
    Growth& growth = growth_[t];
    // The number of misses is an upper bound of the number of new entries: not every id is
    // admitted, and an id may be missed several times. If a user has reset the counters, the host
    // counts the entries in time, because it keeps a bound of its own.
    growth.misses = std::min(growth.misses, misses(t));
    const int64_t entries = sizes.empty() ? growth.counted + misses(t) - growth.misses : sizes[t];
    const int64_t begin = split_begin(memory.split_slots());
    const int64_t span = std::max<int64_t>(1, split_end(memory.split_slots()) - begin);
    const int64_t come = std::clamp<int64_t>(entries - begin, 0, span);
    const int64_t buckets = memory.num_buckets() / 2;
    const auto paced = static_cast<int64_t>(static_cast<double>(span - come) / span * buckets);
    split(t, std::max<int64_t>(0, std::min(paced, memory.unsplit() - kLeastSplit)));
    any = true;
  }
  if (any) note_growth();
}

void TableGroup::finish_split(int64_t table) {
  if (memory_[table].unsplit() == 0) return;
  split(table, 0);
  note_growth();
}

void TableGroup::finish_growth() {
  for (int64_t t = 0; t < num_tables(); ++t) finish_split(t);
}

void TableGroup::note_growth() {
  upload_views();
  growing_ = std::any_of(memory_.begin(), memory_.end(), [](const auto& m) { return m.grows(); });
  ++growths_;
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
  if (rows > split_end(memory_[table].split_slots())) finish_split(table);
  grow(table, buckets_for(table, rows));
}

bool TableGroup::reserve_buckets(int64_t table, int64_t num_buckets, int64_t bucket_slots) {
  check_index(table);
  finish_split(table);
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

void TableGroup::back(int64_t table, int64_t num_buckets) {
  TableMemory& memory = memory_[table];
  try {
    memory.back(num_buckets);
  } catch (const c10::Error& error) {
    TORCH_CHECK(false, "table '", configs_[table].name, "' can't grow from ", memory.num_slots(),
                " to ", num_buckets * memory.geometry().bucket_slots,
                " slots: ", error.what_without_backtrace());
  }
}

void TableGroup::grow(int64_t table, int64_t num_buckets) {
  TableMemory& memory = memory_[table];
  if (num_buckets <= memory.num_buckets()) return;
  const c10::OptionalDeviceGuard guard(device_);
  TORCH_CHECK(!is_capturing(device_), "table '", configs_[table].name,
              "' can't grow while a CUDA graph is being captured.");
  wait_for(device_);  // calls that use the present slots and views
  back(table, num_buckets);
  if (device_.is_cpu()) {
    while (memory.num_buckets() < num_buckets) {
      if (memory.unsplit() == 0) begin_split(table);
      split(table, 0);
    }
    note_growth();
    return;
  }
  grow_on_gpu(table, num_buckets);
}

void TableGroup::grow_on_gpu([[maybe_unused]] int64_t table, [[maybe_unused]] int64_t num_buckets) {
#ifdef TORCHREC_HKV_CUDA
  TableMemory& memory = memory_[table];
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream(device_.index());
  const bool at_home = bring_home(table, num_buckets);
  const at::Tensor scratch =
      at::empty({hash_table::cuda::kAstrayRoom + 1}, at::dtype(at::kLong).device(device_));
  while (memory.num_buckets() < num_buckets) {
    hash_table::cuda::split_buckets(host_views_[table], scratch.data_ptr<int64_t>(), stream);
    memory.resize(2 * memory.num_buckets());
    host_views_[table] =
        at_home && memory.num_buckets() < num_buckets ? view_at_home(table) : make_view(table);
  }
  fill_frames(table);
  note_growth();
  wait_for(device_);  // work of any stream
#endif
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
  finish_split(table);
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
