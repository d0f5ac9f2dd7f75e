// Maintenance of a group's tables in each call: entries expire, counts of ids that are not admitted
// are halved, and on a CPU the windows of CountedSteps follow the clock. It runs in each counted
// call, after the clock has advanced and before the call finds ids: only then is the step known,
// and only to the device.
#pragma once

#include <cstdint>

#include "hash_table/admission_kernels.h"
#include "hash_table/expiry.h"
#include "hash_table/step_window.h"
#include "hash_table/table_view.h"

#ifdef TORCHREC_HKV_CUDA
#include <cuda_runtime.h>
#endif

namespace torchrec_hkv::hash_table {

struct Aging {
  // [num_tables] calls, on the tables' device; 0: a table's entries don't expire. Null: none
  // expire.
  const uint32_t* expire_after;
  int32_t num_tables;
  uint32_t max_buckets;          // of one table in one sweep
  const Admissions* admissions;  // in host memory, counts to halve; null: none
  bool ages_counts;              // whether a table uses kAgedLfu, which needs begin_aged_call
};

namespace cpu {

inline void begin_aged_call(const TableView* tables, int32_t num_tables,
                            const CallContext& context) {
  for (const TableView* table = tables; table < tables + num_tables; ++table) {
    if (table->aged != nullptr) table->begin_aged_call(context.now());
  }
}

inline void age(const TableView* tables, const Aging& aging, const CallContext& context,
                int threads) {
  for (int32_t t = 0; t < aging.num_tables; ++t) follow_clock(tables[t], context.now(), threads);
  if (aging.expire_after != nullptr) {
    for (int32_t t = 0; t < aging.num_tables; ++t) {
      expire(tables[t], sweep_of_call(aging.expire_after[t], context.now()), context, threads);
    }
  }
  if (aging.admissions != nullptr) halve_counts(*aging.admissions, context, threads);
}

}  // namespace cpu

#ifdef TORCHREC_HKV_CUDA
namespace cuda {

inline void age(const TableView* tables, const Aging& aging, const CallContext& context,
                cudaStream_t stream) {
  if (aging.expire_after != nullptr) {
    expire(tables, aging.expire_after, aging.num_tables, /*all=*/false, aging.max_buckets, context,
           stream);
  }
  if (aging.admissions != nullptr) halve_counts(*aging.admissions, context, stream);
}

}  // namespace cuda
#endif

}  // namespace torchrec_hkv::hash_table
