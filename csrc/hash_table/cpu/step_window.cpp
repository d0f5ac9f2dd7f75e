// Moves the windows of CountedSteps.
#include "hash_table/step_window.h"

#include <algorithm>

#include "common/parallel.h"
#include "hash_table/cpu/bucket.h"

namespace torchrec_hkv::hash_table::cpu {

void follow_clock(const TableView& table, uint32_t now, int threads) {
  if (!table.counted.enabled() || table.counted.is_near(now)) return;
  const CountedSteps before = table.counted;
  StepWindow window = *before.window;
  window.begin = now < CountedSteps::kWindow / 2 ? 0 : now - CountedSteps::kWindow / 2;
  // The window ends at the last step at the latest: no step lies behind a wrap.
  window.begin = std::min(window.begin, UINT32_MAX - CountedSteps::kDistance);
  const CountedSteps after{before.words, &window};
  parallel_for(table.num_buckets, 1024, threads, [&](int64_t begin, int64_t end) {
    for (int64_t bucket = begin; bucket < end; ++bucket) {
      // Free slots have undefined words.
      const uint64_t free = match_digests(digest_line(table, bucket), kEmptyDigest);
      for (int32_t p = 0; p < table.bucket_slots; ++p) {
        if ((free >> p & 1) != 0) continue;
        const int64_t slot = bucket * table.bucket_slots + p;
        after.set(slot, before.step(slot), before.count(slot));
      }
    }
  });
  *before.window = window;
}

}  // namespace torchrec_hkv::hash_table::cpu
