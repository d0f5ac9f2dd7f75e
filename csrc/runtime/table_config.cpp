#include "runtime/table_config.h"

#include <c10/util/Exception.h>

#include <atomic>

#include "hash_table/frames.h"
#include "hash_table/geometry.h"

namespace torchrec_hkv::runtime {
namespace {

// From this number of slots on, an index is several times as large as a GPU's L2 cache.
std::atomic<int64_t> packed_from{int64_t{1} << 24};

}  // namespace

void check_config(const TableConfig& config, bool cuda) {
  const auto& name = config.name;
  TORCH_CHECK_VALUE(config.capacity >= 1, "table '", name, "': capacity is ", config.capacity,
                    ", but must be at least 1.");
  TORCH_CHECK_VALUE(config.capacity <= (int64_t{1} << 37), "table '", name, "': capacity is ",
                    config.capacity, ", but must be at most 2^37.");
  TORCH_CHECK_VALUE(config.dim >= 1 && config.dim <= 2048, "table '", name, "': dim is ",
                    config.dim, ", but must be from 1 to 2048.");
  make_initial_rows(config.initial, config.seed, "table '" + name + "': ");
  TORCH_CHECK_VALUE(config.eviction != Eviction::kAgedLfu || config.aging >= 0, "table '", name,
                    "': c of AgedLFU is ", config.aging, ", but must be at least 0.");
  TORCH_CHECK_VALUE(config.column_offset >= 0, "table '", name, "': column offset is ",
                    config.column_offset, ", but must not be negative.");
  TORCH_CHECK_VALUE(config.row_type != RowType::kInt8 || config.column_offset == 0, "table '", name,
                    "': column offset is ", config.column_offset,
                    ", but must be 0 for rows of int8: a row's columns share its scale.");
  TORCH_CHECK_VALUE(config.initial_capacity >= 1 && config.initial_capacity <= config.capacity,
                    "table '", name, "': initial_capacity is ", config.initial_capacity,
                    ", but must be from 1 to the capacity, ", config.capacity, ".");
  const hash_table::Geometry geometry =
      hash_table::geometry_of(config.capacity, config.initial_capacity);
  const int64_t slots = geometry.num_slots();
  TORCH_CHECK_VALUE(config.hbm_slots >= 0 && config.hbm_slots <= slots, "table '", name,
                    "': hbm_slots is ", config.hbm_slots, ", but must be from 0 to ", slots, ".");
  TORCH_CHECK_VALUE(cuda || config.hbm_slots == slots, "table '", name,
                    "': on a CPU hbm_slots must be all ", slots, " slots.");
  TORCH_CHECK_VALUE(
      config.hbm_slots == slots || config.hbm_slots == 0 ||
          hash_table::frames_of_set(slots, geometry.bucket_slots, config.hbm_slots) > 0,
      "table '", name, "': hbm_slots is ", config.hbm_slots, ", but of ", slots,
      " slots must be all, none, or as many as make sets of frames that serve all slots.");
  TORCH_CHECK_VALUE(!config.all_states_in_hbm || (0 < config.hbm_slots && config.hbm_slots < slots),
                    "table '", name, "': states are in HBM apart from rows, but hbm_slots is ",
                    config.hbm_slots, " of ", slots, " slots, so that there are no frames.");
  TORCH_CHECK_VALUE(config.expire_after >= 0 && config.expire_after <= 0xffffffffll, "table '",
                    name, "': expire_after is ", config.expire_after,
                    ", but must be from 1 to 2^32 - 1, or 0 for never.");
  TORCH_CHECK_VALUE(config.remember_evicted >= 0 && config.remember_evicted <= int64_t{1} << 32,
                    "table '", name, "': remember_evicted is ", config.remember_evicted,
                    ", but must be from 1 to 2^32, or 0 for none.");
  TORCH_CHECK_VALUE(
      !config.restore_counts || (config.remember_evicted > 0 && sums_scores(config.eviction)),
      "table '", name,
      "': restore_counts is true, but needs a policy that counts lookups and remember_evicted.");
}

bool can_be_packed(const std::vector<TableConfig>& configs) {
  if (configs.size() != 1 || keeps_scores(configs[0].eviction)) return false;
  const hash_table::Geometry geometry =
      hash_table::geometry_of(configs[0].capacity, configs[0].initial_capacity);
  return geometry.doublings == 0 && geometry.num_slots() >= packed_from;
}

int64_t set_packed_from(int64_t slots) { return packed_from.exchange(slots); }

bool is_counted(const TableConfig& config, at::Device device) {
  const bool counts = config.eviction == Eviction::kLfu || config.eviction == Eviction::kAgedLfu;
  return counts && device.is_cpu();
}

int64_t evicted_bytes(const TableConfig& config) {
  const int64_t arrays = config.restore_counts ? 2 : 1;
  return config.remember_evicted * arrays * static_cast<int64_t>(sizeof(uint16_t));
}

int64_t miniature_bytes(const TableConfig& config) {
  if (!config.adaptive) return 0;
  const int64_t slots =
      hash_table::geometry_of(config.capacity, config.initial_capacity).num_slots();
  return hash_table::MiniatureSize::of(slots).bytes();
}

at::ScalarType scalar_type(RowType type) {
  switch (type) {
    case RowType::kFloat16:
      return at::kHalf;
    case RowType::kBFloat16:
      return at::kBFloat16;
    case RowType::kInt8:
      return at::kChar;
    default:
      return at::kFloat;
  }
}

int64_t stored_width(const TableConfig& config) {
  return row_size(config.row_type, config.dim) / element_size(config.row_type);
}

}  // namespace torchrec_hkv::runtime
