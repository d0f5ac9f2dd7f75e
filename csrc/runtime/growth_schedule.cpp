// Decides when tables of a group grow, and how far; see TableGroup.
#include <c10/core/DeviceGuard.h>

#include <algorithm>
#include <utility>

#include "hash_table/kernels.h"
#include "runtime/capture.h"
#include "runtime/growth_limits.h"
#include "runtime/on_device.h"
#include "runtime/table_group.h"

namespace torchrec_hkv::runtime {
namespace {

// Number of consecutive calls that may read a table's size and thus wait for the device. After them
// the table grows until calls need not read it: a table of constant size must not wait in each
// step.
constexpr int64_t kMaxChecks = 16;

// Least number of buckets that a call splits. A small table doubles in one call.
constexpr int64_t kMinSplit = 64;

}  // namespace

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
    if (!unsure.empty()) sizes = check_and_grow(batch, ids, offsets, first_bags, unsure);
    split_some(sizes);
  });
}

std::vector<int64_t> TableGroup::expect_ids(int64_t n) {
  std::vector<int64_t> unsure;
  for (int64_t t = 0; t < num_tables(); ++t) {
    if (!memory_[t].grows()) continue;
    growth_[t].max_entries += n;
    const bool few = memory_[t].unsplit() > 0
                         ? growth_[t].max_entries > split_end(memory_[t].split_slots())
                         : too_few(memory_[t].num_slots(), growth_[t].max_entries);
    if (few) {
      unsure.push_back(t);
    } else {
      growth_[t].checks = 0;
    }
  }
  return unsure;
}

std::vector<int64_t> TableGroup::check_and_grow(const hash_table::Batch& batch,
                                                const at::Tensor& ids,
                                                const std::optional<at::Tensor>& offsets,
                                                at::IntArrayRef first_bags,
                                                const std::vector<int64_t>& tables) {
  const at::Tensor sizes = this->sizes().cpu();
  const std::vector<int64_t> added = count_new(batch, ids, offsets, first_bags);
  std::vector<int64_t> after(num_tables());
  for (int64_t t = 0; t < num_tables(); ++t) {
    const int64_t size = sizes.const_data_ptr<int64_t>()[t];
    growth_[t].max_entries = after[t] = size + added[t];
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
    const bool often = ++growth_[t].checks >= kMaxChecks;
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
    growth_[t].checks = 0;
  }
  return after;
}

std::vector<int64_t> TableGroup::count_new(const hash_table::Batch& batch, const at::Tensor& ids,
                                           const std::optional<at::Tensor>& offsets,
                                           at::IntArrayRef first_bags) const {
  at::Tensor slots = at::empty_like(ids);
  int64_t* out = slots.data_ptr<int64_t>();
  HKV_ON_DEVICE(device_, hash_table::cpu::find(views(), batch, out, threads),
                hash_table::cuda::find(views(), only_view_now(), batch, out, stream));
  const at::Tensor missing = slots.lt(0);
  // The position of the first id of each feature.
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
      const at::Tensor feature_missing = missing.slice(0, start[f], start[f + 1]);
      parts.push_back(ids.slice(0, start[f], start[f + 1]).masked_select(feature_missing));
    }
    if (parts.empty()) continue;
    added[t] = std::get<0>(at::_unique2(at::cat(parts), /*sorted=*/false)).numel();
  }
  return added;
}

int64_t TableGroup::misses(int64_t table) const {
  return counters_
      .const_data_ptr<int64_t>()[table * hash_table::kNumCounters + hash_table::kMisses];
}

bool TableGroup::splitting() const {
  return std::any_of(memory_.begin(), memory_.end(),
                     [](const auto& memory) { return memory.unsplit() > 0; });
}

void TableGroup::split_some(const std::vector<int64_t>& sizes) {
  bool any = false;
  for (int64_t t = 0; t < num_tables(); ++t) {
    const TableMemory& memory = memory_[t];
    if (memory.unsplit() == 0) continue;
    Growth& growth = growth_[t];
    // The number of misses is an upper bound on the number of new entries: not every id is
    // admitted, and an id may be missed several times. If a user has reset the counters, the host
    // still counts the entries in time, because it keeps its own bound. This call is assumed to
    // have as many misses as the last, so that it splits equally many buckets whether or not
    // entries are counted.
    const int64_t missed = misses(t);
    growth.misses = std::min(growth.misses, missed);
    const int64_t of_last_call = std::max<int64_t>(0, missed - growth.misses_before_last);
    growth.misses_before_last = missed;
    const int64_t entries =
        sizes.empty() ? growth.counted + missed - growth.misses + of_last_call : sizes[t];
    const int64_t begin = split_begin(memory.split_slots());
    const int64_t span = std::max<int64_t>(1, split_end(memory.split_slots()) - begin);
    const int64_t come = std::clamp<int64_t>(entries - begin, 0, span);
    const int64_t buckets = memory.num_buckets() / 2;
    const auto paced = static_cast<int64_t>(static_cast<double>(span - come) / span * buckets);
    split(t, std::max<int64_t>(0, std::min(paced, memory.unsplit() - kMinSplit)));
    any = true;
  }
  if (any) note_growth();
}

void TableGroup::expect_entries(int64_t table, int64_t n) {
  check_index(table);
  order_->run(kHostOnly, [&] { growth_[table].max_entries += n; });
}

int64_t TableGroup::buckets_for(int64_t table, int64_t entries) const {
  const hash_table::Geometry& geometry = memory_[table].geometry();
  int64_t buckets = memory_[table].num_buckets();
  while (buckets < geometry.num_buckets && too_few(buckets * geometry.bucket_slots, entries)) {
    buckets *= 2;
  }
  return buckets;
}

}  // namespace torchrec_hkv::runtime
