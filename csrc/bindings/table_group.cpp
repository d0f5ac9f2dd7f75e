#include "bindings/table_group.h"

#include <c10/core/DeviceGuard.h>

#include <algorithm>
#include <limits>
#include <unordered_map>
#include <utility>

#include "bindings/host_memory.h"
#include "hash_table/kernels.h"

namespace torchrec_hkv::bindings {
namespace {

using hash_table::kNumCounters;
using hash_table::TableView;

// Living groups by handle. A handle is never used twice.
struct Registry {
  std::mutex mutex;
  std::unordered_map<int64_t, std::weak_ptr<TableGroup>> groups;
  int64_t next = 1;
};

Registry& registry() {
  static auto* instance = new Registry;  // outlives every group, also at exit
  return *instance;
}

at::Tensor to_device_int32(const std::vector<int64_t>& values, at::Device device) {
  return at::tensor(values, at::kLong).to(at::kInt).to(device);
}

void check_config(const TableConfig& config, bool cuda) {
  const auto& name = config.name;
  TORCH_CHECK_VALUE(config.capacity >= 1, "table '", name, "': capacity is ", config.capacity,
                    ", but must be at least 1.");
  TORCH_CHECK_VALUE(config.capacity <= (int64_t{1} << 37), "table '", name, "': capacity is ",
                    config.capacity, ", but must be at most 2^37.");
  TORCH_CHECK_VALUE(config.dim >= 1 && config.dim <= 2048, "table '", name, "': dim is ",
                    config.dim, ", but must be from 1 to 2048.");
  make_initial_rows(config.initial, config.seed, "table '" + name + "': ");
  TORCH_CHECK_VALUE(config.column_offset >= 0, "table '", name, "': column offset is ",
                    config.column_offset, ", but must not be negative.");
  const int64_t slots = hash_table::geometry_of(config.capacity).num_slots();
  TORCH_CHECK_VALUE(config.hbm_slots >= 0 && config.hbm_slots <= slots, "table '", name,
                    "': hbm_slots is ", config.hbm_slots, ", but must be from 0 to ", slots, ".");
  TORCH_CHECK_VALUE(cuda || config.hbm_slots == slots, "table '", name,
                    "': on a CPU hbm_slots must be all ", slots, " slots.");
  TORCH_CHECK_VALUE(config.expire_after >= 0 && config.expire_after <= 0xffffffffll, "table '",
                    name, "': expire_after is ", config.expire_after,
                    ", but must be from 1 to 2^32 - 1, or 0 for never.");
}

void check_tensor(const at::Tensor& tensor, const char* what, const std::string& table,
                  at::ScalarType dtype, at::IntArrayRef shape) {
  TORCH_CHECK_VALUE(tensor.defined() && tensor.scalar_type() == dtype, "table '", table,
                    "': ", what, " must be of dtype ", dtype, ", but is of ",
                    tensor.defined() ? toString(tensor.scalar_type()) : "none", ".");
  TORCH_CHECK_VALUE(tensor.sizes() == shape, "table '", table, "': ", what, " must have shape ",
                    shape, ", but has ", tensor.sizes(), ".");
}

at::ScalarType scalar_type(RowType type) {
  switch (type) {
    case RowType::kFloat16:
      return at::kHalf;
    case RowType::kBFloat16:
      return at::kBFloat16;
    default:
      return at::kFloat;
  }
}

int64_t bytes_of(const at::Tensor& tensor) {
  return tensor.defined() ? tensor.numel() * tensor.element_size() : 0;
}

}  // namespace

TableGroup::TableGroup(std::vector<TableConfig> configs, std::vector<int64_t> feature_tables,
                       OptimizerConfig optimizer, std::optional<int64_t> state_dim,
                       at::Device device)
    : configs_(std::move(configs)),
      feature_table_list_(std::move(feature_tables)),
      optimizer_(optimizer),
      device_(device) {
  TORCH_CHECK_VALUE(device.is_cpu() || device.is_cuda(), "device is ", device,
                    ", but must be a CPU or a CUDA device.");
#ifndef TORCHREC_HKV_CUDA
  TORCH_CHECK_VALUE(device.is_cpu(), "device is ", device,
                    ", but this build of torchrec_hkv has no CUDA kernels.");
#endif
  TORCH_CHECK_VALUE(!configs_.empty(), "a group needs at least one table.");
  for (const TableConfig& config : configs_) check_config(config, device.is_cuda());
  state_dim_ = state_dim;
  for (const TableConfig& config : configs_) {
    const int32_t least = state_width(optimizer, static_cast<int32_t>(config.dim));
    const int64_t width = state_width_of(config);
    TORCH_CHECK_VALUE(width >= least && width <= 8192, "state_dim is ", width,
                      ", but must be from ", least, " to 8192.");
  }
  std::vector<int64_t> columns;
  for (const int64_t table : feature_table_list_) {
    TORCH_CHECK_VALUE(table >= 0 && table < num_tables(), "a feature names table ", table,
                      ", but the group has ", num_tables(), ".");
    columns.push_back(total_dim_);
    total_dim_ += configs_[table].dim;
  }
  TORCH_CHECK_VALUE(total_dim_ <= std::numeric_limits<int32_t>::max(),
                    "the features' columns add up to ", total_dim_,
                    ", but must not exceed 2^31 - 1.");
  c10::OptionalDeviceGuard guard(device);
  for (const TableConfig& config : configs_) {
    memory_.push_back(allocate(config));
    first_slots_.push_back(num_slots_);
    num_slots_ += memory_.back().geometry.num_slots();
    const int64_t width = state_width_of(config);
    four_wide_ = four_wide_ && config.dim % 4 == 0 && (width <= 1 || width % 4 == 0);
    widest_ = std::max(widest_, static_cast<int32_t>(config.dim));
    needs_scores_ = needs_scores_ || config.eviction == Eviction::kCustomized;
  }
  clock_ = std::make_shared<GroupClock>(device);
  order_ = std::make_unique<StreamOrder>(device);
  make_aging();
  counters_ = at::zeros({num_tables(), kNumCounters}, at::dtype(at::kLong).device(device));
  optimizer_steps_ = at::zeros({num_tables()}, at::dtype(at::kLong).device(device));
  feature_tables_ = to_device_int32(feature_table_list_, device);
  feature_columns_ = to_device_int32(columns, device);
  const int64_t view_bytes = num_tables() * static_cast<int64_t>(sizeof(TableView));
  at::Tensor views = at::empty({view_bytes}, at::kByte);
  for (int64_t t = 0; t < num_tables(); ++t) {
    host_views_.push_back(make_view(t));
    if (host_views_.back().initial_rows.distribution != Distribution::kUniform) {
      initial_rows_ = hash_table::NewRows::kInitial;
    }
    reinterpret_cast<TableView*>(views.data_ptr())[t] = host_views_.back();
  }
  views_ = views.to(device);
}

void TableGroup::make_aging() {
  std::vector<AdmissionConfig> admissions;
  std::vector<uint64_t> seeds;
  std::vector<int64_t> ages;
  bool expires = false;
  uint32_t most_buckets = 0;
  for (int64_t t = 0; t < num_tables(); ++t) {
    const TableConfig& config = configs_[t];
    admissions.push_back(config.admission);
    seeds.push_back(config.seed);
    ages.push_back(config.expire_after);
    if (config.expire_after == 0) continue;
    expires = true;
    const uint32_t period = hash_table::sweep_period(static_cast<uint32_t>(config.expire_after));
    const auto buckets = static_cast<uint32_t>(memory_[t].geometry.num_buckets);
    most_buckets = std::max(most_buckets, (buckets - 1) / period + 1);
  }
  admission_ = std::make_unique<GroupAdmission>(admissions, seeds, device_);
  expire_after_ = to_device_int32(ages, device_);
  const hash_table::Admissions* all = admission_->get();
  aging_ = {expires ? reinterpret_cast<const uint32_t*>(expire_after_.const_data_ptr<int32_t>())
                    : nullptr,
            static_cast<int32_t>(num_tables()), most_buckets,
            all != nullptr && all->halved ? all : nullptr};
}

std::shared_ptr<TableGroup> TableGroup::make(std::vector<TableConfig> configs,
                                             std::vector<int64_t> feature_tables,
                                             OptimizerConfig optimizer,
                                             std::optional<int64_t> state_dim, at::Device device) {
  std::shared_ptr<TableGroup> group(
      new TableGroup(std::move(configs), std::move(feature_tables), optimizer, state_dim, device));
  Registry& all = registry();
  std::lock_guard<std::mutex> lock(all.mutex);
  group->handle_ = all.next++;
  all.groups[group->handle_] = group;
  return group;
}

TableGroup::~TableGroup() {
  Registry& all = registry();
  std::lock_guard<std::mutex> lock(all.mutex);
  all.groups.erase(handle_);
}

std::shared_ptr<TableGroup> TableGroup::from_handle(int64_t handle) {
  std::shared_ptr<TableGroup> group;
  {
    Registry& all = registry();
    std::lock_guard<std::mutex> lock(all.mutex);
    const auto found = all.groups.find(handle);
    if (found != all.groups.end()) group = found->second.lock();
  }
  TORCH_CHECK_VALUE(group != nullptr, "no table group has the handle ", handle,
                    "; it may have been deleted.");
  return group;
}

int64_t TableGroup::state_width_of(const TableConfig& config) const {
  return state_dim_.value_or(state_width(optimizer_, static_cast<int32_t>(config.dim)));
}

TableGroup::Memory TableGroup::allocate(const TableConfig& config) const {
  Memory memory;
  memory.geometry = hash_table::geometry_of(config.capacity);
  const int64_t slots = memory.geometry.num_slots();
  const int64_t on_host = slots - config.hbm_slots;
  const at::ScalarType row_type = scalar_type(config.row_type);
  const auto empty = [&](at::IntArrayRef sizes, at::ScalarType dtype) {
    return table_memory(sizes, dtype, device_);
  };
  memory.digests = empty({memory.geometry.num_buckets, kBucketDigests}, at::kShort);
  // Empty slots are never read, but an export copies them: keep it free of other memory's contents.
  memory.ids = empty({slots}, at::kLong).zero_();
  memory.last_steps = empty({slots}, at::kInt);
  free_all(memory);
  memory.scores = empty({keeps_scores(config.eviction) ? slots : 0}, at::kLong).zero_();
  memory.rows = empty({config.hbm_slots, config.dim}, row_type);
  const int64_t state_width = state_width_of(config);
  memory.states = empty({config.hbm_slots, state_width}, at::kFloat);
  memory.rows_host = pinned_matrix(on_host, config.dim, row_type, device_);
  memory.states_host = pinned_matrix(on_host, state_width, at::kFloat, device_);
  return memory;
}

void TableGroup::free_all(const Memory& memory) const {
  at::Tensor digests = memory.digests;
  digests.fill_(static_cast<int16_t>(kEmptyDigest));
  if (memory.geometry.bucket_slots < kBucketDigests) {
    digests.slice(1, memory.geometry.bucket_slots).fill_(static_cast<int16_t>(kClosedDigest));
  }
  at::Tensor last_steps = memory.last_steps;
  last_steps.fill_(static_cast<int32_t>(hash_table::kFreeStep));
}

TableView TableGroup::make_view(int64_t table) const {
  const TableConfig& config = configs_[table];
  const Memory& memory = memory_[table];
  const auto bytes = [](const at::Tensor& t) { return static_cast<char*>(t.data_ptr()); };
  TableView view{};
  view.digests = reinterpret_cast<uint16_t*>(memory.digests.data_ptr<int16_t>());
  view.ids = memory.ids.data_ptr<int64_t>();
  view.last_steps = reinterpret_cast<uint32_t*>(memory.last_steps.data_ptr<int32_t>());
  view.scores = memory.scores.numel()
                    ? reinterpret_cast<uint64_t*>(memory.scores.data_ptr<int64_t>())
                    : nullptr;
  view.rows = {bytes(memory.rows), bytes(memory.rows_host), config.hbm_slots,
               static_cast<int32_t>(config.dim), config.row_type};
  view.states = {bytes(memory.states), bytes(memory.states_host), config.hbm_slots,
                 static_cast<int32_t>(state_width_of(config)), RowType::kFloat32};
  view.counters = reinterpret_cast<uint64_t*>(counters_.data_ptr<int64_t>() + table * kNumCounters);
  view.optimizer_step = optimizer_steps_.data_ptr<int64_t>() + table;
  view.first_slot = first_slots_[table];
  view.num_slots = memory.geometry.num_slots();
  view.num_buckets = static_cast<uint32_t>(memory.geometry.num_buckets);
  view.bucket_slots = memory.geometry.bucket_slots;
  view.column_offset = static_cast<int32_t>(config.column_offset);
  view.eviction = config.eviction;
  view.initial_rows = make_initial_rows(config.initial, config.seed, "");
  return view;
}

const TableView& TableGroup::view(int64_t table) const {
  check_index(table);
  return host_views_[table];
}

at::ScalarType TableGroup::row_dtype(int64_t table) const {
  check_index(table);
  return scalar_type(configs_[table].row_type);
}

const TableView* TableGroup::views() const {
  return reinterpret_cast<const TableView*>(views_.const_data_ptr<uint8_t>());
}

void TableGroup::check_index(int64_t table) const {
  TORCH_CHECK_VALUE(table >= 0 && table < num_tables(), "table is ", table, ", but the group has ",
                    num_tables(), ".");
}

at::Tensor TableGroup::occupied(int64_t table) const {
  check_index(table);
  const Memory& memory = memory_[table];
  const at::Tensor usable = memory.digests.slice(1, 0, memory.geometry.bucket_slots);
  return usable.ne(static_cast<int16_t>(kEmptyDigest)).reshape({-1});
}

at::Tensor TableGroup::last_steps(int64_t table) const {
  check_index(table);
  return memory_[table].last_steps.to(at::kLong).bitwise_and(0xFFFFFFFFll);
}

at::Tensor TableGroup::scores(int64_t table) const {
  check_index(table);
  return keeps_scores(configs_[table].eviction) ? memory_[table].scores : last_steps(table);
}

TableState TableGroup::export_table(int64_t table) const {
  check_index(table);
  c10::OptionalDeviceGuard guard(device_);
  const Memory& memory = memory_[table];
  const auto joined = [&](const at::Tensor& hbm, const at::Tensor& host) {
    return host.size(0) == 0 ? hbm.clone() : at::cat({hbm, host.to(device_)});
  };
  TableState state;
  state.occupied = occupied(table);
  state.ids = memory.ids.clone();
  state.rows = joined(memory.rows, memory.rows_host);
  state.states = joined(memory.states, memory.states_host);
  state.last_steps = memory.last_steps.clone();
  state.scores = memory.scores.clone();
  state.optimizer_step = optimizer_steps_.slice(0, table, table + 1).clone();
  // Empty slots hold whatever was there: give zeros instead.
  const at::Tensor free = state.occupied.logical_not();
  state.ids.masked_fill_(free, 0);
  state.rows.masked_fill_(free.unsqueeze(1), 0);
  state.states.masked_fill_(free.unsqueeze(1), 0);
  state.last_steps.masked_fill_(free, 0);
  if (state.scores.numel()) state.scores.masked_fill_(free, 0);
  return state;
}

void TableGroup::load_table(int64_t table, const TableState& state) {
  check_index(table);
  c10::OptionalDeviceGuard guard(device_);
  const TableConfig& config = configs_[table];
  Memory& memory = memory_[table];
  const int64_t slots = memory.geometry.num_slots();
  check_tensor(state.occupied, "occupied", config.name, at::kBool, {slots});
  check_tensor(state.ids, "ids", config.name, at::kLong, {slots});
  check_tensor(state.rows, "rows", config.name, row_dtype(table), {slots, config.dim});
  check_tensor(state.states, "states", config.name, at::kFloat, {slots, state_width_of(config)});
  check_tensor(state.last_steps, "last_steps", config.name, at::kInt, {slots});
  check_tensor(state.scores, "scores", config.name, at::kLong, {memory.scores.numel()});
  check_tensor(state.optimizer_step, "optimizer_step", config.name, at::kLong, {1});
  const at::Tensor ids = state.ids.cpu().contiguous();
  const at::Tensor occupied = state.occupied.cpu().contiguous();
  at::Tensor digests = at::empty(memory.digests.sizes(), at::kShort);
  const int64_t lost = hash_table::cpu::rebuild_digests(
      ids.const_data_ptr<int64_t>(),
      reinterpret_cast<const uint8_t*>(occupied.const_data_ptr<bool>()),
      static_cast<uint32_t>(memory.geometry.num_buckets), memory.geometry.bucket_slots,
      reinterpret_cast<uint16_t*>(digests.data_ptr<int16_t>()));
  TORCH_CHECK_VALUE(lost == 0, "table '", config.name, "': ", lost,
                    " of the ids to load stand where they can't be found; the state is of another "
                    "table or damaged.");
  const auto split = [&](at::Tensor hbm, at::Tensor host, const at::Tensor& from) {
    hbm.copy_(from.slice(0, 0, config.hbm_slots));
    if (host.size(0)) host.copy_(from.slice(0, config.hbm_slots));
  };
  memory.digests.copy_(digests);
  memory.ids.copy_(state.ids);
  memory.last_steps.copy_(state.last_steps);
  memory.last_steps.masked_fill_(state.occupied.to(device_).logical_not(),
                                 static_cast<int32_t>(hash_table::kFreeStep));
  memory.scores.copy_(state.scores);
  split(memory.rows, memory.rows_host, state.rows);
  split(memory.states, memory.states_host, state.states);
  optimizer_steps_.slice(0, table, table + 1).copy_(state.optimizer_step);
  admission_->clear(table);
  // Steps go on from the loaded ones, so that what is loaded does not look newer than what comes.
  const int64_t newest =
      slots ? state.last_steps.to(at::kLong).bitwise_and(0xFFFFFFFFll).max().item<int64_t>() : 0;
  clock_->set_at_least(newest);
}

void TableGroup::clear_table(int64_t table) {
  check_index(table);
  c10::OptionalDeviceGuard guard(device_);
  free_all(memory_[table]);
  optimizer_steps_.slice(0, table, table + 1).zero_();
  admission_->clear(table);
}

at::Tensor TableGroup::sizes() const {
  c10::OptionalDeviceGuard guard(device_);
  std::vector<at::Tensor> all;
  for (int64_t t = 0; t < num_tables(); ++t) all.push_back(occupied(t).sum());
  return at::stack(all);
}

int64_t TableGroup::hbm_bytes(int64_t table) const {
  check_index(table);
  if (device_.is_cpu()) return 0;
  const Memory& m = memory_[table];
  return bytes_of(m.digests) + bytes_of(m.ids) + bytes_of(m.last_steps) + bytes_of(m.scores) +
         bytes_of(m.rows) + bytes_of(m.states) + admission_->bytes(table);
}

int64_t TableGroup::host_bytes(int64_t table) const {
  check_index(table);
  const Memory& m = memory_[table];
  const int64_t host = bytes_of(m.rows_host) + bytes_of(m.states_host);
  if (device_.is_cuda()) return host;
  return host + bytes_of(m.digests) + bytes_of(m.ids) + bytes_of(m.last_steps) +
         bytes_of(m.scores) + bytes_of(m.rows) + bytes_of(m.states) + admission_->bytes(table);
}

}  // namespace torchrec_hkv::bindings
