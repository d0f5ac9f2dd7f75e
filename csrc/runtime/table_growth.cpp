// Makes tables of a group grow; see TableGroup. csrc/hash_table/grow.h has the kernels;
// growth_schedule.cpp decides when tables grow.
#include <c10/core/DeviceGuard.h>

#include <algorithm>

#include "hash_table/frames_kernels.h"
#include "hash_table/grow.h"
#include "hash_table/kernels.h"
#include "runtime/capture.h"
#include "runtime/growth_limits.h"
#include "runtime/on_device.h"
#include "runtime/table_group.h"

#ifdef TORCHREC_HKV_CUDA
#include "common/cuda_check.h"
#endif

namespace torchrec_hkv::runtime {
namespace {

void wait_for([[maybe_unused]] at::Device device) {
#ifdef TORCHREC_HKV_CUDA
  if (device.is_cuda()) HKV_CUDA_CHECK(cudaDeviceSynchronize());
#endif
}

}  // namespace

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
              "' can't grow while a CUDA graph is being captured: reserve its capacity before.");
  wait_for(device_);  // for calls that use the current slots and views
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
  const bool on_host = move_rows_to_host(table, num_buckets);
  const at::Tensor scratch =
      at::empty({hash_table::cuda::kMisplacedCapacity + 1}, at::dtype(at::kLong).device(device_));
  while (memory.num_buckets() < num_buckets) {
    hash_table::cuda::split_buckets(host_views_[table], scratch.data_ptr<int64_t>(), stream);
    memory.resize(2 * memory.num_buckets());
    host_views_[table] = on_host && memory.num_buckets() < num_buckets ? view_without_frames(table)
                                                                       : make_view(table);
  }
  fill_frames(table);
  note_growth();
  wait_for(device_);  // for work on any stream
#endif
}

hash_table::TableView TableGroup::view_without_frames(int64_t table) const {
  hash_table::TableView view = make_view(table);
  view.rows.backing = memory_[table].rows_host.data();
  if (memory_[table].states_move()) view.states.backing = memory_[table].states_host.data();
  view.backing_on_host = true;
  view.frames = {};
  return view;
}

bool TableGroup::move_rows_to_host([[maybe_unused]] int64_t table,
                                   [[maybe_unused]] int64_t num_buckets) {
#ifdef TORCHREC_HKV_CUDA
  TableMemory& memory = memory_[table];
  const hash_table::TableView& view = host_views_[table];
  if (!memory.rows_on_host(num_buckets * memory.geometry().bucket_slots)) return false;
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream(device_.index());
  if (memory.rows_on_host()) {
    hash_table::cuda::write_back(view, stream);
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
  // A pending backward may write the row of any slot in host memory.
  memory.empty_frames(clock_->now());
  host_views_[table] = view_without_frames(table);
  return true;
#else
  return false;
#endif
}

int64_t TableGroup::loaded_buckets(int64_t table, const at::Tensor& ids,
                                   const at::Tensor& occupied) const {
  const hash_table::Geometry& geometry = memory_[table].geometry();
  const int64_t* id = ids.const_data_ptr<int64_t>();
  const bool* is_occupied = occupied.const_data_ptr<bool>();
  int64_t buckets = geometry.initial_buckets();
  for (int64_t slot = 0; slot < geometry.num_slots() && buckets < geometry.num_buckets;) {
    const auto bucket = static_cast<uint32_t>(slot / geometry.bucket_slots);
    if (!is_occupied[slot] ||
        (bucket < buckets &&
         !hash_table::is_misplaced(id[slot], bucket, static_cast<uint32_t>(buckets)))) {
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
