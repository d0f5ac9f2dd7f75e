// What happens to the tables of a group as calls go by: entries expire, counts of ids that are not
// admitted are halved. It belongs to each call that counts, after the clock has gone on and before
// the call looks for an id, since only then is the step known, and only to the device.
#pragma once

#include <cstdint>

#include "hash_table/admission_kernels.h"
#include "hash_table/expiry.h"
#include "hash_table/table_view.h"

#ifdef TORCHREC_HKV_CUDA
#include <cuda_runtime.h>
#endif

namespace torchrec_hkv::hash_table {

struct Aging {
  // [num_tables] calls, on the tables' device; 0: a table's entries don't expire. Null: none do.
  const uint32_t* expire_after;
  int32_t num_tables;
  uint32_t most_buckets;         // that one table sweeps in a call
  const Admissions* admissions;  // in host memory, those whose counts are halved; null: none
  bool ages_counts;  // whether a table's policy is kAgedLfu: calls with ids tell it their step
};

namespace cpu {

inline void begin_aged_call(const TableView* tables, int32_t num_tables, const Visit& visit) {
  for (const TableView* table = tables; table < tables + num_tables; ++table) {
    if (table->aged != nullptr) table->begin_aged_call(visit.now());
  }
}

inline void age(const TableView* tables, const Aging& aging, const Visit& visit, int threads) {
  if (aging.expire_after != nullptr) {
    for (int32_t t = 0; t < aging.num_tables; ++t) {
      expire(tables[t], sweep_of_call(aging.expire_after[t], visit.now()), visit, threads);
    }
  }
  if (aging.admissions != nullptr) halve_counts(*aging.admissions, visit, threads);
}

}  // namespace cpu

#ifdef TORCHREC_HKV_CUDA
namespace cuda {

inline void age(const TableView* tables, const Aging& aging, const Visit& visit,
                cudaStream_t stream) {
  if (aging.expire_after != nullptr) {
    expire(tables, aging.expire_after, aging.num_tables, /*all=*/false, aging.most_buckets, visit,
           stream);
  }
  if (aging.admissions != nullptr) halve_counts(*aging.admissions, visit, stream);
}

}  // namespace cuda
#endif

}  // namespace torchrec_hkv::hash_table
