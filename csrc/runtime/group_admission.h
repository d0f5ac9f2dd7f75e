// The admission of a group's tables, and the memory of their counts.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "hash_table/admission.h"
#include "runtime/tensor.h"

namespace torchrec_hkv::runtime {

struct AdmissionConfig {
  hash_table::AdmissionKind kind = hash_table::AdmissionKind::kEvery;
  int64_t count = 0;         // occurrences that an id needs: kCounted and kSketched
  int64_t entries = 0;       // cells, rounded up to whole sets: kCounted
  int64_t sketch_bytes = 0;  // rounded down to whole words of each row: kSketched
  int64_t halve_every = 0;   // calls; 0: never
  double probability = 1.0;  // kProbability
};

// Bytes of a table's counts. Throws ValueError for an invalid config.
int64_t admission_bytes(const AdmissionConfig& config);

class GroupAdmission {
 public:
  // seeds: seeds of the tables, mixed with their names.
  GroupAdmission(const std::vector<AdmissionConfig>& configs, const std::vector<uint64_t>& seeds,
                 at::Device device);

  // The admissions in host memory, with pointers to the group's device; null if all tables admit
  // all ids.
  const hash_table::Admissions* get() const { return admissions_ ? &*admissions_ : nullptr; }
  int64_t bytes(int64_t table) const { return counts_.at(table).numel(); }
  // A table's counts: bytes of cells or of a sketch, on the group's device; empty if the table does
  // not count.
  const at::Tensor& counts(int64_t table) const { return counts_.at(table); }
  // Clears a table's counts.
  void clear(int64_t table) const;

 private:
  std::vector<at::Tensor> counts_;  // bytes of cells or of a sketch; empty without counts
  at::Tensor of_tables_;            // bytes of Admission[tables], on the device
  std::optional<hash_table::Admissions> admissions_;
};

}  // namespace torchrec_hkv::runtime
