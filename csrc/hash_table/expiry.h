// Expiry removes entries that no call has touched for a number of calls. For both devices.
//
// Each counted call sweeps a part of the buckets, so that every bucket has its turn in a period of
// calls. An entry leaves if its age is more than expire_after calls, at most one period late. A
// sweep reads the last steps of its buckets, 4 bytes a slot.
#pragma once

#include <cstdint>

#include "common/macros.h"
#include "hash_table/table_view.h"

#ifdef TORCHREC_HKV_CUDA
#include <cuda_runtime.h>
#endif

namespace torchrec_hkv::hash_table {

// The buckets of a table that a call sweeps: first, first + every, ...
struct Sweep {
  uint32_t expire_after;  // calls; 0: the table's entries don't expire
  uint32_t first;
  uint32_t every;
};

// Calls in which every bucket is swept once.
HKV_HOST_DEVICE uint32_t sweep_period(uint32_t expire_after) {
  return expire_after < 64 ? expire_after : 64;
}

HKV_HOST_DEVICE Sweep sweep_of_call(uint32_t expire_after, uint32_t step) {
  if (expire_after == 0) return Sweep{0, 0, 1};
  const uint32_t period = sweep_period(expire_after);
  return Sweep{expire_after, step % period, period};
}

HKV_HOST_DEVICE Sweep sweep_of_all(uint32_t expire_after) { return Sweep{expire_after, 0, 1}; }

// Items of a sweep. Each is a slot of a bucket, or is beyond its capacity.
HKV_HOST_DEVICE int64_t sweep_items(const Sweep& sweep, uint32_t num_buckets) {
  if (sweep.expire_after == 0 || sweep.first >= num_buckets) return 0;
  const uint32_t buckets = (num_buckets - sweep.first + sweep.every - 1) / sweep.every;
  return static_cast<int64_t>(buckets) * kBucketDigests;
}

// Whether an entry expires. Pinned entries never do; on a GPU neither do free slots, whose step is
// the highest.
HKV_HOST_DEVICE bool is_expired(const Sweep& sweep, const CallContext& context,
                                uint32_t last_step) {
  return last_step < context.pinned_from() && context.now() - last_step > sweep.expire_after;
}

namespace cpu {

// Frees the slots of a table's expired entries in the buckets of a sweep, and counts them.
void expire(const TableView& table, const Sweep& sweep, const CallContext& context, int threads);

}  // namespace cpu

#ifdef TORCHREC_HKV_CUDA
namespace cuda {

// The same for all tables of a group. expire_after: [num_tables], 0 if entries don't expire. all:
// sweeps every bucket instead of those of the step's turn. max_buckets: of one table in one sweep.
void expire(const TableView* tables, const uint32_t* expire_after, int32_t num_tables, bool all,
            uint32_t max_buckets, const CallContext& context, cudaStream_t stream);

}  // namespace cuda
#endif

}  // namespace torchrec_hkv::hash_table
