#include "runtime/group_admission.h"

#include <c10/core/DeviceGuard.h>

namespace torchrec_hkv::runtime {
namespace {

using hash_table::Admission;
using hash_table::AdmissionKind;
using hash_table::CountCell;
using hash_table::kCellsOfSet;
using hash_table::kSketchRows;

constexpr int64_t kMaxCells = int64_t{1} << 32;

void check_range(const char* what, int64_t value, int64_t least, int64_t most) {
  TORCH_CHECK_VALUE(value >= least && value <= most, "admission: ", what, " is ", value,
                    ", but must be from ", least, " to ", most, ".");
}

int64_t sets_of(const AdmissionConfig& config) {
  return (config.entries + kCellsOfSet - 1) / kCellsOfSet;
}

// Words of 4 bytes in a row of the sketch.
int64_t row_words_of(const AdmissionConfig& config) {
  return config.sketch_bytes / (kSketchRows * static_cast<int64_t>(sizeof(uint32_t)));
}

Admission make_admission(const AdmissionConfig& config, uint64_t seed, const at::Tensor& counts) {
  Admission admission{};
  admission.kind = config.kind;
  admission.count = static_cast<uint32_t>(config.count);
  admission.halve_every = static_cast<uint32_t>(config.halve_every);
  admission.probability = config.probability;
  admission.seed = seed;
  if (config.kind == AdmissionKind::kCounted) {
    admission.cells = reinterpret_cast<CountCell*>(counts.data_ptr());
    admission.num_sets = static_cast<uint64_t>(sets_of(config));
  } else if (config.kind == AdmissionKind::kSketched) {
    admission.sketch = reinterpret_cast<uint32_t*>(counts.data_ptr());
    // Smaller cells allow more cells in a row, and a cell need not count beyond `count`.
    admission.sketch_bits = config.count <= 255 ? 8 : 16;
    admission.sketch_width =
        static_cast<uint64_t>(row_words_of(config)) * 32 / admission.sketch_bits;
  }
  return admission;
}

}  // namespace

int64_t admission_bytes(const AdmissionConfig& config) {
  if (config.kind == AdmissionKind::kCounted || config.kind == AdmissionKind::kSketched) {
    check_range("count", config.count, 2, 65535);
    check_range("halve_every", config.halve_every, 0, 0xffffffffll);
  }
  if (config.kind == AdmissionKind::kCounted) {
    check_range("entries", config.entries, 1, kMaxCells);
    return sets_of(config) * kCellsOfSet * static_cast<int64_t>(sizeof(CountCell));
  }
  if (config.kind == AdmissionKind::kSketched) {
    check_range("sketch_bytes", config.sketch_bytes, 16, 4 * kMaxCells);
    return row_words_of(config) * kSketchRows * static_cast<int64_t>(sizeof(uint32_t));
  }
  TORCH_CHECK_VALUE(config.kind == AdmissionKind::kEvery ||
                        (config.probability > 0.0 && config.probability <= 1.0),
                    "admission: the probability is ", config.probability,
                    ", but must be above 0 and at most 1.");
  return 0;
}

GroupAdmission::GroupAdmission(const std::vector<AdmissionConfig>& configs,
                               const std::vector<uint64_t>& seeds, at::Device device) {
  const c10::OptionalDeviceGuard guard(device);
  const auto tables = static_cast<int64_t>(configs.size());
  at::Tensor host = at::empty({tables * static_cast<int64_t>(sizeof(Admission))}, at::kByte);
  hash_table::Admissions all{};
  bool any = false;
  for (int64_t t = 0; t < tables; ++t) {
    const AdmissionConfig& config = configs[t];
    const int64_t bytes = admission_bytes(config);
    counts_.push_back(at::zeros({bytes}, at::dtype(at::kByte).device(device)));
    reinterpret_cast<Admission*>(host.data_ptr())[t] =
        make_admission(config, seeds[t], counts_.back());
    any = any || config.kind != AdmissionKind::kEvery;
    all.counted = all.counted || config.kind == AdmissionKind::kCounted;
    all.sketched = all.sketched || config.kind == AdmissionKind::kSketched;
    all.halved = all.halved || config.halve_every > 0;
  }
  if (!any) return;
  of_tables_ = host.to(device);
  all.of_tables = reinterpret_cast<const Admission*>(of_tables_.const_data_ptr<uint8_t>());
  all.num_tables = static_cast<int32_t>(tables);
  admissions_ = all;
}

void GroupAdmission::clear(int64_t table) const {
  at::Tensor counts = counts_.at(table);
  if (counts.numel() > 0) counts.zero_();
}

}  // namespace torchrec_hkv::runtime
