#include "replay/sample.h"

#include <algorithm>

namespace torchrec_hkv::replay {

Taken take(const int64_t* ids, int64_t n, int64_t max_counted, int64_t max_sampled, int64_t* bits,
           int64_t* at, int64_t* sampled) {
  Taken taken{0, 0, 0, 0};
  if (n == 0) return taken;
  int64_t low = ids[0], high = ids[0], counted = 0;
  // Whether an id is taken is unpredictable, so nothing branches on it.
  for (int64_t i = 0; i < n; ++i) {
    const int64_t id = ids[i], hash = mixed(id);
    low = std::min(low, id);
    high = std::max(high, id);
    bits[counted] = hash;
    at[counted] = i;
    counted += hash <= max_counted;
  }
  int64_t count = 0;
  for (int64_t i = 0; i < counted; ++i) {
    sampled[count] = i;
    count += bits[i] <= max_sampled;
  }
  return {counted, count, low, high};
}

}  // namespace torchrec_hkv::replay
