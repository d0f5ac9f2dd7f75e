#include "hash_table/expiry.h"

#include "common/parallel.h"
#include "hash_table/cpu/bucket.h"

namespace torchrec_hkv::hash_table::cpu {

void expire(const TableView& table, const Sweep& sweep, const CallContext& context, int threads) {
  const int64_t buckets = sweep_items(sweep, table.num_buckets) / kBucketDigests;
  parallel_for(buckets, 1024, threads, [&](int64_t begin, int64_t end) {
    uint64_t expired = 0;
    for (int64_t i = begin; i < end; ++i) {
      const int64_t bucket = sweep.first + i * sweep.every;
      uint16_t* digests = table.digests + bucket * kBucketDigests;
      uint32_t buffer[kBucketDigests];
      const uint32_t* const steps =
          steps_of(table, bucket * table.bucket_slots, table.bucket_slots, buffer);
      for (int32_t p = 0; p < table.bucket_slots; ++p) {
        // The last step of a free slot is undefined on a CPU.
        if (digests[p] == kEmptyDigest || !is_expired(sweep, context, steps[p])) continue;
        digests[p] = kEmptyDigest;
        ++expired;
      }
    }
    count(table, kExpired, expired);
  });
}

}  // namespace torchrec_hkv::hash_table::cpu
