#include "runtime/table_group.h"

#include <ATen/Context.h>
#include <c10/core/DeviceGuard.h>

#include <algorithm>
#include <limits>
#include <utility>

#include "hash_table/expiry.h"
#include "hash_table/kernels.h"
#include "runtime/registry.h"

namespace torchrec_hkv::runtime {
namespace {

using hash_table::kNumCounters;
using hash_table::TableView;

at::Tensor to_device_int32(const std::vector<int64_t>& values, at::Device device) {
  return at::tensor(values, at::kLong).to(at::kInt).to(device);
}

hash_table::Frames make_frames(const TableMemory& memory) {
  return hash_table::Frames::make(reinterpret_cast<unsigned long long*>(memory.tags.data()),
                                  reinterpret_cast<uint32_t*>(memory.crowded.data()),
                                  memory.num_slots(), memory.num_sets(), memory.frames_of_set());
}

}  // namespace

TableGroup::TableGroup(std::vector<TableConfig> configs, std::vector<int64_t> feature_tables,
                       OptimizerConfig optimizer, std::optional<int64_t> state_dim,
                       at::Device device, const AvailableMemory& available)
    : configs_(std::move(configs)),
      feature_table_list_(std::move(feature_tables)),
      optimizer_(optimizer),
      device_(device),
      host_words_(device) {
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
  std::vector<bool> has_feature(configs_.size());
  bool num_unshared_features = true;
  for (const int64_t table : feature_table_list_) {
    TORCH_CHECK_VALUE(table >= 0 && table < num_tables(), "a feature names table ", table,
                      ", but the group has ", num_tables(), ".");
    num_unshared_features = num_unshared_features && !has_feature[table];
    has_feature[table] = true;
    columns.push_back(total_dim_);
    total_dim_ += configs_[table].dim;
  }
  TORCH_CHECK_VALUE(total_dim_ <= std::numeric_limits<int32_t>::max(),
                    "the features' columns add up to ", total_dim_,
                    ", but must not exceed 2^31 - 1.");
  if (num_unshared_features) shape_.num_unshared_features = static_cast<int32_t>(num_features());
  packed_ = device.is_cuda() && can_be_packed(configs_);
  check_memory(available);
  c10::OptionalDeviceGuard guard(device);
  growth_.resize(configs_.size());
  for (const TableConfig& config : configs_) {
    memory_.emplace_back(layout(config), device);
    growing_ = growing_ || memory_.back().grows();
    first_slots_.push_back(num_slots_);
    num_slots_ += memory_.back().full_slots();
    const int64_t width = state_width_of(config);
    shape_.four_wide = shape_.four_wide && config.dim % 4 == 0 && (width <= 1 || width % 4 == 0);
    shape_.float32_rows = shape_.float32_rows && config.row_type == RowType::kFloat32;
    shape_.int8_rows = shape_.int8_rows || config.row_type == RowType::kInt8;
    shape_.row_classes |=
        1u << hash_table::row_class_of(static_cast<int32_t>(config.dim), config.row_type);
    shape_.widest = std::max(shape_.widest, static_cast<int32_t>(config.dim));
    shape_.max_slots = std::max(shape_.max_slots, memory_.back().full_slots());
    shape_.scores = std::max(shape_.scores, scores_stored_by(config.eviction));
    needs_scores_ = needs_scores_ || config.eviction == Eviction::kCustomized;
    remembers_evicted_ = remembers_evicted_ || config.remember_evicted > 0;
    restores_counts_ = restores_counts_ || config.restore_counts;
    // Only the kernels that place ids in order restore counts.
    deterministic_ = deterministic_ || config.deterministic || config.restore_counts;
    evicted_.push_back(at::zeros({evicted_bytes(config) / static_cast<int64_t>(sizeof(uint16_t))},
                                 at::dtype(at::kShort).device(device)));
  }
  clock_ = std::make_shared<GroupClock>(device);
  order_ = std::make_unique<StreamOrder>(device);
  aged_lfu_ = at::zeros({num_tables(), sizeof(hash_table::AgedLfu) / sizeof(double)},
                        at::dtype(at::kDouble).device(device));
  miniature_tally_ = at::zeros({num_tables(), hash_table::kMiniatureCounterWords},
                               at::dtype(at::kLong).device(device));
  for (int64_t t = 0; t < num_tables(); ++t) {
    const bool adaptive = configs_[t].adaptive;
    simulates_ = simulates_ || adaptive;
    const int64_t words =
        adaptive ? hash_table::MiniatureSize::of(memory_[t].full_slots()).words() : 0;
    miniature_entries_.push_back(at::zeros({words}, at::dtype(at::kInt).device(device)));
    restart_aging(t);
  }
  make_aging();
  make_frame_moves();
  counters_ = at::zeros({num_tables(), kNumCounters}, at::dtype(at::kLong).device(device));
  optimizer_steps_ = at::zeros({num_tables()}, at::dtype(at::kLong).device(device));
  if (device.is_cuda()) refused_ = at::zeros({1}, at::dtype(at::kInt).device(device));
  feature_tables_ = to_device_int32(feature_table_list_, device);
  feature_columns_ = to_device_int32(columns, device);
  for (int64_t t = 0; t < num_tables(); ++t) {
    host_views_.push_back(make_view(t));
    if (host_views_.back().initial_rows.distribution != Distribution::kUniform) {
      initial_rows_ = hash_table::NewRows::kInitial;
    }
  }
  if (shape_.int8_rows) initial_rows_ = hash_table::NewRows::kInitialAny;
  const int64_t view_bytes = num_tables() * static_cast<int64_t>(sizeof(TableView));
  views_ = at::empty({view_bytes}, at::dtype(at::kByte).device(device));
  upload_views();
}

void TableGroup::upload_views() {
  const at::AutoDispatchBelowADInplaceOrView below;  // in case this is an inference tensor
  views_.copy_(at::from_blob(host_views_.data(), views_.sizes(), at::kByte));
}

void TableGroup::make_frame_moves() {
  int64_t widest = 0;
  bool in_bulk = true;
  for (int64_t t = 0; t < num_tables(); ++t) {
    if (memory_[t].num_sets() == 0) continue;
    const int64_t bytes = row_size(configs_[t].row_type, configs_[t].dim);
    const bool with_states = memory_[t].states_move() && state_width_of(configs_[t]) > 0;
    in_bulk = in_bulk && hash_table::FrameMoves::move_in_bulk(bytes) && !with_states;
    widest = std::max(widest, bytes);
  }
  if (widest == 0) return;
  frame_moves_.group_slots = num_slots_;
  frame_moves_.num_tables = static_cast<int32_t>(num_tables());
  if (in_bulk) frame_moves_.bulk_bytes = static_cast<int32_t>(widest);
}

void TableGroup::make_aging() {
  std::vector<AdmissionConfig> admissions;
  std::vector<uint64_t> seeds;
  std::vector<int64_t> ages;
  bool expires = false;
  uint32_t max_buckets = 0;
  for (int64_t t = 0; t < num_tables(); ++t) {
    const TableConfig& config = configs_[t];
    admissions.push_back(config.admission);
    seeds.push_back(config.seed);
    ages.push_back(config.expire_after);
    if (config.expire_after == 0) continue;
    expires = true;
    const uint32_t period = hash_table::sweep_period(static_cast<uint32_t>(config.expire_after));
    // Set after the growth, because a CUDA graph sweeps the table that exists at its replay.
    const auto buckets = static_cast<uint32_t>(memory_[t].geometry().num_buckets);
    max_buckets = std::max(max_buckets, (buckets - 1) / period + 1);
  }
  admission_ = std::make_unique<GroupAdmission>(admissions, seeds, device_);
  expire_after_ = to_device_int32(ages, device_);
  const hash_table::Admissions* all = admission_->get();
  aging_ = {expires ? reinterpret_cast<const uint32_t*>(expire_after_.const_data_ptr<int32_t>())
                    : nullptr,
            static_cast<int32_t>(num_tables()), max_buckets,
            all != nullptr && all->halved ? all : nullptr,
            std::any_of(configs_.begin(), configs_.end(), [](const TableConfig& config) {
              return config.eviction == Eviction::kAgedLfu;
            })};
}

void TableGroup::set_aging(int64_t table, double c) {
  check_index(table);
  const std::string& name = configs_[table].name;
  TORCH_CHECK_VALUE(configs_[table].eviction == Eviction::kAgedLfu, "table '", name,
                    "' has no c to set: only tables whose eviction is AgedLFU have.");
  TORCH_CHECK_VALUE(!configs_[table].adaptive, "table '", name,
                    "' chooses its c itself: make it with an AgedLFU to set it.");
  TORCH_CHECK_VALUE(c >= 0, "table '", name, "': c of AgedLFU is ", c, ", but must be at least 0.");
  configs_[table].aging = c;
  const at::AutoDispatchBelowADInplaceOrView below;  // in case it is an inference tensor
  aged_lfu_[table][0].fill_(c);
}

void TableGroup::restart_aging(int64_t table, double lookups, double steps, double c) {
  check_index(table);
  if (configs_[table].eviction != Eviction::kAgedLfu) return;
  const bool chosen = configs_[table].adaptive && c >= 0;
  hash_table::AgedLfu state{chosen ? c : configs_[table].aging, lookups, steps, 0, -1, 0, 0};
  state.set_half_life(memory_[table].num_slots());
  const at::AutoDispatchBelowADInplaceOrView below;
  aged_lfu_[table].copy_(at::from_blob(&state, {aged_lfu_.size(1)}, at::kDouble));
  miniature_tally_[table].zero_();
  miniature_entries_[table].zero_();
}

void TableGroup::set_clock(int64_t now) {
  clock_->set(now);
  const at::AutoDispatchBelowADInplaceOrView below;
  aged_lfu_.select(1, offsetof(hash_table::AgedLfu, seen_step) / sizeof(double)).fill_(-1);
}

std::shared_ptr<TableGroup> TableGroup::make(std::vector<TableConfig> configs,
                                             std::vector<int64_t> feature_tables,
                                             OptimizerConfig optimizer,
                                             std::optional<int64_t> state_dim, at::Device device,
                                             const AvailableMemory& available) {
  std::shared_ptr<TableGroup> group(new TableGroup(std::move(configs), std::move(feature_tables),
                                                   optimizer, state_dim, device, available));
  group->handle_ = Registry<TableGroup>::instance().add(group);
  return group;
}

TableGroup::~TableGroup() { Registry<TableGroup>::instance().remove(handle_); }

std::shared_ptr<TableGroup> TableGroup::from_handle(int64_t handle) {
  std::shared_ptr<TableGroup> group = Registry<TableGroup>::instance().find(handle);
  TORCH_CHECK_VALUE(group != nullptr, "no table group has the handle ", handle,
                    "; it may have been deleted.");
  return group;
}

int64_t TableGroup::state_width_of(const TableConfig& config) const {
  return state_dim_.value_or(state_width(optimizer_, static_cast<int32_t>(config.dim)));
}

TableLayout TableGroup::layout(const TableConfig& config) const {
  return TableLayout{hash_table::geometry_of(config.capacity, config.initial_capacity),
                     stored_width(config),
                     scalar_type(config.row_type),
                     state_width_of(config),
                     keeps_scores(config.eviction),
                     is_counted(config, device_),
                     config.hbm_slots,
                     config.all_states_in_hbm,
                     packed_};
}

void TableGroup::check_memory(const AvailableMemory& available) const {
  MemoryBytes initial{}, full{};
  for (const TableConfig& config : configs_) {
    const TableLayout table_layout = layout(config);
    initial += memory_of(table_layout, table_layout.geometry.initial_buckets(), device_);
    full += memory_of(table_layout, table_layout.geometry.num_buckets, device_);
    const int64_t counts =
        admission_bytes(config.admission) + evicted_bytes(config) + miniature_bytes(config);
    const MemoryBytes fixed = device_.is_cpu() ? MemoryBytes{0, counts} : MemoryBytes{counts, 0};
    initial += fixed;
    full += fixed;
  }
  const char* whose = num_tables() > 1 ? "' and the others of its group take " : "' takes ";
  const auto check = [&](int64_t needed, int64_t available_bytes, const char* of,
                         const char* what) {
    TORCH_CHECK_VALUE(needed <= available_bytes, "table '", configs_[0].name, whose, needed,
                      " bytes of ", of, ", but ", available_bytes, " bytes are ", what, ".");
  };
  check(initial.hbm, available.hbm_free, "GPU memory from the start", "free");
  check(full.hbm, available.hbm_total, "GPU memory at the full capacity", "all there is");
  check(initial.host, available.host_free, "host memory from the start", "available");
  check(full.host, available.host_total, "host memory at the full capacity", "all there is");
}

TableView TableGroup::make_view(int64_t table) const {
  const TableConfig& config = configs_[table];
  const TableMemory& memory = memory_[table];
  TableView view{};
  view.digests = reinterpret_cast<uint16_t*>(memory.digests.data());
  view.entries = hash_table::PackedEntries::make(
      packed_ ? reinterpret_cast<uint32_t*>(memory.entries.data()) : nullptr,
      memory.geometry().bucket_slots);
  if (packed_) {
    view.oldest = reinterpret_cast<uint32_t*>(memory.oldest.data());
  } else {
    view.ids = reinterpret_cast<int64_t*>(memory.ids.data());
  }
  if (is_counted(config, device_)) {
    view.counted = {reinterpret_cast<uint32_t*>(memory.words.data()), memory.window.get()};
  } else {
    if (!packed_) view.last_steps = reinterpret_cast<uint32_t*>(memory.last_steps.data());
    if (keeps_scores(config.eviction)) {
      view.scores = reinterpret_cast<uint64_t*>(memory.scores.data());
    }
  }
  if (config.eviction == Eviction::kAgedLfu) {
    view.aged = reinterpret_cast<hash_table::AgedLfu*>(aged_lfu_[table].data_ptr<double>());
    if (config.adaptive) {
      view.miniatures = hash_table::Miniatures::make(
          reinterpret_cast<uint32_t*>(miniature_entries_[table].data_ptr<int32_t>()),
          reinterpret_cast<hash_table::MiniatureCounters*>(
              miniature_tally_[table].data_ptr<int64_t>()),
          memory.full_slots());
    }
  }
  view.rows = {memory.backing_rows().data(), memory.rows.data(), static_cast<int32_t>(config.dim),
               config.row_type};
  view.states = {memory.backing_states().data(),
                 memory.states_move() ? memory.states.data() : nullptr,
                 static_cast<int32_t>(state_width_of(config)), RowType::kFloat32};
  view.backing_on_host = memory.rows_on_host();
  if (memory.rows_on_host() && memory.num_sets() > 0) view.frames = make_frames(memory);
  if (config.remember_evicted > 0) {
    auto* const marks = reinterpret_cast<uint16_t*>(evicted_[table].data_ptr<int16_t>());
    view.evicted = {marks, static_cast<uint64_t>(config.remember_evicted),
                    config.restore_counts ? marks + config.remember_evicted : nullptr};
  }
  view.counters = reinterpret_cast<uint64_t*>(counters_.data_ptr<int64_t>() + table * kNumCounters);
  view.optimizer_step = optimizer_steps_.data_ptr<int64_t>() + table;
  view.first_slot = first_slots_[table];
  view.num_slots = memory.num_slots();
  view.num_buckets = static_cast<uint32_t>(memory.num_buckets());
  view.unsplit = static_cast<uint32_t>(memory.unsplit());
  view.bucket_slots = memory.geometry().bucket_slots;
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

bool TableGroup::deterministic() const {
  return deterministic_ || at::globalContext().deterministicAlgorithms();
}

bool TableGroup::takes_scores() const {
  return std::any_of(configs_.begin(), configs_.end(), [](const TableConfig& config) {
    return torchrec_hkv::takes_scores(config.eviction);
  });
}

bool TableGroup::has_customized() const {
  return std::any_of(configs_.begin(), configs_.end(), [](const TableConfig& config) {
    return config.eviction == Eviction::kCustomized;
  });
}

RowType TableGroup::matrix_type() const {
  const RowType type = configs_[0].row_type;
  const bool same = std::all_of(configs_.begin(), configs_.end(),
                                [&](const TableConfig& config) { return config.row_type == type; });
  return same && type != RowType::kInt8 ? type : RowType::kFloat32;
}

at::ScalarType TableGroup::matrix_dtype() const { return scalar_type(matrix_type()); }

int32_t TableGroup::widest_state() const {
  int32_t widest = 0;
  for (const TableView& view : host_views_) widest = std::max(widest, view.states.width);
  return widest;
}

const TableView* TableGroup::views() const {
  return reinterpret_cast<const TableView*>(views_.const_data_ptr<uint8_t>());
}

void TableGroup::check_index(int64_t table) const {
  TORCH_CHECK_VALUE(table >= 0 && table < num_tables(), "table is ", table, ", but the group has ",
                    num_tables(), ".");
}

std::shared_ptr<Pin> TableGroup::pin() const {
  std::shared_ptr<Pin> pin = clock_->pin();
  pin->set_growths(growths_);
  return pin;
}

int64_t TableGroup::hbm_bytes(int64_t table) const {
  check_index(table);
  const int64_t fixed =
      admission_->bytes(table) + evicted_bytes(configs_[table]) + miniature_bytes(configs_[table]);
  return memory_[table].hbm_bytes() + (device_.is_cuda() ? fixed : 0);
}

int64_t TableGroup::host_bytes(int64_t table) const {
  check_index(table);
  const int64_t fixed =
      admission_->bytes(table) + evicted_bytes(configs_[table]) + miniature_bytes(configs_[table]);
  return memory_[table].host_bytes() + (device_.is_cpu() ? fixed : 0);
}

}  // namespace torchrec_hkv::runtime
