#include "runtime/sampled_aging.h"

#include <ATen/Parallel.h>

#include <limits>

#include "hash_table/clock.h"
#include "hash_table/cpu/miniatures.h"
#include "hash_table/table_view.h"
#include "runtime/checks.h"

namespace torchrec_hkv::runtime {

using hash_table::AgedLfu;

namespace {

// Largest ratio by which the half-life of a sampled table may differ.
constexpr double kNear = 1.002;

}  // namespace

SampledAging::SampledAging(int64_t slots, std::optional<double> c)
    : slots_(slots), aged_{c.value_or(kFirstC), 0, 0, 0, -1, 0, 0} {
  if (c) return;
  entries_.assign(hash_table::MiniatureSize::of(slots).words(), 0);
  miniatures_ = hash_table::Miniatures::make(entries_.data(), &counters_, slots);
}

double SampledAging::begin_call() {
  ++now_;
  if (!entries_.empty()) miniatures_.choose(lookups_, slots_, &aged_.c);
  aged_.begin_call(now_, lookups_, slots_);
  if (aged_.half_life == hash_table::kInfiniteHalfLife) {
    return std::numeric_limits<double>::infinity();
  }
  return static_cast<double>(aged_.half_life) / (1 << hash_table::kFractionBits);
}

void SampledAging::end_call(const at::Tensor& ids, bool evicts) {
  check_dtype(ids, "ids", at::kLong);
  TORCH_CHECK_VALUE(ids.is_cpu() && ids.is_contiguous(), "ids must be contiguous on the CPU.");
  end_call(ids.const_data_ptr<int64_t>(), ids.numel(), ids.numel(), evicts);
}

void SampledAging::begin_call_of(TableGroup& group, int64_t table) {
  const double half_life = begin_call();
  const hash_table::TableView& view = group.view(table);
  const AgedLfu& state = *view.aged;
  if (state.lookups == 0) return;
  const auto slots = static_cast<double>(view.num_slots);
  const double wanted = half_life * state.lookups / (state.steps * slots);
  const bool near = state.c / kNear < wanted && wanted < state.c * kNear;
  if (wanted != state.c && !near) group.set_aging(table, wanted);
}

void SampledAging::end_call(const int64_t* ids, int64_t n, int64_t lookups, bool evicts) {
  lookups_ += static_cast<uint64_t>(lookups);
  if (entries_.empty() || n == 0) return;
  uint64_t counters[hash_table::kNumCounters] = {};
  counters[hash_table::kEvicted] = evicts;
  hash_table::TableView table{};
  table.aged = &aged_;
  table.miniatures = miniatures_;
  table.counters = counters;
  table.num_slots = slots_;
  const int32_t feature_tables[] = {0};
  hash_table::Batch batch{};
  batch.ids = ids;
  batch.feature_tables = feature_tables;
  batch.num_features = 1;
  batch.batch_size = 1;
  batch.num_ids = n;
  batch.num_bags = 1;
  hash_table::Clock clock{};
  clock.now = clock.pinned_from = now_;
  const hash_table::CallContext context{&clock, nullptr};
  hash_table::cpu::simulate(&table, batch, context, at::get_num_threads());
}

}  // namespace torchrec_hkv::runtime
