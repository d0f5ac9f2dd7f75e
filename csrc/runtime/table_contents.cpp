// Reads, exports, loads and clears the contents of the tables of a group. See TableGroup.
#include <c10/core/DeviceGuard.h>

#include <string>
#include <vector>

#include "hash_table/frames_kernels.h"
#include "hash_table/grow.h"
#include "hash_table/kernels.h"
#include "hash_table/packed_entries_kernels.h"
#include "runtime/on_device.h"
#include "runtime/score_keys.h"
#include "runtime/table_group.h"

namespace torchrec_hkv::runtime {
namespace {

using hash_table::TableView;

void check_tensor(const at::Tensor& tensor, const char* what, const std::string& table,
                  at::ScalarType dtype, at::IntArrayRef shape) {
  TORCH_CHECK_VALUE(tensor.defined() && tensor.scalar_type() == dtype, "table '", table,
                    "': ", what, " must be of dtype ", dtype, ", but is of ",
                    tensor.defined() ? toString(tensor.scalar_type()) : "none", ".");
  TORCH_CHECK_VALUE(tensor.sizes() == shape, "table '", table, "': ", what, " must have shape ",
                    shape, ", but has ", tensor.sizes(), ".");
}

}  // namespace

at::Tensor TableGroup::occupied(int64_t table) const {
  check_index(table);
  const TableMemory& memory = memory_[table];
  const at::Tensor usable = memory.digests.tensor.slice(1, 0, memory.geometry().bucket_slots);
  return usable.ne(static_cast<int16_t>(kEmptyDigest)).reshape({-1});
}

std::pair<at::Tensor, at::Tensor> TableGroup::ids_and_steps(
    int64_t table, const std::optional<at::Tensor>& slots) const {
  check_index(table);
  const TableMemory& memory = memory_[table];
  if (!packed_) {
    const bool counted = is_counted(configs_[table], device_);
    const at::Tensor last_steps = counted ? at::Tensor()
                                  : slots ? memory.last_steps.tensor.index_select(0, *slots)
                                          : memory.last_steps.tensor;
    return {slots ? memory.ids.tensor.index_select(0, *slots) : memory.ids.tensor,
            counted ? read_counted(table, slots, /*counts=*/false) : last_steps};
  }
  const int64_t n = slots ? slots->numel() : memory.num_slots();
  const auto options = at::dtype(at::kLong).device(device_);
  at::Tensor ids = at::empty({n}, options), last_steps = at::empty({n}, options.dtype(at::kInt));
  HKV_ON_DEVICE(device_, ,
                hash_table::cuda::read_entries(
                    host_views_[table], slots ? slots->const_data_ptr<int64_t>() : nullptr, n,
                    ids.data_ptr<int64_t>(),
                    reinterpret_cast<uint32_t*>(last_steps.data_ptr<int32_t>()), stream));
  return {ids, last_steps};
}

at::Tensor TableGroup::read_counted(int64_t table, const std::optional<at::Tensor>& slots,
                                    bool counts) const {
  const int64_t n = slots ? slots->numel() : memory_[table].num_slots();
  at::Tensor out = at::empty({n}, counts ? at::kLong : at::kInt);
  hash_table::cpu::read_counted(
      host_views_[table], slots ? slots->const_data_ptr<int64_t>() : nullptr, n,
      counts ? nullptr : reinterpret_cast<uint32_t*>(out.data_ptr<int32_t>()),
      counts ? out.data_ptr<int64_t>() : nullptr, at::get_num_threads());
  return out;
}

std::pair<at::Tensor, at::Tensor> TableGroup::entries_at(const at::Tensor& slots) const {
  const c10::OptionalDeviceGuard guard(device_);
  at::Tensor ids = at::empty_like(slots);
  at::Tensor occupied_out = at::zeros_like(slots, slots.options().dtype(at::kBool));
  for (int64_t t = 0; t < num_tables(); ++t) {
    const TableMemory& memory = memory_[t];
    const at::Tensor local = slots.sub(first_slots_[t]);
    const at::Tensor in_table = local.ge(0).logical_and_(local.lt(memory.num_slots()));
    const at::Tensor positions = in_table.nonzero().flatten();
    if (positions.numel() == 0) continue;
    const at::Tensor at = local.index_select(0, positions);
    const int64_t bucket_slots = memory.geometry().bucket_slots;
    const at::Tensor line = at.div(bucket_slots, "floor").mul_(kBucketDigests);
    const at::Tensor digests =
        memory.digests.tensor.flatten().index_select(0, line.add_(at.remainder(bucket_slots)));
    ids.index_copy_(0, positions, ids_and_steps(t, at).first);
    occupied_out.index_copy_(0, positions, digests.ne(static_cast<int16_t>(kEmptyDigest)));
  }
  return {ids, occupied_out};
}

at::Tensor TableGroup::counts(int64_t table) const {
  check_index(table);
  return admission_->counts(table).clone();
}

void TableGroup::load_counts(int64_t table, const at::Tensor& counts) {
  check_index(table);
  const at::Tensor admission_counts = admission_->counts(table);
  check_tensor(counts, "counts", configs_[table].name, at::kByte, admission_counts.sizes());
  admission_counts.copy_(counts);
}

at::Tensor TableGroup::evicted_marks(int64_t table) const {
  check_index(table);
  return evicted_[table].clone();
}

void TableGroup::load_evicted_marks(int64_t table, const at::Tensor& marks) {
  check_index(table);
  check_tensor(marks, "marks", configs_[table].name, at::kShort, evicted_[table].sizes());
  evicted_[table].copy_(marks);
}

at::Tensor TableGroup::ids(int64_t table) const {
  check_index(table);
  return packed_ ? ids_and_steps(table, std::nullopt).first : memory_[table].ids.tensor;
}

at::Tensor TableGroup::last_steps(int64_t table) const {
  return ids_and_steps(table, std::nullopt).second.to(at::kLong).bitwise_and(0xFFFFFFFFll);
}

at::Tensor TableGroup::scores(int64_t table) const {
  check_index(table);
  if (!keeps_scores(configs_[table].eviction)) return last_steps(table);
  return converted(*this, table, stored_scores(table, std::nullopt));
}

at::Tensor TableGroup::stored_scores(int64_t table, const std::optional<at::Tensor>& slots) const {
  check_index(table);
  const TableMemory& memory = memory_[table];
  if (is_counted(configs_[table], device_)) return read_counted(table, slots, /*counts=*/true);
  const at::Tensor scores =
      slots ? memory.scores.tensor.index_select(0, *slots) : memory.scores.tensor;
  // A GPU adds to counts without an overflow test (hash_table/cuda/score_update.cuh).
  return counts_lookups(configs_[table].eviction) ? scores.masked_fill(scores.lt(0), INT64_MAX)
                                                  : scores;
}

void TableGroup::write_counted(int64_t table, const at::Tensor& last_steps,
                               const at::Tensor& counts) {
  const at::Tensor local_steps = last_steps.cpu().contiguous(),
                   local_counts = counts.cpu().contiguous();
  hash_table::cpu::write_counted(
      host_views_[table], reinterpret_cast<const uint32_t*>(local_steps.const_data_ptr<int32_t>()),
      local_counts.const_data_ptr<int64_t>(), local_counts.numel(), at::get_num_threads());
}

at::Tensor TableGroup::present_vectors(int64_t table, bool states) const {
  const TableMemory& memory = memory_[table];
#ifdef TORCHREC_HKV_CUDA
  if (memory.rows_on_host()) {
    const TableView& view = host_views_[table];
    const hash_table::RowStore& store = states ? view.states : view.rows;
    const auto options = at::dtype(states ? at::kFloat : row_dtype(table)).device(device_);
    const at::Tensor slots = at::arange(memory.num_slots(), options.dtype(at::kLong));
    at::Tensor out = at::empty({memory.num_slots(), store.stored_width()}, options);
    HKV_ON_DEVICE(
        device_, ,
        hash_table::cuda::gather(view, store, slots.const_data_ptr<int64_t>(), slots.numel(),
                                 static_cast<char*>(out.data_ptr()), stream));
    return out;
  }
#endif
  return states ? memory.states.tensor : memory.rows.tensor;
}

void TableGroup::fill_frames(int64_t table) {
  check_index(table);
#ifdef TORCHREC_HKV_CUDA
  if (!device_.is_cuda()) return;
  HKV_ON_DEVICE(device_, , hash_table::cuda::fill_frames(host_views_[table], stream));
#endif
}

TableState TableGroup::export_table(int64_t table) const {
  check_index(table);
  c10::OptionalDeviceGuard guard(device_);
  const TableMemory& memory = memory_[table];
  const at::Tensor occupied_slots = occupied(table);
  const at::Tensor free = occupied_slots.logical_not();
  // Writes zeros for free slots, whose contents are undefined, and for slots that the table does
  // not have yet.
  const auto whole = [&](const at::Tensor& of_present) {
    std::vector<int64_t> shape = of_present.sizes().vec();
    shape[0] = memory.full_slots();
    at::Tensor out = memory.grows() ? at::zeros(shape, of_present.options())
                                    : at::empty(shape, of_present.options());
    at::Tensor present = out.slice(0, 0, memory.num_slots());
    present.copy_(of_present);
    present.masked_fill_(present.dim() > 1 ? free.unsqueeze(1) : free, 0);
    return out;
  };
  const auto [ids, last_steps] = ids_and_steps(table, std::nullopt);
  TableState state;
  state.occupied = whole(occupied_slots);
  state.ids = whole(ids);
  state.rows = whole(present_vectors(table, /*states=*/false));
  state.states = whole(present_vectors(table, /*states=*/true));
  state.last_steps = whole(last_steps);
  const bool scored = keeps_scores(configs_[table].eviction);
  state.scores = scored ? whole(scores(table)) : at::empty({0}, ids.options());
  state.optimizer_step = optimizer_steps_.slice(0, table, table + 1).clone();
  return state;
}

void TableGroup::load_table(int64_t table, const TableState& state) {
  check_index(table);
  c10::OptionalDeviceGuard guard(device_);
  const TableConfig& config = configs_[table];
  TableMemory& memory = memory_[table];
  const int64_t slots = memory.full_slots();
  check_tensor(state.occupied, "occupied", config.name, at::kBool, {slots});
  check_tensor(state.ids, "ids", config.name, at::kLong, {slots});
  check_tensor(state.rows, "rows", config.name, row_dtype(table), {slots, stored_width(config)});
  check_tensor(state.states, "states", config.name, at::kFloat, {slots, state_width_of(config)});
  check_tensor(state.last_steps, "last_steps", config.name, at::kInt, {slots});
  check_tensor(state.scores, "scores", config.name, at::kLong,
               {keeps_scores(config.eviction) ? slots : 0});
  check_tensor(state.optimizer_step, "optimizer_step", config.name, at::kLong, {1});
  const at::Tensor ids = state.ids.cpu().contiguous();
  const at::Tensor occupied = state.occupied.cpu().contiguous();
  const int64_t buckets = loaded_buckets(table, ids, occupied);
  at::Tensor digests = at::empty({buckets, kBucketDigests}, at::kShort);
  const int64_t lost = hash_table::cpu::rebuild_digests(
      ids.const_data_ptr<int64_t>(),
      reinterpret_cast<const uint8_t*>(occupied.const_data_ptr<bool>()),
      static_cast<uint32_t>(buckets), memory.geometry().bucket_slots,
      reinterpret_cast<uint16_t*>(digests.data_ptr<int16_t>()));
  TORCH_CHECK_VALUE(
      lost == 0, "table '", config.name, "': ", lost,
      " of the ids to load are in slots where they can't be found; the state is of another "
      "table or damaged.");
  const int64_t before = memory.num_buckets();
  begin_load(table, buckets);
  memory.empty_frames(clock_->now());
  const auto present = [&](const at::Tensor& all) { return all.slice(0, 0, memory.num_slots()); };
  memory.digests.tensor.copy_(digests);
  const bool counted = is_counted(config, device_);
  if (counted) {
    memory.ids.tensor.copy_(present(state.ids));
    write_counted(table, present(state.last_steps), present(state.scores));
  } else if (!packed_) {
    memory.ids.tensor.copy_(present(state.ids));
    memory.last_steps.tensor.copy_(present(state.last_steps));
    memory.last_steps.tensor.masked_fill_(present(state.occupied).to(device_).logical_not(),
                                          static_cast<int32_t>(hash_table::kFreeStep));
  } else {
    load_entries(table, present(state.ids), present(state.last_steps));
  }
  if (keeps_scores(config.eviction) && !counted) {
    memory.scores.tensor.copy_(converted(*this, table, present(state.scores)));
  }
  memory.backing_rows().tensor.copy_(present(state.rows));
  memory.backing_states().tensor.copy_(present(state.states));
  optimizer_steps_.slice(0, table, table + 1).copy_(state.optimizer_step);
  restart_aging(table);
  admission_->clear(table);
  evicted_[table].zero_();
  growth_[table].max_entries += occupied.sum().item<int64_t>();
  grow(table, before);  // reserved memory stays reserved
  fill_frames(table);
  // Steps continue from the loaded steps, so that loaded entries are not newer than later lookups.
  const int64_t newest =
      slots ? state.last_steps.to(at::kLong).bitwise_and(0xFFFFFFFFll).max().item<int64_t>() : 0;
  clock_->set_at_least(newest);
}

void TableGroup::load_entries([[maybe_unused]] int64_t table,
                              [[maybe_unused]] const at::Tensor& ids,
                              [[maybe_unused]] const at::Tensor& last_steps) {
#ifdef TORCHREC_HKV_CUDA
  const at::Tensor local_ids = ids.to(device_).contiguous();
  const at::Tensor local_steps = last_steps.to(device_).contiguous();
  HKV_ON_DEVICE(
      device_, ,
      hash_table::cuda::load_entries(
          host_views_[table], local_ids.const_data_ptr<int64_t>(),
          reinterpret_cast<const uint32_t*>(local_steps.const_data_ptr<int32_t>()), stream));
#endif
}

void TableGroup::clear_table(int64_t table) {
  check_index(table);
  note_removal();
  c10::OptionalDeviceGuard guard(device_);
  memory_[table].clear();
  if (host_views_[table].unsplit > 0) {
    host_views_[table].unsplit = 0;
    note_growth();
  }
  optimizer_steps_.slice(0, table, table + 1).zero_();
  restart_aging(table);
  admission_->clear(table);
  evicted_[table].zero_();
  growth_[table] = Growth{};
}

at::Tensor TableGroup::sizes() const {
  at::Tensor sizes = at::zeros({num_tables()}, at::dtype(at::kLong).device(device_));
  int64_t* out = sizes.data_ptr<int64_t>();
  for (const TableView& view : host_views_) {
    HKV_ON_DEVICE(device_, *out = hash_table::cpu::count_entries(view, threads),
                  hash_table::cuda::count_entries(view, out, stream));
    ++out;
  }
  return sizes;
}

}  // namespace torchrec_hkv::runtime
