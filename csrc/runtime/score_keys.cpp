#include "runtime/score_keys.h"

#include <limits>

#include "hash_table/kernels.h"
#include "runtime/checks.h"
#include "runtime/on_device.h"
#include "runtime/sorted_slots.h"

namespace torchrec_hkv::runtime {
namespace {

constexpr int64_t kSign = std::numeric_limits<int64_t>::min();

at::Tensor inverted_where(const at::Tensor& scores, const at::Tensor& mask) {
  return at::where(mask, inverted_sign(scores), scores);
}

struct PolicyMix {
  explicit PolicyMix(const TableGroup& group) {
    for (int64_t t = 0; t < group.num_tables(); ++t) {
      const Eviction eviction = group.view(t).eviction;
      customized += eviction == Eviction::kCustomized;
      counted += sums_scores(eviction);
    }
    all_customized = customized == group.num_tables();
    all_counted = counted == group.num_tables();
  }
  int64_t customized = 0;
  int64_t counted = 0;
  bool all_customized;
  bool all_counted;
};

// A mask over the ids, bool [n]: whether `is` holds for the eviction policy of the id's table.
// Without offsets all ids belong to one table.
template <typename Is>
at::Tensor ids_where(const TableGroup& group, const at::Tensor& scores,
                     const std::optional<at::Tensor>& offsets, at::IntArrayRef first_bags, Is is) {
  at::Tensor mask = at::zeros(scores.sizes(), scores.options().dtype(at::kBool));
  if (!offsets) return is(group.view(group.feature_table(0)).eviction) ? mask.fill_(true) : mask;
  // Views of the offsets: copying numbers to the device would make the host wait.
  const auto start = [&](int64_t f) { return offsets->slice(0, first_bags[f], first_bags[f] + 1); };
  const at::Tensor positions = at::arange(scores.numel(), scores.options());
  for (int64_t f = 0; f < group.num_features(); ++f) {
    if (!is(group.view(group.feature_table(f)).eviction)) continue;
    mask.logical_or_(positions.ge(start(f)).logical_and_(positions.lt(start(f + 1))));
  }
  return mask;
}

at::Tensor checked_counts(const TableGroup& group, const at::Tensor& counts) {
  if (group.device().is_cuda()) return counts.clamp_min(0);
  if (counts.numel() == 0) return counts;
  const int64_t lowest = counts.min().item<int64_t>();
  TORCH_CHECK_VALUE(lowest >= 0, "scores are counts to add under evictions 'lfu', 'epoch_lfu' and ",
                    "AgedLFU, and must not be negative, but the lowest is ", lowest, ".");
  return counts;
}

}  // namespace

at::Tensor inverted_sign(const at::Tensor& scores) { return scores.bitwise_xor(kSign); }

at::Tensor keys_of_given(const TableGroup& group, const at::Tensor& scores,
                         const std::optional<at::Tensor>& offsets, at::IntArrayRef first_bags) {
  const PolicyMix kinds(group);
  if (kinds.all_customized) return inverted_sign(scores);
  if (kinds.all_counted) return checked_counts(group, scores);
  at::Tensor keys = scores;
  if (kinds.counted > 0) {
    const at::Tensor counted = ids_where(group, scores, offsets, first_bags, sums_scores);
    const at::Tensor counts = checked_counts(group, scores.masked_fill(counted.logical_not(), 0));
    keys = at::where(counted, counts, keys);
  }
  if (kinds.customized > 0) {
    keys = inverted_where(keys, ids_where(group, scores, offsets, first_bags, [](Eviction given) {
                            return given == Eviction::kCustomized;
                          }));
  }
  return keys;
}

at::Tensor keys_of_lookup(const TableGroup& group, const std::optional<at::Tensor>& scores,
                          int64_t num_ids, const at::Tensor& offsets, at::IntArrayRef first_bags) {
  TORCH_CHECK_VALUE(scores || !group.needs_scores(),
                    "a table with eviction 'customized' needs scores, which this lookup has not.");
  if (!scores) return at::Tensor();
  TORCH_CHECK_VALUE(group.needs_scores(),
                    "this lookup has scores, but no table has eviction 'customized'.");
  check_dtype(*scores, "scores", at::kLong);
  check_device(*scores, "scores", group.device());
  check_length(*scores, "scores", num_ids);
  const PolicyMix kinds(group);
  const at::Tensor keys = inverted_sign(scores->contiguous());
  if (kinds.counted == 0) return keys;
  return keys.masked_fill(ids_where(group, keys, offsets, first_bags, sums_scores), 1);
}

const uint64_t* data_of(const at::Tensor& keys) {
  return keys.defined() ? reinterpret_cast<const uint64_t*>(keys.const_data_ptr<int64_t>())
                        : nullptr;
}

void keep_last_scores(const TableGroup& group, const at::Tensor& slots, const uint64_t* keys) {
  if (keys == nullptr || !group.has_customized()) return;
  const int64_t n = slots.numel();
  const auto tables = static_cast<int32_t>(group.num_tables());
  if (!group.device().is_cuda()) {
    hash_table::cpu::keep_last_scores(group.views(), tables, slots.const_data_ptr<int64_t>(), keys,
                                      n, at::get_num_threads());
    return;
  }
#ifdef TORCHREC_HKV_CUDA
  if (!group.deterministic()) return;
  const SortedSlots sorted(slots);
  HKV_ON_DEVICE(group.device(), ,
                hash_table::cuda::keep_last_scores(group.views(), tables, sorted.slot(),
                                                   sorted.position(), keys, n, stream));
#endif
}

at::Tensor scores_of_slots(const TableGroup& group, const at::Tensor& keys,
                           const at::Tensor& slots) {
  const PolicyMix kinds(group);
  if (kinds.customized == 0) return keys;
  if (kinds.all_customized) return inverted_sign(keys);
  at::Tensor scores = keys;
  for (int64_t t = 0; t < group.num_tables(); ++t) {
    const hash_table::TableView& table = group.view(t);
    if (table.eviction != Eviction::kCustomized) continue;
    const int64_t end = table.first_slot + group.full_slots(t);
    scores = inverted_where(scores, slots.ge(table.first_slot).logical_and_(slots.lt(end)));
  }
  return scores;
}

at::Tensor scores_of_tables(const TableGroup& group, const at::Tensor& keys,
                            const at::Tensor& tables) {
  const PolicyMix kinds(group);
  if (kinds.customized == 0) return keys;
  if (kinds.all_customized) return inverted_sign(keys);
  at::Tensor scores = keys;
  for (int64_t t = 0; t < group.num_tables(); ++t) {
    if (group.view(t).eviction == Eviction::kCustomized) {
      scores = inverted_where(scores, tables.eq(t));
    }
  }
  return scores;
}

at::Tensor converted(const TableGroup& group, int64_t table, const at::Tensor& scores) {
  const bool customized = group.view(table).eviction == Eviction::kCustomized;
  return customized ? inverted_sign(scores) : scores;
}

}  // namespace torchrec_hkv::runtime
